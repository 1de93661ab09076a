"""Joint training step: the adapters of several runs over one frozen base, as one compiled program.

    gradients    one forward and backward pass of the rows of all runs: ``vmap`` over the adapters, with the base left
                 unbatched, so that its matmuls read each weight once for all runs
    updates      of each run by itself: optimizer, learning rate and step links are its own, and may be of other kinds

The state of a run has None in place of the base's parameters, which are an argument of their own and not donated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import sharding
from jaxllm.models.param_subset import merge, select
from jaxllm.train.step.train_state import TrainState
from jaxllm.train.step.training_step import ValueAndGrad

Update = Callable[[TrainState, Any, Any], tuple[TrainState, dict[str, Any]]]
"""``(state, batch, gradients) -> (state, metrics)``: ``SplitStep.update`` of a run."""
JointStep = Callable[[Any, tuple[TrainState, ...], tuple[Any, ...]], tuple[Any, Any]]
"""``(base, states, batches) -> (states, metrics)``, with a member for each run."""


def joint_step(value_and_grad: ValueAndGrad, updates: Sequence[Update], saved: Any) -> JointStep:
    """Training step of several runs.

    Args:
        value_and_grad: loss sums and gradients of one run's batch; the runs share it.
        updates: of each run.
        saved: tree of booleans, True for the parameters that are a run's own (``run_model.saved_params``).
    """

    def step(base: Any, states: tuple[TrainState, ...], batches: tuple[Any, ...]) -> tuple[Any, Any]:
        own = _stack([state.params for state in states])
        found = jax.vmap(lambda own, batch: value_and_grad(merge(own, base), batch))(own, _stack(batches))
        results = []
        for number, (update, state, batch) in enumerate(zip(updates, states, batches, strict=True)):
            gradients = jax.tree.map(lambda x, number=number: x[number], found)
            new, metrics = update(replace(state, params=merge(state.params, base)), batch, gradients)
            results.append((replace(new, params=select(saved, new.params)), metrics))
        return tuple(state for state, _ in results), tuple(metrics for _, metrics in results)

    return step


def jit_joint_step(step: JointStep, abstract: tuple[TrainState, ...]) -> JointStep:
    """Jitted joint step: the states are donated, the base is not.

    Args:
        step: from ``joint_step``.
        abstract: shapes and shardings of the states, without the base.
    """
    return jax.jit(step, donate_argnums=1, out_shardings=(sharding.shardings_of(abstract), None))


def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
