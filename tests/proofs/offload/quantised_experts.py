"""Experts in few bits: what they cost on held-out text, beside the dense matrices of their model (MoQE)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxllm.models import Functional, functional
from jaxllm.quant import pack_params
from jaxllm.quant.formats.code_groups import CodeGroups
from jaxllm.quant.grids import IntGrid
from jaxllm.quant.packing import packed_weight
from tests.proofs.harness import proof
from tests.proofs.offload.trained_mixture import CONFIG, DENSE, held_out_loss, trained

BITS, GROUP = (2, 3, 4), 32
PARTS: dict[str, Callable[[str], bool]] = {
    "experts": lambda path: "/experts/" in path,
    "attention": lambda path: "/mlp/" not in path,
    "dense_model": lambda path: "/mlp/" in path,
}
"""What is rounded: the mixture's experts, its attention, or the feed-forward layers of a dense model of its bytes."""


def rounded(model: Functional, params: Any, bits: int, part: str) -> tuple[Any, int]:
    """Parameters with the matrices of a part rounded to the nearest, and the bytes that these had."""
    sizes = list[int]()

    def one(path: str, weight: Any, axis: int) -> Any:
        if not PARTS[part](path):
            return weight
        sizes.append(weight.nbytes)
        return packed_weight(CodeGroups(IntGrid(bits), GROUP, axis), weight).dense(weight.dtype)

    return model.map_matrices(params, one), sum(sizes)


@proof("offload", cases=range(3), sample=1, counts=tuple(f"{part}_{bits}" for part in PARTS for bits in BITS))
def few_bits_cost_less_in_experts(seed: int) -> dict[str, float]:
    """All experts rounded to 2, 3 or 4 bits cost less held-out loss than the attention, a tenth of their bytes or less.

    Rises of the loss are kept, in nats; also those of a dense model whose feed-forward layers have the experts' bytes:
    in 2 bits they lose more than the experts.
    """
    rises = {}
    for config, parts in ((CONFIG, ("experts", "attention")), (DENSE, ("dense_model",))):
        model, params = functional(config), trained(seed, config)
        loss = held_out_loss(model)
        before = loss(params)
        bytes_of = {}
        for part in parts:
            for bits in BITS:
                few, bytes_of[part] = rounded(model, params, bits, part)
                rises[f"{part}_{bits}"] = loss(few) - before
        if config is CONFIG:
            assert bytes_of["experts"] > 10 * bytes_of["attention"]
            served = loss(pack_params(model, params, "experts_int4")) - before  # groups are the whole inputs here
            np.testing.assert_allclose(served, rises["experts_4"], atol=1e-5)
    for bits in BITS:
        assert rises[f"experts_{bits}"] < rises[f"attention_{bits}"]
    assert rises["experts_2"] < rises["dense_model_2"]
    return rises
