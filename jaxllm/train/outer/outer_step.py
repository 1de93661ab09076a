"""Outer steps of replicas: DiLoCo and SparseLoCo, and what all outer steps share.

After H local steps, replica r has the parameters x_r, and all had x at the start of the round. The pseudo-gradient of a
replica is x - x_r. The outer step takes their mean d and updates x, from which all replicas go on:

    m <- momentum m + d
    x <- x - rate (d + momentum m)            Nesterov momentum (DiLoCo, arXiv:2311.08105, with optax's form of it)

Of compressed pseudo-gradients only messages are sent. With error feedback (arXiv:1901.09847) a replica adds to its
pseudo-gradient what it did not send in earlier rounds:

    e <- feedback e + (x - x_r);  send C(e);  e <- e - C(e);  d = mean of C(e)      (SparseLoCo, arXiv:2508.15706)

Each device compresses its own shards, so that only integers and scales go between replicas. With H = 1, rate 1, no
momentum and all values sent, x becomes the mean of the x_r: data parallelism, if the inner update is linear in the
gradients (SGD) and replicas have equally many targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.models.params import at_least_f32
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.outer.replicas import COMMON, OWN, REPLICA, REPLICA_PARAMS, OuterStep
from jaxllm.train.step.train_state import TrainState

Parts = tuple[dict[str, Any], dict[str, Any]]
"""State that replicas share, and state of their own; both by name."""


def outer_states(config: OuterConfig, params: Any) -> Parts:
    """Shapes of an outer step's state of one replica: what replicas share, and what each has of its own.

    Args:
        config: of the outer step.
        params: shapes and shardings of the parameters.
    """

    def wide(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, at_least_f32(leaf.dtype), sharding=leaf.sharding)

    state = jax.tree.map(wide, params)
    if config.kind == "co2":
        return {"momentum": state, "mean": state}, {"pending": state}
    common = {"momentum": state} if config.outer_momentum else {}
    return common, {"feedback": state} if config.error_feedback else {}


def averaging_step(config: OuterConfig) -> OuterStep:
    """Outer step that averages pseudo-gradients: DiLoCo and SparseLoCo.

    Args:
        config: of the outer step.
    """
    rate, momentum, exchange = config.outer_rate, config.outer_momentum, config.exchange

    def update(x: Any, own_x: Any, common: dict[str, Any], own: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
        """On the shards of one device."""
        gaps = jax.tree.map(pseudo_gradient, x, own_x)
        if own:
            gaps = jax.tree.map(lambda d, e: d + config.error_feedback * e, gaps, own["feedback"])
        means, kept = [], []
        for gap in jax.tree.leaves(gaps):
            mean, known = exchange.mean(gap.reshape(-1), REPLICA)
            means.append(mean.reshape(gap.shape))
            kept.append(gap - known.reshape(gap.shape))
        structure = jax.tree.structure(gaps)
        mean = structure.unflatten(means)
        if own:
            own = {"feedback": structure.unflatten(kept)}
        step = mean
        if common:
            common = {"momentum": jax.tree.map(lambda m, d: momentum * m + d, common["momentum"], mean)}
            step = jax.tree.map(lambda d, m: d + momentum * m, mean, common["momentum"])
        x = jax.tree.map(lambda p, s: (p.astype(s.dtype) - rate * s).astype(p.dtype), x, step)
        return x, x, common, own

    return lambda states: on_shards(update, states)


def pseudo_gradient(x: Any, own: Any) -> Any:
    """Difference of the common parameters and a replica's own, in float32 or wider."""
    dtype = at_least_f32(x.dtype)
    return x.astype(dtype) - own.astype(dtype)


def on_shards(update: Callable[..., tuple[Any, Any, Any, Any]], states: TrainState) -> TrainState:
    """State of all replicas after an update that every device computes on its own shards; collectives are its own.

    Args:
        update: ``(common parameters, own parameters, common state, own state) -> the same``, of one replica.
        states: of all replicas.
    """
    given = (
        states.params,
        states.extras[REPLICA_PARAMS],
        states.extras.get(COMMON, {}),
        states.extras.get(OWN, {}),
    )
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, given)

    def local(x: Any, own_x: Any, common: Any, own: Any) -> tuple[Any, Any, Any, Any]:
        first = jax.tree.map(lambda x: x[0], (own_x, own))
        x, own_x, common, own = update(x, first[0], common, first[1])
        return x, jax.tree.map(lambda x: x[None], own_x), common, jax.tree.map(lambda x: x[None], own)

    # check_vma=False: the mean of gathered messages is equal on all replicas, which types cannot say.
    params, own_params, common, own = jax.shard_map(local, in_specs=specs, out_specs=specs, check_vma=False)(*given)
    extras = {**states.extras, REPLICA_PARAMS: own_params}
    extras |= {name: one for name, one in ((COMMON, common), (OWN, own)) if one}
    return replace(states, params=params, extras=extras)


def sent_bytes(config: OuterConfig, params: Any, replicas: int) -> int:
    """Bytes that one device sends in an outer step, by formula.

    Args:
        config: of the outer step.
        params: shapes and shardings of the parameters on the run's mesh.
        replicas: R.
    """

    def leaf_bytes(leaf: jax.ShapeDtypeStruct) -> int:
        assert leaf.sharding is not None
        size = math.prod(leaf.sharding.shard_shape(leaf.shape))
        if config.kind == "co2":  # in equal pieces
            size = -(-size // config.every) * config.every
        return config.exchange.sent(size, jnp.dtype(at_least_f32(leaf.dtype)), replicas)

    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(params))
