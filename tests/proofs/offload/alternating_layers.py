"""Few bits in experts beside few bits in the dense layers of the same model, which alternate with them (MoQE)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models import BlockConfig, DecoderConfig, Functional, MlpConfig, functional
from jaxllm.models.attention_context import Segments
from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.grids import IntGrid
from jaxllm.quant.packing import packed_weight
from tests import environment
from tests.proofs.harness import proof
from tests.proofs.offload.quantised_experts import BITS, GROUP
from tests.proofs.offload.trained_mixture import ACTIVE, ATTENTION, BLOCK, HIDDEN, held_out, trained

MIXED = DecoderConfig(256, 32, 4, pattern=(BlockConfig(ATTENTION, MlpConfig(ACTIVE * HIDDEN)), BLOCK))
"""Every other layer is a mixture; a token takes as many units of it as a dense layer has."""
PARTS: dict[str, Callable[[str], bool]] = {
    "experts": lambda path: "/experts/" in path,
    "dense": lambda path: "/mlp/" in path and "/experts/" not in path,
}
ROWS, TOGETHER = 3300, 300


def changed(model: Functional, params: Any, part: str, change: Callable[[Any, int], Any]) -> tuple[Any, int]:
    """Parameters with the matrices of a part changed, by ``change(matrix, axis)``, and the bytes that these had."""
    sizes = list[int]()

    def one(path: str, weight: Any, axis: int) -> Any:
        if not PARTS[part](path):
            return weight
        sizes.append(weight.nbytes)
        return change(weight, axis)

    return model.map_matrices(params, one), sum(sizes)


def rounded_to(bits: int) -> Callable[[Any, int], Any]:
    """Rounds a matrix to the nearest values of so many bits, in groups of inputs."""
    return lambda weight, axis: packed_weight(CodeGroups(IntGrid(bits), GROUP, axis), weight).dense(weight.dtype)


def loss_of(model: Functional) -> Callable[[Any], float]:
    """Mean negative log-likelihood of nearly all held-out bytes, in nats, as a function of parameters."""
    text = held_out(ROWS, 65).reshape(-1, TOGETHER, 65)
    positions = jnp.broadcast_to(jnp.arange(64), (TOGETHER, 64))

    @jax.jit
    def loss(params: Any, rows: Any) -> Any:
        hidden, _ = model.forward(params, rows[:, :-1], positions, Segments())
        scores = jax.nn.log_softmax(model.head(params, hidden))
        return -jnp.mean(jnp.take_along_axis(scores, rows[:, 1:, None], axis=-1))

    return lambda params: float(np.mean([loss(params, jnp.asarray(rows)) for rows in text]))


@proof(
    "offload",
    cases=range(3),
    sample=1,
    counts=(*(f"{part}_{bits}" for part in PARTS for bits in BITS), "without_experts", "without_dense"),
)
def experts_lose_less_than_dense_layers(seed: int) -> dict[str, float]:
    """Models whose layers are by turns dense and mixtures, trained on the bundled text: the experts rounded to 2, 3 or
    4 bits raise the held-out loss less than the dense layers, of an eighth of the bytes, in as many bits.

    Rises of the loss are kept, in nats; also those without the results of the experts, and of the dense layers.
    """
    model, rises, sizes = functional(MIXED), dict[str, float](), dict[str, int]()
    with environment.optimized():
        params, loss = trained(seed, MIXED), loss_of(model)
        before = loss(params)
        for part in PARTS:
            for bits in BITS:
                few, sizes[part] = changed(model, params, part, rounded_to(bits))
                rises[f"{part}_{bits}"] = loss(few) - before
            none, _ = changed(model, params, part, lambda weight, _: jnp.zeros_like(weight))
            rises[f"without_{part}"] = loss(none) - before
    assert sizes["experts"] == 8 * sizes["dense"]
    for bits in BITS:
        assert rises[f"experts_{bits}"] < rises[f"dense_{bits}"]
    assert rises["without_experts"] > 0.05, "the experts do something"
    return rises
