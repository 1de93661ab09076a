"""Gradients of uneven rows: each device along ``data`` loops over its own number of micro-batches.

The program is manual over ``data`` (``jax.shard_map``): the trip count of the loop over micro-batches differs between
its devices, so no collective over ``data`` may run inside. Losses and gradients are sums of each device's own tokens
and are added over ``data`` once, after the loop. Devices that differ along other axes only have the same trip count;
their collectives run inside the loop as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxllm.parallel.pipeline.stage_collectives import (
    after_entry,
    after_exit,
    before_entry,
    before_exit,
    is_spec,
    only,
    run_fully_manual,
)

DATA = "data"
"""Mesh axis whose devices have different numbers of micro-batches."""
OVER = (DATA,)


def own_count(counts: tuple[int, ...]) -> Int[Array, ""]:
    """Micro-batches of this device, inside ``sums_over_data``."""
    return jnp.asarray(counts, jnp.int32)[jax.lax.axis_index(DATA)]


def sums_over_data(local: Callable[..., tuple[Any, ...]], params: Any, batch: Any, *given: Any) -> tuple[Any, ...]:
    """Loss sums and gradients of all devices along ``data``, from a function of one device's rows.

    Args:
        local: ``(params, rows of one index of data, *given) -> (sums, gradients[, amax])``; each is of those rows alone
            and has no collective over ``data``.
        params: of the model, replicated over ``data``.
        batch: all rows, split over ``data`` first.
        given: further arguments of ``local``, replicated.

    Returns:
        sums and gradients added over ``data``, and the largest amax.
    """
    mesh = jax.sharding.get_abstract_mesh()
    whole = jax.tree.map(_spec, params)
    stored = jax.tree.map(lambda spec: only(spec, OVER), whole, is_leaf=is_spec)
    specs: list[Any] = []

    def here(params: Any, batch: Any, *given: Any) -> tuple[Any, ...]:
        params = jax.tree.map(lambda x, spec: after_entry(x, spec, OVER), params, whole)
        sums, grads, *amax = local(params, batch, *given)
        sums = jax.tree.map(lambda x: jax.lax.psum(x, DATA), sums)
        grads = jax.tree.map(lambda g: run_fully_manual(lambda x: jax.lax.psum(x, DATA), g), grads)
        specs.append(jax.tree.map(_spec, grads))
        grads = jax.tree.map(lambda x, spec: before_exit(x, spec, OVER), grads, specs[-1])
        return sums, grads, *jax.tree.map(lambda x: jax.lax.pmax(x, DATA), amax)

    everywhere = jax.P()
    mapped = jax.shard_map(
        here,
        mesh=mesh,
        in_specs=(stored, jax.P(DATA), *(everywhere for _ in given)),
        out_specs=everywhere,
        axis_names=set(OVER),
        # Otherwise gradients of parameters that all devices share would be summed over data inside the loop.
        check_vma=False,
    )
    entered = jax.tree.map(lambda x, spec: before_entry(x, spec, OVER), params, whole)
    sums, grads, *amax = mapped(entered, batch, *given)
    return sums, jax.tree.map(lambda x, spec: after_exit(x, spec, OVER), grads, specs[-1]), *amax


def _spec(x: Array) -> Any:
    return jax.P(*jax.typeof(x).sharding.spec.partitions)
