"""CO2's outer step: the mean of one round's pseudo-gradients is sent beside the steps of the next (arXiv:2401.16265).

Round t starts from the common parameters x_t and ends with a pseudo-gradient of each replica, x_t - x_r. While round
t + 1 computes, the replicas average these, a piece of 1/H of every shard in each of its H steps. No step waits for a
piece: they only go into the state. At the end of round t + 1, their mean d is applied, a round late:

    gap = 1 + |x_{t+1} - x_t| / |d|                  staleness: how far x went since d was taken
    m <- momentum m + d / gap                        penalised, and scaled down to norm ``clip`` if it is longer
    x <- x - rate m

and all replicas go on from x. The first outer step has nothing to apply. The paper's gap compares the same two
distances; its exact form and its clipping threshold by parameter are not restated here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.outer.outer_step import pseudo_gradient
from jaxllm.train.outer.replicas import COMMON, OWN, REPLICA, REPLICA_PARAMS, OuterStep, with_outer_step
from jaxllm.train.step.step_chain import Step
from jaxllm.train.step.train_state import TrainState


def co2_step(step: Step, config: OuterConfig) -> Step:
    """Training step of all replicas with a piece of the last round's mean beside it, and CO2's outer step.

    Args:
        step: from ``over_replicas``.
        config: of the outer step.
    """

    def run(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        # Both are of the state before the step: neither needs a result of the other.
        mean = send_piece(state, config.every)
        state, metrics = step(state, batch)
        return replace(state, extras={**state.extras, COMMON: {**state.extras[COMMON], "mean": mean}}), metrics

    return with_outer_step(run, config.every, delayed_update(config))


def send_piece(state: TrainState, pieces: int) -> Any:
    """Mean of the last round's pseudo-gradients, of which the piece of this step is now averaged over the replicas.

    Args:
        state: of all replicas.
        pieces: equal pieces of every shard; the last ones overlap where its size does not divide.
    """

    def local(place: Any, mean: Any, pending: Any) -> Any:
        def leaf(mean: Array, pending: Array) -> Array:
            size = math.prod(mean.shape)
            length = -(-size // pieces)
            start = jnp.minimum(place * length, size - length)
            piece = jax.lax.dynamic_slice(pending.reshape(-1), (start,), (length,))
            averaged = jax.lax.pmean(piece, REPLICA)
            return jax.lax.dynamic_update_slice(mean.reshape(-1), averaged, (start,)).reshape(mean.shape)

        return jax.tree.map(leaf, mean, pending)

    given = state.step % pieces, state.extras[COMMON]["mean"], state.extras[OWN]["pending"]
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, given)
    # check_vma=False: most of the mean was averaged in earlier steps, which types cannot say.
    return jax.shard_map(local, in_specs=specs, out_specs=specs[1], check_vma=False)(*given)


def delayed_update(config: OuterConfig) -> OuterStep:
    """CO2's outer step; it communicates inside replicas alone, for norms.

    Args:
        config: of the outer step.
    """
    rate, momentum, clip = config.outer_rate, config.outer_momentum, config.clip

    def update(state: TrainState) -> TrainState:
        x, own, mean = state.params, state.extras[REPLICA_PARAMS], state.extras[COMMON]["mean"]
        old = state.extras[COMMON]["momentum"]
        gap = staleness_gap(rate * optax.tree.norm(old), optax.tree.norm(mean))
        new = jax.tree.map(lambda m, d: momentum * m + d / gap.astype(d.dtype), old, mean)
        if clip:
            norm = optax.tree.norm(new)
            scale = jnp.where(norm > clip, clip / jnp.where(norm > 0, norm, 1), 1)
            new = jax.tree.map(lambda m: m * scale.astype(m.dtype), new)
        pending = jax.tree.map(lambda p, q: pseudo_gradient(p[None], q), x, own)
        x = jax.tree.map(lambda p, m: (p.astype(m.dtype) - rate * m).astype(p.dtype), x, new)
        own = jax.tree.map(_rows, x, own)
        extras = {
            **state.extras,
            REPLICA_PARAMS: own,
            COMMON: {"momentum": new, "mean": mean},
            OWN: {"pending": pending},
        }
        return replace(state, params=x, extras=extras)

    return update


def staleness_gap(moved: Float[Array, ""], size: Float[Array, ""]) -> Float[Array, ""]:
    """Staleness gap of a pseudo-gradient: 1 + distance that the parameters went since it was taken, over its norm.

    Args:
        moved: norm of the last outer step.
        size: norm of the pseudo-gradient; 0 gives a gap of 1.
    """
    return 1 + jnp.where(size > 0, moved / jnp.where(size > 0, size, 1), 0)


def _rows(x: Array, like: Array) -> Array:
    """The common parameters as rows of all replicas, sharded as ``like``."""
    rows = jnp.broadcast_to(x[None], like.shape)
    return jax.sharding.reshard(rows, jax.typeof(like).sharding.spec)
