"""Optimizers against gradient descent with momentum, at equal tuning effort, on real text."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.data import Batch, DataConfig, load_dataset
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, functional
from jaxllm.optim import optimizer
from jaxllm.train import RunConfig, TrainState
from jaxllm.train.step.loss import value_and_grad
from jaxllm.train.step.step_builder import build_step
from tests.optim.kinds import WHOLE, named
from tests.proofs.harness import proof

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
"""Of every optimizer: none is tuned more than another."""
STEPS, LAST, ROWS, LENGTH = 200, 20, 8, 64
NOT_FASTER = ("sgd", "lomo", "mezo")
"""LOMO is descent without momentum, MeZO is for models that were trained."""


@functools.cache
def batches() -> Any:
    """Int[steps B S] of the quickstart's text, a token a byte."""
    config = DataConfig(source="shakespeare", tokenizer="byte", batch_size=ROWS, seq_len=LENGTH)
    train = load_dataset(config).train
    return jax.tree.map(lambda *rows: np.stack(rows), *(Batch(*train.batch_at(n)) for n in range(STEPS)))


@functools.cache
def best(name: str) -> float:
    """The lowest loss of the grid: nats a byte, mean of the last steps."""
    block = BlockConfig(AttentionConfig(4, 4, 16), MlpConfig(128))
    model_config = DecoderConfig(vocab_size=512, embed_dim=64, layers=2, pattern=(block,), remat="full")
    model = functional(model_config)
    run = RunConfig(model=model_config, optim=named(name), steps=STEPS, data=DataConfig(batch_size=ROWS))
    grads = value_and_grad(model)

    def losses(peak: jax.Array, data: Any) -> jax.Array:
        # The rate is an argument, so that a grid of them is one program: warm-up over a tenth, then constant.
        rate = lambda count: peak * jnp.minimum(1.0, (count + 1) / (STEPS / 10))  # noqa: E731
        with mock.patch("jaxllm.optim.build.schedule", return_value=rate):
            transform = optimizer(run.optim, STEPS, model.logical_axes())
            params = model.init(jax.random.key(0))
            state = TrainState(params, transform.init(params), jnp.zeros((), jnp.int32), jax.random.key(1))
            step = build_step(run, model, grads, transform)
            return jax.lax.scan(lambda state, batch: (lambda s, m: (s, m["nll"]))(*step(state, batch)), state, data)[1]

    jitted = jax.jit(losses)
    found = [float(np.mean(jitted(jnp.float32(rate), batches())[-LAST:])) for rate in RATES]
    return min(loss for loss in found if np.isfinite(loss))


@proof(
    "optimizers",
    cases=[n for n in WHOLE if n not in NOT_FASTER],
    sample=1,
    bound={"loss over sgd's": 0.99},
)
def beats_descent(name: str) -> dict[str, float]:
    """The best of seven learning rates, over the best of the same seven of descent with momentum."""
    return {"loss over sgd's": best(name) / best("sgd")}
