"""Replicas with parameters of their own, and outer steps that bring them together every H steps.

Over the mesh axis of the replicas, gradients are not summed: each replica takes steps on its part of the batch, as a
run of its own on the rest of the mesh. An outer step is a function of the state that runs after every H inner steps
and may communicate over that axis. ``average_replicas`` is the plainest: local SGD (arXiv:1805.09767).

    inner = train_step(...)                                  # gradients are summed over the other axes
    step = over_replicas(outer_step(inner, 10, average_replicas("data")), "data")
    abstract = replica_states(abstract_state(...), "data")   # a row of each array for each replica
    jit_step(step, abstract)

Legend: R replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.train.step.step_chain import Step
from jaxllm.train.step.train_state import TrainState
from sharding import ShardingError

OuterStep = Callable[[TrainState], TrainState]
"""``state of one replica -> state of one replica``; collectives run over the axis of the replicas."""
SUMMED = ("tokens",)
"""Metrics that are summed over replicas; others are means."""


def outer_step(step: Step, every: int, outer: OuterStep) -> Step:
    """Training step that is followed by an outer step after every ``every`` steps.

    Args:
        step: the inner step.
        every: H, inner steps between two outer steps.
        outer: the outer step; its own state is in ``TrainState.extras``.

    Raises:
        ValueError: ``every`` is less than 1.
    """
    if every < 1:
        raise ValueError(f"outer step: every = {every}; give 1 or more inner steps.")

    def run(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        state, metrics = step(state, batch)
        return jax.lax.cond(state.step % every == 0, outer, lambda state: state, state), metrics

    return run


def average_replicas(axis: str) -> OuterStep:
    """Outer step that replaces the parameters of all replicas by their mean; optimizer states stay as they are.

    Args:
        axis: mesh axis of the replicas.
    """

    def outer(state: TrainState) -> TrainState:
        return replace(state, params=jax.tree.map(lambda p: jax.lax.pmean(p, axis), state.params))

    return outer


def over_replicas(step: Step, axis: str) -> Step:
    """Training step of all replicas at once: ``(states, batch) -> (states, metrics)``.

    Args:
        step: of one replica.
        axis: mesh axis of the replicas. The rows of the batch are split over it first, and the states are those of
            ``replica_states``. Metrics are means over the replicas, and ``tokens`` is the sum.
    """

    def local(states: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        state, metrics = step(_map_rows(lambda x: x[0], states), batch)
        total = {name: jax.lax.psum(value, axis) for name, value in metrics.items() if name in SUMMED}
        means = {name: jax.lax.pmean(value, axis) for name, value in metrics.items() if name not in SUMMED}
        return _map_rows(lambda x: x[None], state), means | total

    def run(states: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        whole, rows = PartitionSpec(), PartitionSpec(axis)
        there = replace(_map_rows(lambda x: rows, states), step=whole, rng=whole)
        # check_vma=False: otherwise the initial values of all loops would have to be marked as varying.
        return jax.shard_map(
            local, in_specs=(there, rows), out_specs=(there, whole), axis_names={axis}, check_vma=False
        )(states, batch)

    return run


def replica_states(abstract: TrainState, axis: str) -> TrainState:
    """Shapes and shardings of the states of all replicas: arrays get a first dimension of size R, split over ``axis``.

    Args:
        abstract: of one replica (``abstract_state``), on the whole mesh.
        axis: mesh axis of the replicas.

    Raises:
        ShardingError: the mesh has no such axis, or the state is already split over it.
    """

    def row(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        there = leaf.sharding
        assert isinstance(there, NamedSharding)
        if axis not in there.mesh.shape:
            raise ShardingError(f"the mesh has no axis {axis!r} for replicas; it has {', '.join(there.mesh.shape)}.")
        used = {name for part in there.spec for name in (part if isinstance(part, tuple) else (part,))}
        if axis in used:
            raise ShardingError(
                f"the train state is split over the mesh axis {axis!r}, so its devices cannot have replicas of their "
                'own; take an axis that parameters are not split over, such as "data".'
            )
        spec = PartitionSpec(axis, *there.spec)
        memory = NamedSharding(there.mesh, spec, memory_kind=there.memory_kind)
        return jax.ShapeDtypeStruct((there.mesh.shape[axis], *leaf.shape), leaf.dtype, sharding=memory)

    return _map_rows(row, abstract)


def copy_to_replicas(state: TrainState, abstract: TrainState) -> TrainState:
    """States of all replicas that begin with the same values.

    Args:
        state: of one replica (``init_state``).
        abstract: from ``replica_states``.
    """
    there = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    replicas = jax.tree.leaves(abstract.params)[0].shape[0]
    copy: Any = jax.jit(lambda state: _map_rows(lambda x: jnp.stack([x] * replicas), state), out_shardings=there)
    return copy(state)


def _map_rows(fn: Callable[[Any], Any], state: TrainState) -> TrainState:
    """Maps what each replica has of its own; step and RNG key are shared."""
    own = jax.tree.map(fn, (state.params, state.opt_state, state.extras))
    return replace(state, params=own[0], opt_state=own[1], extras=own[2])
