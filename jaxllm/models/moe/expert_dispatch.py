"""Expert dispatch and combine: routes token rows to their experts and back, per shard (expert parallelism).

Rows are sorted by expert, so that the rows of an expert are one group of a grouped matmul (MegaBlocks,
arXiv:2211.15841). Where experts are split over a mesh axis, an all-to-all sends rows to the device of their expert
(GShard, arXiv:2006.16668). The numbers of rows are known only at run time: TPUs and GPUs send exactly these
(``jax.lax.ragged_all_to_all``), CPUs send full buffers. Without a capacity no row is dropped, so a receive buffer has
room for the case that all tokens choose the experts of one device.

Legend: T tokens of a shard, D embed, E experts, X experts of a shard, A experts per token (top-k), P expert shards,
M = T * A rows to dispatch, R rows of a receive buffer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import target_device, vary_over, varying_axes

RunExperts = Callable[[Array, Array], Array]
"""``(rows [M D] sorted by expert, rows of each expert [X]) -> expert outputs [M D]``."""


def dispatch_and_combine(
    x: Float[Array, "T D"],
    experts: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    run: RunExperts,
    count: int,
    *,
    expert_axis: str | None = None,
) -> Float[Array, "T D"]:
    """Dropless mixture: ``sum over a of weights[t, a] * expert[experts[t, a]](x[t])``.

    Args:
        experts: indices among all experts; those of a token differ.
        weights: combine weights.
        run: applies the experts of this shard.
        count: number of experts of this shard, X.
        expert_axis: mesh axis the experts are split over, inside ``jax.shard_map``; None if all experts are here.
    """
    shards = 1 if expert_axis is None else jax.lax.axis_size(expert_axis)
    with jax.named_scope("dispatch"):
        flat = experts.T.reshape(-1)  # [A T]: with the choices outermost, sums over them are of whole tiles
        by_expert = jnp.argsort(flat, stable=True)
        back = jnp.argsort(by_expert)
        rows: Any = _rows_of_choices(x, by_expert, back, x.shape[0])
        sizes = jnp.bincount(flat, length=shards * count).astype(jnp.int32)
    if expert_axis is None:
        with jax.named_scope("experts"):
            out = run(rows, sizes)
    else:
        out = _exchanged(run, rows, sizes.reshape(shards, -1), expert_axis)
    with jax.named_scope("combine"):
        out = _permute(out, back, by_expert).reshape(*experts.T.shape, -1)
        return jnp.einsum("atd,ta->td", out, weights)


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
    """``dispatch_and_combine`` with a capacity of ``capacity * M / E`` rows per expert and shard, rounded up.

    The buffers have static sizes. Rows beyond an expert's capacity are dropped and contribute zero; first choices come
    before second ones, earlier tokens before later ones.

    Returns:
        The weighted sums, and the number of dropped rows.
    """
    shards = 1 if expert_axis is None else jax.lax.axis_size(expert_axis)
    (t, a), all_experts = experts.shape, shards * count
    room = min(t, math.ceil(capacity * t * a / all_experts))
    with jax.named_scope("dispatch"):
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
    with jax.named_scope("experts"):
        out = run(buffer, vary_over(jnp.full(count, shards * room, jnp.int32), varying_axes(x)))
    with jax.named_scope("combine"):
        if expert_axis is not None:
            out = out.reshape(count, shards, room, -1).swapaxes(0, 1).reshape(shards, count * room, -1)
            out = jax.lax.all_to_all(out, expert_axis, 0, 0).reshape(all_experts * room, -1)
        out = jnp.where(kept[:, None], out[jnp.minimum(place, all_experts * room - 1)], 0).reshape(a, t, -1)
        return jnp.einsum("atd,ta->td", out, weights), jnp.sum(~kept)


def _exchanged(run: RunExperts, rows: Float[Array, "M D"], sizes: Int[Array, "P X"], axis: str) -> Float[Array, "M D"]:
    """All-to-all of rows to the shards of their experts, ``run`` there, and all-to-all of the results back.

    Args:
        sizes: rows of this shard for each expert, grouped by the shard of the expert.
    """
    ragged = target_device().platform != "cpu"
    with jax.named_scope("dispatch"):
        send, back = (_ragged if ragged else _padded)(sizes.sum(1), rows.shape[0], axis)
        there = send(rows)
        arrived = jax.lax.all_to_all(sizes, axis, 0, 0, tiled=True)  # [P X]: rows from each shard for each expert here
        expert = _experts_of(arrived, there.shape[0], None if ragged else rows.shape[0])
        by_expert = jnp.argsort(expert, stable=True)
        as_arrived = jnp.argsort(by_expert)
        there = _permute(there, by_expert, as_arrived)
    with jax.named_scope("experts"):
        out = run(there, arrived.sum(0))
    with jax.named_scope("combine"):
        return back(_permute(out, as_arrived, by_expert))


def _experts_of(arrived: Int[Array, "P X"], length: int, slot: int | None) -> Int[Array, " length"]:
    """Expert of each row of a receive buffer; X for empty rows.

    Args:
        arrived: rows from each shard for each expert; a shard's rows are sorted by expert.
        slot: rows of the buffer that are reserved for each shard; None when the shards' rows follow without gaps.
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
    """Padded all-to-all there and back: each pair of shards has a slot of the largest possible size in the buffer."""
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
    """Ragged all-to-all there and back: the rows of all shards follow each other, then zeros."""
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


@jax.custom_vjp
def _permute(x: Float[Array, "M D"], order: Int[Array, " M"], inverse: Int[Array, " M"]) -> Float[Array, "M D"]:
    """``x[order]``. Its gradient is a gather too, by the inverse; that of a gather would be a scatter."""
    return _gather(x, order)


def _permute_backward(inverse: Int[Array, " M"], d_out: Float[Array, "M D"]) -> tuple[Array, None, None]:
    return _gather(d_out, inverse), None, None


_permute.defvjp(lambda x, order, inverse: (_gather(x, order), inverse), _permute_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rows_of_choices(
    x: Float[Array, "T D"], order: Int[Array, " M"], inverse: Int[Array, " M"], tokens: int
) -> Float[Array, "M D"]:
    """Row of a token for each of its choices, in the order of the experts, without a copy in the order of the tokens.

    Row m of all choices, [A T], is that of token m mod T.
    """
    return x.at[order % tokens].get(mode="promise_in_bounds")


def _rows_of_choices_forward(x: Array, order: Array, inverse: Array, tokens: int) -> tuple[Array, Array]:
    return _rows_of_choices(x, order, inverse, tokens), inverse


def _rows_of_choices_backward(
    tokens: int, inverse: Int[Array, " M"], d_rows: Float[Array, "M D"]
) -> tuple[Array, None, None]:
    return jnp.sum(_gather(d_rows, inverse).reshape(-1, tokens, d_rows.shape[1]), axis=0), None, None


_rows_of_choices.defvjp(_rows_of_choices_forward, _rows_of_choices_backward)


def _gather(x: Float[Array, "M D"], order: Int[Array, " M"]) -> Float[Array, "M D"]:
    return x.at[order].get(unique_indices=True, mode="promise_in_bounds")
