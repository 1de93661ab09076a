"""A small mixture of experts trained on the bundled text, and a dense model of its bytes, for proofs of experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int

from jaxllm.models import (
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    Functional,
    MlpConfig,
    MoeConfig,
    RouterConfig,
    functional,
)
from jaxllm.models.attention_context import Segments
from jaxllm.train import train_step, value_and_grad
from jaxllm.train.step.routing_losses import RoutingConfig
from jaxllm.train.step.train_state import TrainState
from tests import quick
from tests.proofs.moe_models.training import batch_at

EXPERTS, ACTIVE, LAYERS, STEPS, HIDDEN = 16, 2, 3, 400, 24
ATTENTION = AttentionConfig(4, 2, 8)
BLOCK = BlockConfig(ATTENTION, MoeConfig(EXPERTS, ACTIVE, HIDDEN, router=RouterConfig()))
CONFIG = DecoderConfig(256, 32, LAYERS, pattern=(BLOCK,))
DENSE = DecoderConfig(256, 32, LAYERS, pattern=(BlockConfig(ATTENTION, MlpConfig(EXPERTS * HIDDEN)),))
"""A feed-forward layer of as many bytes as all experts of a layer have."""


@functools.cache
def trained(seed: int, config: DecoderConfig = CONFIG) -> Any:
    """Parameters of a model of bytes, trained on the bundled text; a mixture with a load-balancing loss."""
    rate = optax.linear_schedule(1e-2, 0.0, STEPS)
    model, optimizer = functional(config), optax.adam(rate)
    params: Any = jax.tree.map(jnp.asarray, quick.params(config, seed, scale=0.25))
    balance = RoutingConfig(balance_loss=0.02) if config.mixtures else RoutingConfig()
    step = train_step(value_and_grad(model, routing=balance), optimizer, rate, [], [])
    run = quick.jit(step, donate_argnums=0)
    state = TrainState(params, optimizer.init(params), jnp.int32(0), jax.random.key(seed))
    rng = np.random.default_rng(seed)
    for _ in range(STEPS):
        state, _ = run(state, batch_at(rng))
    return state.params


def held_out(rows: int, length: int) -> Int[np.ndarray, "R L"]:
    """Rows of bytes of the held-out text, one after another."""
    text = np.frombuffer(resources.files("jaxllm.data.corpus").joinpath("heldout.txt").read_bytes(), np.uint8)
    return text[: rows * length].astype(np.int32).reshape(rows, length)


def held_out_loss(model: Functional, rows: int = 256, length: int = 65) -> Callable[[Any], float]:
    """Mean negative log-likelihood of held-out bytes, in nats, as a function of parameters."""
    text = jnp.asarray(held_out(rows, length))

    @quick.jit
    def loss(params: Any) -> Any:
        positions = jnp.broadcast_to(jnp.arange(length - 1), (rows, length - 1))
        hidden, _ = model.forward(params, text[:, :-1], positions, Segments())
        scores = jax.nn.log_softmax(model.head(params, hidden))
        return -jnp.mean(jnp.take_along_axis(scores, text[:, 1:, None], axis=-1))

    return lambda params: float(loss(params))
