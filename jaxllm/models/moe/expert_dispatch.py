"""Sending tokens to their experts and back: the per-shard arithmetic of a mixture of experts, whatever experts do.

Rows are sorted by expert, so that each expert's are one group of a grouped matrix product (MegaBlocks,
arXiv:2211.15841). Where experts are split over a mesh axis, rows first travel to the device that has theirs, by an
all-to-all (GShard, arXiv:2006.16668). Devices send different numbers of rows, known only when the program runs: TPU and
GPU send just these (``jax.lax.ragged_all_to_all``), CPU the same buffers in full. A buffer holds what a device would
get if all tokens chose its experts, since none is dropped; unless experts have a capacity.

Legend: T tokens of a shard, D embed, E experts, X those of a shard, A experts of a token,
P shards of experts, M = T * A rows to send.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import target_device, vary_over, varying_axes

RunExperts = Callable[[Array, Array], Array]
"""``(rows [M D] in the order of their experts, how many each has [X]) -> what the experts make of them [M D]``."""


def dispatch_and_combine(
    x: Float[Array, "T D"],
    experts: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    run: RunExperts,
    count: int,
    *,
    expert_axis: str | None = None,
) -> Float[Array, "T D"]:
    """``sum over a of weights[t, a] * expert[experts[t, a]](x[t])``.

    Args:
        experts: numbers among all experts, different ones for a token.
        run: this shard's experts.
        count: how many they are.
        expert_axis: mesh axis the experts are split over, inside ``jax.shard_map``; None for all of them here.
    """
    shards = 1 if expert_axis is None else jax.lax.axis_size(expert_axis)
    flat = experts.reshape(-1)
    by_expert = jnp.argsort(flat, stable=True)
    rows = _permute(jnp.repeat(x, experts.shape[1], axis=0), by_expert)
    sizes = jnp.bincount(flat, length=shards * count).astype(jnp.int32)
    out = run(rows, sizes) if expert_axis is None else _exchanged(run, rows, sizes.reshape(shards, -1), expert_axis)
    out = _permute(out, jnp.argsort(by_expert)).reshape(*experts.shape, -1)
    return jnp.einsum("tad,ta->td", out, weights)


def dispatch_within_capacity(
    x: Float[Array, "T D"],
    experts: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    run: RunExperts,
    count: int,
    capacity: float,
    *,
    expert_axis: str | None = None,
) -> tuple[Float[Array, "T D"], Int[Array, ""]]:
    """``dispatch_and_combine`` where an expert takes ``capacity * M / E`` rows of a shard, rounded up, and no more.

    Rows have their places in a buffer of one size, known before the program runs. Those beyond an expert's room count
    nothing; first choices come before second ones, earlier tokens before later ones.

    Returns:
        The sums, and how many rows were dropped.
    """
    shards = 1 if expert_axis is None else jax.lax.axis_size(expert_axis)
    (t, a), all_experts = experts.shape, shards * count
    room = min(t, math.ceil(capacity * t * a / all_experts))
    flat = experts.T.reshape(-1)  # all first choices, then all second ones
    by_expert = jnp.argsort(flat, stable=True)
    starts = jnp.searchsorted(flat[by_expert], jnp.arange(all_experts))
    rank = jnp.zeros_like(by_expert).at[by_expert].set(jnp.arange(t * a) - starts[flat[by_expert]])
    kept = rank < room
    place = jnp.where(kept, flat * room + rank, all_experts * room)
    buffer = vary_over(jnp.zeros((all_experts * room, x.shape[1]), x.dtype), varying_axes(x))
    buffer = buffer.at[place].set(jnp.tile(x, (a, 1)), mode="drop", unique_indices=True)
    if expert_axis is not None:
        buffer = jax.lax.all_to_all(buffer.reshape(shards, -1, x.shape[1]), expert_axis, 0, 0)
        buffer = buffer.reshape(shards, count, room, -1).swapaxes(0, 1).reshape(all_experts * room, -1)
    out = run(buffer, vary_over(jnp.full(count, shards * room, jnp.int32), varying_axes(x)))
    if expert_axis is not None:
        out = out.reshape(count, shards, room, -1).swapaxes(0, 1).reshape(shards, count * room, -1)
        out = jax.lax.all_to_all(out, expert_axis, 0, 0).reshape(all_experts * room, -1)
    out = jnp.where(kept[:, None], out[jnp.minimum(place, all_experts * room - 1)], 0).reshape(a, t, -1)
    return jnp.einsum("atd,ta->td", out, weights), jnp.sum(~kept)


def _exchanged(run: RunExperts, rows: Float[Array, "M D"], sizes: Int[Array, "P X"], axis: str) -> Float[Array, "M D"]:
    """``run`` on the rows that all shards have for this shard's experts; each gets its rows' results back.

    Args:
        sizes: rows of this shard for each expert, by the shard that has it.
    """
    ragged = target_device().platform != "cpu"
    send, back = (_ragged if ragged else _padded)(sizes.sum(1), rows.shape[0], axis)
    there = send(rows)
    arrived = jax.lax.all_to_all(sizes, axis, 0, 0, tiled=True)  # [P X]: rows from each shard for each expert here
    expert = _experts_of(arrived, there.shape[0], None if ragged else rows.shape[0])
    by_expert = jnp.argsort(expert, stable=True)
    out = run(_permute(there, by_expert), arrived.sum(0))
    return back(_permute(out, jnp.argsort(by_expert)))


def _experts_of(arrived: Int[Array, "P X"], length: int, slot: int | None) -> Int[Array, " length"]:
    """The expert of each row of a receive buffer, X for rows that are none.

    Args:
        arrived: rows from each shard for each expert; a shard's are sorted by expert.
        slot: rows of the buffer that belong to one shard; None when the shards' rows follow each other without gaps.
    """
    count = arrived.shape[1]
    if slot is None:
        ends = jnp.cumsum(arrived.reshape(-1))
        cell = jnp.searchsorted(ends, jnp.arange(length), side="right")
        return jnp.where(cell < arrived.size, cell % count, count)
    ends = jnp.cumsum(arrived, axis=1)
    find = jax.vmap(lambda end: jnp.searchsorted(end, jnp.arange(slot), side="right"))
    return find(ends).reshape(-1)


Move = Callable[[Array], Array]


def _padded(counts: Int[Array, " P"], rows: int, axis: str) -> tuple[Move, Move]:
    """To and fro with a slot of the buffer for each pair of shards, as long as the longest could be."""
    shards = counts.shape[0]
    starts = jnp.cumsum(counts) - counts
    place = jnp.arange(rows)
    shard = jnp.searchsorted(jnp.cumsum(counts), place, side="right")
    slot = shard * rows + place - starts[shard]

    def send(x: Float[Array, "M D"]) -> Float[Array, "R D"]:
        buffer = vary_over(jnp.zeros((shards * rows, x.shape[1]), x.dtype), varying_axes(x))
        return jax.lax.all_to_all(buffer.at[slot].set(x, unique_indices=True), axis, 0, 0, tiled=True)

    def back(x: Float[Array, "R D"]) -> Float[Array, "M D"]:
        return jax.lax.all_to_all(x, axis, 0, 0, tiled=True)[slot]

    return send, back


def _ragged(counts: Int[Array, " P"], rows: int, axis: str) -> tuple[Move, Move]:
    """To and fro with the rows of all shards following each other; what comes after them is zero."""
    shards, here = counts.shape[0], jax.lax.axis_index(axis)
    table = jax.lax.all_gather(counts, axis)  # [P P]: rows from each shard to each
    starts = jnp.cumsum(counts) - counts  # where the rows for each shard begin here
    lands = jnp.cumsum(table, axis=0) - table  # where the rows of each shard begin at each
    arriving = table[:, here]

    def move(x: Array, length: int, *offsets: Array) -> Array:
        buffer = vary_over(jnp.zeros((length, x.shape[1]), x.dtype), varying_axes(x))
        return jax.lax.ragged_all_to_all(x, buffer, *(o.astype(jnp.int32) for o in offsets), axis_name=axis)

    def send(x: Float[Array, "M D"]) -> Float[Array, "R D"]:
        return move(x, shards * rows, starts, counts, lands[here], arriving)

    def back(x: Float[Array, "R D"]) -> Float[Array, "M D"]:
        begin = jnp.cumsum(table, axis=1) - table  # where at each source its rows for each shard begin
        return move(x, rows, lands[:, here], arriving, begin[:, here], counts)

    return send, back


def _permute(x: Float[Array, "M D"], order: Int[Array, " M"]) -> Float[Array, "M D"]:
    return x.at[order].get(unique_indices=True, mode="promise_in_bounds")
