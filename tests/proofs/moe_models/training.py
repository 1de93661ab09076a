"""A small mixture of experts trained on the bundled text: load balancing keeps its experts in use."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxllm.data import Batch
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MoeConfig, RouterConfig, functional
from jaxllm.train import loss_sums, train_step, value_and_grad
from jaxllm.train.step.routing_losses import RoutingConfig, routing_metrics
from jaxllm.train.step.step_links import balance_biases, routing_report
from jaxllm.train.step.train_state import TrainState
from tests import quick
from tests.proofs.harness import proof

EXPERTS, ROWS, LENGTH, STEPS = 4, 16, 32, 150
PEAK = 1e-2
WAYS = {
    "nothing": RoutingConfig(),
    "balance loss": RoutingConfig(balance_loss=0.1),
    "bias": RoutingConfig(bias_rate=0.02),
}


@functools.cache
def text() -> np.ndarray:
    return np.frombuffer(resources.files("jaxllm.data.corpus").joinpath("train.txt").read_bytes(), np.uint8)


def batch_at(rng: np.random.Generator, count: int = ROWS) -> Batch:
    """Rows of bytes from anywhere in the text."""
    starts = rng.integers(0, len(text()) - LENGTH - 1, count)
    rows = np.stack([text()[s : s + LENGTH + 1] for s in starts]).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (count, LENGTH))
    return Batch(rows[:, :-1], rows[:, 1:], np.ones((count, LENGTH), np.int32), positions.copy())


def trained(way: str, seed: int) -> dict[str, float]:
    """Load of the fullest and the emptiest expert relative to an even one, and held-out loss of the trained model."""
    routing = WAYS[way]
    router = RouterConfig(normalize=False, balance_bias=bool(routing.bias_rate))
    block = BlockConfig(AttentionConfig(2, 1, 8), MoeConfig(EXPERTS, 1, 16, router=router))
    config = DecoderConfig(256, 16, 2, pattern=(block,))
    rate = optax.linear_schedule(PEAK, 0.0, STEPS)
    model, optimizer = functional(config), optax.adam(rate)
    params: Any = jax.tree.map(jnp.asarray, quick.params(config, seed, scale=0.25))
    links = [link for link in [balance_biases(config, routing.bias_rate)] if link is not None]
    step = train_step(value_and_grad(model, routing=routing), optimizer, rate, links, [routing_report(config)])
    run = quick.jit(step, donate_argnums=0)
    state = TrainState(params, optimizer.init(params), jnp.int32(0), jax.random.key(seed))
    rng = np.random.default_rng(seed)
    for _ in range(STEPS):
        state, _ = run(state, batch_at(rng))
    sums = quick.jit(lambda p, b: loss_sums(model, p, b, routing=RoutingConfig()))(
        state.params, batch_at(rng, 16 * ROWS)
    )
    figures = routing_metrics(config, sums.routing, sums.count)
    most, least = (float(figures[f"expert_load_{name}"]) for name in ("max", "min"))
    return {"most": most, "least": least, "nll": float(sums.nll / sums.count)}


@proof("moe_models", cases=(0, 1, 2), sample=1)
def experts_stay_in_use(seed: int) -> None:
    """Within twice the even load with the loss or the bias, beyond it without; and the model learns."""
    loads = {way: trained(way, seed) for way in WAYS}
    assert loads["nothing"]["most"] > 2.5, loads
    for way in ("balance loss", "bias"):
        assert loads[way]["most"] < 2, loads
        assert loads[way]["nll"] < 3.4, loads
