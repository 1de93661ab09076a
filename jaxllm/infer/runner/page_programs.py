"""Page programs: whole pages are copied, emptied, and moved between device and host.

Legend: B replicas, L layers, P pages of all replicas, K kv heads, S requests of a step, M pages of a transfer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

import sharding
from jaxllm.infer.runner import logits_processors
from jaxllm.infer.runner.kv_span import Axes, own_pages, span_axes
from jaxllm.infer.runner.paged_cache import PER_REQUEST, POOL_AXES, TABLES, TRANSFER_AXES, LayerGroup
from jaxllm.infer.runner.step.step_shape import StepShape
from pallas_kernels.paged_attention import Slots
from pallas_kernels.paged_attention.pages import empty_slots
from pallas_kernels.paged_attention.retention import by_scores

Pools = tuple[Slots, ...]


def copy_pages(
    pool: Shaped[Array, "L P K _ _"], pairs: Int[Array, "1 S 2"], count: Int[Array, " 1"], *, span: Axes = ()
) -> Shaped[Array, "L P K _ _"]:
    """Copies ``count`` pages of a replica's pool, from the first of each pair to the second, in place.

    Pages that are spread over the axes of ``span`` are copied between devices.
    """
    own = pool.shape[1]

    def one(i: Array, pool: Array) -> Array:
        page = jax.lax.dynamic_slice_in_dim(pool, pairs[0, i, 0], 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(pool, page, pairs[0, i, 1], axis=1)

    def across(i: Array, pool: Array) -> Array:
        source, target = pairs[0, i, 0], own_pages(pairs[0, i, 1], own, span)
        devices = jax.lax.axis_size(span)
        page = jax.lax.dynamic_slice_in_dim(pool, jnp.clip(source // devices, 0, own - 1), 1, axis=1)
        page = jax.lax.all_gather(page, span)[source % devices]
        return pool.at[:, target[None]].set(page, mode="drop")

    return jax.lax.fori_loop(0, count[0], across if span else one, pool)


def keep_branch(
    pool: Shaped[Array, "L P K _ _"],
    table: Int[Array, "1 S J"],
    first: Int[Array, "1 S"],
    branch: Int[Array, "1 S G"],
    axis: int,
) -> Shaped[Array, "L P K _ _"]:
    """Moves the slots of a draft tree's accepted branch to its beginning, in place, one after the other.

    Args:
        pool: a replica's pool, its slots along ``axis``.
        table: page table of each request.
        first: slot before the tree.
        branch: which tokens of the tree have been accepted, see ``sample_tree``.
    """
    size = pool.shape[axis]
    shape = [n if i not in (1, axis) else 1 for i, n in enumerate(pool.shape)]

    def place(request: Array, slot: Array) -> list[Array]:
        at = [jnp.zeros_like(slot)] * pool.ndim
        at[1], at[axis] = table[0, request, slot // size], slot % size
        return at

    def one(request: Array, depth: Array, pool: Array) -> Array:
        begin = first[0, request]
        held = jax.lax.dynamic_slice(pool, place(request, begin + branch[0, request, depth]), shape)
        return jax.lax.dynamic_update_slice(pool, held, place(request, begin + depth + 1))

    def each(request: Array, pool: Array) -> Array:
        accepted = jnp.sum(branch[0, request] >= 0)
        return jax.lax.fori_loop(0, accepted, lambda depth, pool: one(request, depth, pool), pool)

    return jax.lax.fori_loop(0, table.shape[1], each, pool)


def clear_fresh_pages(
    pools: Pools, packed: Int[Array, "B elements"], shape: StepShape, groups: tuple[int, ...]
) -> Pools:
    """Marks the slots of newly allocated pages as empty, in groups with a retention rule.

    Args:
        pools, packed, shape: those of the step.
        groups: layer group of each page table.
    """

    def fresh(packed: Array) -> tuple[Array, Array]:
        x = shape.inputs.unpack(packed)
        return x["tables"], x["fresh"]

    def clear(positions: Array, table: Array, fresh: Array) -> Array:
        columns, (first, stop) = jnp.arange(table.shape[2], dtype=jnp.int32), jnp.split(fresh[0], 2, axis=1)
        pages = jnp.where((columns >= first) & (columns < stop), table[0], positions.shape[1])
        return positions.at[:, pages.reshape(-1)].set(-1, mode="drop")

    tables, columns = sharding.per_shard(fresh, "batch")(packed)
    run = sharding.shard_map(clear, (POOL_AXES, TABLES, TABLES), POOL_AXES, check=False)
    cleared = list(pools)
    for i, number in enumerate(shape.retained):
        pool = cleared[groups[number]]
        positions = run(pool.positions, tables[:, number], columns[:, i])
        cleared[groups[number]] = pool._replace(positions=positions)
    return tuple(cleared)


def read_pages(rules: sharding.Rules, pool: Slots, pages: Int[Array, "B M"]) -> Slots:
    """Gathers pages of one replica for the host; the other replicas get page numbers out of range."""

    def local(pool: Array, pages: Array) -> Array:
        numbers = own_pages(pages[0], pool.shape[1], span)
        here = (numbers < pool.shape[1])[:, None, None, None]
        found = jnp.where(here, pool[:, jnp.minimum(numbers, pool.shape[1] - 1)], 0)
        return jax.lax.psum(found, devices) if devices else found

    with sharding.use_rules(rules):
        devices, span = sharding.axis_names("pages"), span_axes()
        run = sharding.shard_map(local, (POOL_AXES, PER_REQUEST), TRANSFER_AXES)
        return jax.tree.map(lambda x: sharding.constrain(run(x, pages), *(None,) * 5), pool.in_pages())


def write_pages(rules: sharding.Rules, pool: Slots, pages: Int[Array, "B M"], held: Slots) -> Slots:
    """Writes pages from the host into the pool; page numbers out of range are ignored."""

    def local(pool: Array, pages: Array, held: Array) -> Array:
        return pool.at[:, own_pages(pages[0], pool.shape[1], span)].set(held, mode="drop")

    with sharding.use_rules(rules):
        span = span_axes()
        run = sharding.shard_map(local, (POOL_AXES, PER_REQUEST, TRANSFER_AXES), POOL_AXES)
        written = jax.tree.map(lambda x, more: run(x, pages, more), pool.in_pages(), held)
        return written._replace(recent=pool.recent)


def seat(rules: sharding.Rules, state: tuple[Array, ...], packed: Int[Array, "B elements"]) -> tuple[Array, ...]:
    """Runs ``logits_processors.seat`` in each replica; a slot out of range is ignored."""
    with sharding.use_rules(rules):
        return sharding.per_shard(logits_processors.seat, "batch")(state, packed)


def empty_pools(
    rules: sharding.Rules, groups: tuple[LayerGroup, ...], counts: tuple[int, ...], page_size: int, sequences: int
) -> Pools:
    """Empty page pools, sharded by the rules; ``counts`` are pages, and ``sequences`` slots, per replica."""
    with sharding.use_rules(rules):
        shards, replicas = sharding.axis_size("attn_kv_heads"), sharding.axis_size("batch")
        pools = (
            empty_slots(
                group.format(shards), layers=group.rows, pages=replicas * count, page_size=page_size,
                dtype=group.recent_dtype if group.residual else group.plain, positions=group.rule is not None,
                sequences=replicas * sequences, scores=by_scores(group.rule) is not None,
            )
            for group, count in zip(groups, counts, strict=True)
        )  # fmt: skip
        return jax.tree.map(lambda x: sharding.constrain(x, *POOL_AXES, what="pool of pages"), tuple(pools))
