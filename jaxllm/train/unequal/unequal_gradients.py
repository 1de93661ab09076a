"""Gradients of uneven rows: devices loop over their own numbers of micro-batches and add their gradients once a step.

Rows of unequal devices by their speed are those of Cephalo (arXiv:2411.01075).

The program is manual over the axes whose devices have different trip counts (``jax.shard_map``): ``data``, or ``data``
and ``fsdp`` with ZeRO-1, whose weights are all-gathered once a step, before the loop. No collective over these axes
runs inside the loop. Losses and gradients are sums over each device's own tokens, and are added over the axes after it.
Devices that differ along other axes only have the same trip count; their collectives run inside the loop as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    run_fully_manual,
)
from sharding.rules import without_axes

DATA, FSDP = "data", "fsdp"


def uneven_axes(counts: tuple[int, ...], zero: int | str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes whose devices have different numbers of micro-batches; empty where the numbers are not those of any.

    Args:
        counts: micro-batches, one number for each index of ``data``, or of ``data`` x ``fsdp``.
        zero: ZeRO stage. Over ``fsdp`` only the first: later ones communicate in each micro-batch.
        sizes: of the mesh axes.
    """
    data, fsdp = sizes.get(DATA, 1), sizes.get(FSDP, 1)
    if len(counts) == data > 1:
        return (DATA,)
    if len(counts) == data * fsdp and fsdp > 1 and zero == 1:
        return tuple(axis for axis in (DATA, FSDP) if sizes.get(axis, 1) > 1)
    return ()


def own_count(counts: tuple[int, ...], over: tuple[str, ...]) -> Int[Array, ""]:
    """Micro-batches of this device, inside ``sums_over_uneven_rows``."""
    return jnp.asarray(counts, jnp.int32)[jax.lax.axis_index(over)]


def sums_over_uneven_rows(
    local: Callable[..., tuple[Any, ...]], over: tuple[str, ...], params: Any, batch: Any, *given: Any
) -> tuple[Any, ...]:
    """Loss sums and gradients of all devices, from a function of the rows of one index of the uneven axes.

    Args:
        local: ``(params, rows of one index of over, *given) -> (sums, gradients[, amax])``; each is of those rows alone
            and has no collective over these axes. The params are all-gathered over them.
        over: the uneven axes (``uneven_axes``).
        params: of the model.
        batch: all rows, split over ``over`` first.
        given: further arguments of ``local``, replicated.

    Returns:
        sums and gradients added over the axes, and the largest amax.

    Raises:
        ValueError: there are no uneven axes.
    """
    if not over:
        raise ValueError(
            "uneven rows: give one number of micro-batches for each index of the mesh axis data, or with zero = 1 for "
            "each of data x fsdp."
        )
    mesh = jax.sharding.get_abstract_mesh()
    stored = jax.tree.map(_spec, params)
    whole = jax.tree.map(lambda spec: jax.P(*without_axes(spec, frozenset(over))), stored, is_leaf=is_spec)
    params = jax.tree.map(jax.sharding.reshard, params, whole)
    specs: list[Any] = []

    def here(params: Any, batch: Any, *given: Any) -> tuple[Any, ...]:
        params = jax.tree.map(lambda x, spec: after_entry(x, spec, over), params, whole)
        sums, grads, *amax = local(params, batch, *given)
        sums = jax.tree.map(lambda x: jax.lax.psum(x, over), sums)
        specs.append(jax.tree.map(_spec, grads))
        grads = jax.tree.map(lambda g: run_fully_manual(lambda x: jax.lax.psum(x, over), g), grads)
        grads = jax.tree.map(lambda x, spec: before_exit(x, spec, over), grads, specs[-1])
        return sums, grads, *jax.tree.map(lambda x: jax.lax.pmax(x, over), amax)

    everywhere = jax.P()
    mapped = jax.shard_map(
        here,
        mesh=mesh,
        in_specs=(everywhere, jax.P(over), *(everywhere for _ in given)),
        out_specs=everywhere,
        axis_names=set(over),
        # Otherwise gradients of parameters that all devices share would be summed inside the loop.
        check_vma=False,
    )
    entered = jax.tree.map(lambda x, spec: before_entry(x, spec, over), params, whole)
    sums, grads, *amax = mapped(entered, batch, *given)
    return sums, jax.tree.map(lambda x, spec: after_exit(x, spec, over), grads, specs[-1]), *amax


def _spec(x: Array) -> Any:
    return jax.P(*jax.typeof(x).sharding.spec.partitions)
