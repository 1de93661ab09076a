"""Replicas with parameters of their own, and outer steps that bring them together every H steps.

Over the mesh axis ``replica``, gradients are not summed: each replica takes steps on its part of the batch, as a run of
its own on the rest of the mesh. No collective runs over that axis inside a round. After H steps an outer step, a
function of the state of all replicas, communicates over it (``jaxllm.train.outer.outer_step``): plain means of the
parameters are local SGD (arXiv:1805.09767).

    inner = train_step(...)                                       # gradients are summed over the other axes
    step = with_outer_step(over_replicas(inner), 10, outer)
    abstract = replica_states(abstract_state(...))                # a row of each array for each replica
    jit_step(step, abstract)

The state of all replicas is a ``TrainState`` whose ``params`` are those after the last outer step, common to all
replicas; they are what is evaluated and exported. The replicas' own parameters are the extra ``replica_params``.

Legend: R replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.config import ConfigError
from jaxllm.parallel.pipeline.stage_messages import SlowLinks
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.step.step_chain import Step
from jaxllm.train.step.train_state import TrainState
from sharding import ShardingError

REPLICA = "replica"
"""Mesh axis of the replicas."""
REPLICA_PARAMS = "replica_params"
"""Name of the replicas' own parameters in ``TrainState.extras``, and of their leaves in checkpoints."""
COMMON = "outer"
"""Name of an outer step's state that all replicas share."""
OWN = "outer_own"
"""Name of an outer step's state that each replica has of its own."""

OuterStep = Callable[[TrainState], TrainState]
"""``state of all replicas -> state of all replicas``."""
SUMMED = ("tokens",)
"""Metrics that are summed over replicas; others are means."""


def with_outer_step(step: Step, every: int, outer: OuterStep) -> Step:
    """Training step of all replicas that is followed by an outer step after every ``every`` steps.

    Args:
        step: from ``over_replicas``.
        every: H, inner steps between two outer steps.
        outer: the outer step.

    Raises:
        ValueError: ``every`` is less than 1.
    """
    if every < 1:
        raise ValueError(f"outer step: every = {every}; give 1 or more inner steps.")

    def run(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        state, metrics = step(state, batch)
        return jax.lax.cond(state.step % every == 0, outer, lambda state: state, state), metrics

    return run


def over_replicas(step: Step) -> Step:
    """Training step of all replicas at once: ``(states, batch) -> (states, metrics)``, without an outer step.

    Args:
        step: of one replica. The rows of the batch are split over the replicas first.

    Returns:
        the step; its metrics have a row for each replica (``replica_means``), because their mean would be a collective
        between the replicas.
    """

    def local(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        state, metrics = step(_map_rows(lambda x: x[0], state), batch)
        return _map_rows(lambda x: x[None], state), jax.tree.map(lambda x: x[None], metrics)

    def run(states: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        own = {name: one for name, one in states.extras.items() if name not in (REPLICA_PARAMS, COMMON, OWN)}
        given = replace(states, params=states.extras[REPLICA_PARAMS], extras=own)
        whole, rows = PartitionSpec(), PartitionSpec(REPLICA)
        there = replace(_map_rows(lambda x: rows, given), step=whole, rng=whole)
        # check_vma=False: otherwise the initial values of all loops would have to be marked as varying.
        found, metrics = jax.shard_map(
            local, in_specs=(there, rows), out_specs=(there, rows), axis_names={REPLICA}, check_vma=False
        )(given, batch)
        extras = {**states.extras, **found.extras, REPLICA_PARAMS: found.params}
        return replace(found, params=states.params, extras=extras), metrics

    return run


def replica_means(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of a step as host arrays: means over the replicas that this process has devices of, and sums of tokens.

    Args:
        metrics: from a step of ``over_replicas``: each has a row for each replica.
    """

    def rows(x: jax.Array) -> np.ndarray:
        found = {part.index[0].start or 0: part.data for part in x.addressable_shards}
        return np.concatenate([np.asarray(found[start]) for start in sorted(found)])

    def value(name: str, x: jax.Array) -> np.ndarray:
        return rows(x).sum(0) if name in SUMMED else rows(x).mean(0)

    return {name: jax.tree.map(lambda x, name=name: value(name, x), tree) for name, tree in metrics.items()}


def replica_states(
    abstract: TrainState,
    common: Mapping[str, Any] = MappingProxyType({}),
    own: Mapping[str, Any] = MappingProxyType({}),
) -> TrainState:
    """Shapes and shardings of the state of all replicas: own arrays get a first dimension of size R, split over them.

    Args:
        abstract: of one replica (``abstract_state``), on the whole mesh.
        common: state of the outer step that replicas share, by name.
        own: state of the outer step that each replica has of its own, by name, without the first dimension.

    Raises:
        ShardingError: the mesh has no axis ``replica``, or the state is already split over it.
    """

    def row(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        there = leaf.sharding
        assert isinstance(there, NamedSharding)
        if REPLICA not in there.mesh.shape:
            raise ShardingError(
                f"the mesh has no axis {REPLICA!r}; it has {', '.join(there.mesh.shape)}. Give it one, such as "
                f'"{REPLICA}=2".'
            )
        used = {name for part in there.spec for name in (part if isinstance(part, tuple) else (part,))}
        if REPLICA in used:
            raise ShardingError(
                f"the train state is split over the mesh axis {REPLICA!r}, so its devices cannot have replicas of "
                "their own; leave the axis out of the sharding rules of parameters."
            )
        spec = PartitionSpec(REPLICA, *there.spec)
        memory = NamedSharding(there.mesh, spec, memory_kind=there.memory_kind)
        return jax.ShapeDtypeStruct((there.mesh.shape[REPLICA], *leaf.shape), leaf.dtype, sharding=memory)

    rows = _map_rows(row, abstract)
    extras = {**rows.extras, REPLICA_PARAMS: rows.params}
    if common:
        extras[COMMON] = dict(common)
    if own:
        extras[OWN] = jax.tree.map(row, dict(own))
    return replace(rows, params=abstract.params, extras=extras)


def copy_to_replicas(state: TrainState, abstract: TrainState) -> TrainState:
    """State of all replicas that begin with the same values; the state of the outer step begins with zeros.

    Args:
        state: of one replica (``init_state``).
        abstract: from ``replica_states``.
    """
    there = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    replicas = jax.tree.leaves(abstract.extras[REPLICA_PARAMS])[0].shape[0]

    def copied(state: TrainState) -> TrainState:
        rows = _map_rows(lambda x: jnp.stack([x] * replicas), state)
        zeros = {
            name: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract.extras[name])
            for name in (COMMON, OWN)
            if name in abstract.extras
        }
        return replace(rows, params=state.params, extras={**rows.extras, **zeros, REPLICA_PARAMS: rows.params})

    copy: Any = jax.jit(copied, out_shardings=there)
    return copy(state)


def _map_rows(fn: Callable[[Any], Any], state: TrainState) -> TrainState:
    """Maps what each replica has of its own; step and RNG key are shared."""
    own = jax.tree.map(fn, (state.params, state.opt_state, state.extras))
    return replace(state, params=own[0], opt_state=own[1], extras=own[2])


def slow_links(outer: OuterConfig, replicas: int, width: int) -> SlowLinks | None:
    """Replicas of a run whose messages between stages are projected; None: none.

    Args:
        outer: says which.
        replicas: R.
        width: of the model.

    Raises:
        ConfigError: there is no such replica, or messages are not so wide.
    """
    if not outer.slow:
        return None
    if max(outer.slow) >= replicas:
        raise ConfigError(f"outer: slow = {outer.slow}; the mesh has the replicas 0 to {replicas - 1}.")
    if outer.stage_rank > width:
        raise ConfigError(f"outer: stage_rank = {outer.stage_rank}; give at most the model's width, {width}.")
    return SlowLinks(replicas, outer.slow, outer.stage_rank)
