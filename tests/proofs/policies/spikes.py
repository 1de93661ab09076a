"""Loss spikes: no false alarms, and a skipped batch leaves no trace."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models import functional
from jaxllm.optim import optimizer, schedule
from jaxllm.train import SpikeConfig, train_step, value_and_grad
from jaxllm.train.step.loss_spikes import init_spike_detector
from jaxllm.train.step.step_links import spike_detection
from jaxllm.train.step.train_state import TrainState
from tests import quick
from tests.proofs.harness import proof
from tests.proofs.policies.reference import RUN, batch_at

SKIP = SpikeConfig("skip")
"""As it comes: a window of 128 steps, seven deviations."""
BAD = {"targets": "the same target everywhere", "random": "random targets", "gradients": "no numbers"}


@functools.cache
def stepper() -> tuple[Any, Any]:
    """The reference run's optimizer and step; a batch of no targets but -1 in the first row has gradients of NaN."""
    model = functional(RUN.model)
    transform = optimizer(RUN.optim, RUN.steps, model.logical_axes())
    plain, rate = value_and_grad(model), schedule(RUN.optim.schedule, RUN.steps)

    def grads(params: Any, batch: Any) -> Any:
        sums, found = plain(params, batch)
        return sums, jax.tree.map(lambda g: jnp.where(jnp.all(batch.targets[0] < 0), jnp.nan, g), found)

    links = [link for link in [spike_detection(SKIP, rate)] if link is not None]
    return transform, quick.jit(train_step(grads, transform, rate, links), donate_argnums=0)


def trained(seed: int, spoil: dict[int, str], leave_out: frozenset[int] = frozenset()) -> tuple[TrainState, list[int]]:
    """The state after all batches but some, and the numbers of those that were spikes."""
    transform, step = stepper()
    params = jax.tree.map(jnp.asarray, quick.params(RUN.model, seed, scale=0.15))
    state = TrainState(
        params,
        transform.init(params),
        jnp.int32(0),
        jax.random.key(seed),
        {"spikes": jax.tree.map(jnp.copy, init_spike_detector(SKIP))},
    )
    rng, wild, seen = np.random.default_rng(seed), np.random.default_rng(seed + 1), []
    for number in range(RUN.steps):
        batch = batch_at(rng)
        if number in leave_out:
            continue
        if number in spoil:
            batch = batch._replace(targets=spoilt(spoil[number], batch.targets, wild))
        state, metrics = step(state, batch)
        seen.append((number, metrics["spike"]))
    return state, [number for number, spike in jax.device_get(seen) if spike]


def spoilt(how: str, targets: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    out = targets.copy()
    if how == "gradients":
        out[0] = -1
    else:
        out[:] = 7 if how == "targets" else rng.integers(128, 256, out.shape)  # bytes that the text has not
    return out


@proof("policies", cases=(0, 1, 2), sample=1, bound={"false_alarms": 0})
def calm(seed: int) -> dict[str, float]:
    """The reference run on text alone: number of steps that are taken for spikes."""
    state, seen = trained(seed, {})
    assert int(state.step) == RUN.steps
    return {"false_alarms": len(seen)}


@proof("policies", cases=tuple(BAD), sample=1, bound={"missed": 0, "different_numbers": 0})
def skipped(how: str) -> dict[str, float]:
    """Three bad batches in the reference run: all and no others are skipped, and not a bit of the parameters or the
    optimizer's state differs from the run that never saw them."""
    bad = (170, 171, 240)  # after the first window, in which the loss still falls steeply
    state, seen = trained(0, dict.fromkeys(bad, how))
    without, _ = trained(0, {}, frozenset(bad))
    pairs = zip(*(jax.tree.leaves(jax.device_get((s.params, s.opt_state))) for s in (state, without)), strict=True)
    wrong = sum(int(np.sum(a.view(np.uint8) != b.view(np.uint8))) if a.ndim else int(a != b) for a, b in pairs)
    return {"missed": len(set(bad) ^ set(seen)), "different_numbers": wrong}
