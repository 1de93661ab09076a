"""Reference small model of the proofs of training policies, on the bundled text."""

from __future__ import annotations

import dataclasses
import functools
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.data import Batch, DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, functional
from jaxllm.optim import OptimConfig, ScheduleConfig, optimizer, schedule
from jaxllm.train import RunConfig, loss_sums, train_step, value_and_grad
from jaxllm.train.step.step_builder import step_links
from jaxllm.train.step.step_chain import link_states
from jaxllm.train.step.train_state import TrainState
from tests import quick

ROWS, LENGTH, STEPS, HELD_OUT = 16, 32, 300, 1024

BLOCK = BlockConfig(AttentionConfig(heads=2, kv_heads=2, head_dim=16, qk_norm="head"), MlpConfig(hidden=96))
RUN = RunConfig(
    model=DecoderConfig(vocab_size=256, embed_dim=32, layers=2, pattern=(BLOCK,)),
    data=DataConfig(seq_len=LENGTH, batch_size=ROWS),
    optim=OptimConfig(schedule=ScheduleConfig(kind="wsd", peak=6e-3, warmup=0.05, decay=0.5, floor=0.01)),
    steps=STEPS,
)
"""The quickstart's plan on bytes: its kind of block, schedule and optimizer, far fewer parameters."""


@functools.cache
def text() -> np.ndarray:
    return np.frombuffer(resources.files("jaxllm.data.corpus").joinpath("train.txt").read_bytes(), np.uint8)


@functools.cache
def held_out() -> np.ndarray:
    return np.frombuffer(resources.files("jaxllm.data.corpus").joinpath("heldout.txt").read_bytes(), np.uint8)


def batch_at(rng: np.random.Generator, count: int = ROWS, source: Any = text) -> Batch:
    """Rows of bytes from anywhere in a text."""
    starts = rng.integers(0, len(source()) - LENGTH - 1, count)
    rows = np.stack([source()[s : s + LENGTH + 1] for s in starts]).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (count, LENGTH))
    return Batch(rows[:, :-1], rows[:, 1:], np.ones((count, LENGTH), np.int32), positions.copy())


@functools.cache
def stepper(run: RunConfig) -> tuple[Any, Any]:
    """A run's optimizer and its step, compiled once for all seeds."""
    model = functional(run.model)
    transform = optimizer(run.optim, run.steps, model.logical_axes())
    grads, rate = value_and_grad(model, accumulate=run.accumulate), schedule(run.optim.schedule, run.steps)
    return transform, quick.jit(train_step(grads, transform, rate, step_links(run)), donate_argnums=0)


def trained(run: RunConfig, seed: int, first: Any = None) -> tuple[TrainState, list[dict[str, float]]]:
    """The state after all steps, and each step's metrics; a seed draws the same parameters and data for every run.

    Args:
        first: parameters to begin from, which are copied: steps donate theirs; None: drawn ones.
    """
    transform, step = stepper(run)
    if first is None:
        first = quick.params(dataclasses.replace(run.model, param_dtype="float32"), seed, scale=0.15)
    params = jax.tree.map(lambda x: jnp.array(x, run.model.param_dtype), first)
    extras = {name: init(params) for name, init in link_states(step_links(run)).items()}
    state = TrainState(params, transform.init(params), jnp.int32(0), jax.random.key(seed), extras)
    rng, said = np.random.default_rng(seed), []
    for _ in range(run.steps):
        state, metrics = step(state, batch_at(rng, run.data.batch_size))
        said.append(metrics)
    return state, [{name: float(value) for name, value in row.items()} for row in jax.device_get(said)]


def evaluated(run: RunConfig, params: Any) -> float:
    """Nats per token on held-out text, the same rows for all."""
    rng, parts = np.random.default_rng(0), 4
    made = [summer(run)(params, batch_at(rng, HELD_OUT // parts, held_out)) for _ in range(parts)]
    return float(sum(s.nll for s in made) / sum(s.count for s in made))


@functools.cache
def summer(run: RunConfig) -> Any:
    model = functional(run.model)
    return quick.jit(lambda p, b: loss_sums(model, p, b))
