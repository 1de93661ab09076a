"""Expert exchange: all-to-all of token rows to the shards of their experts, the experts there, and the way back.

(GShard, arXiv:2006.16668.) The numbers of rows are known only at run time, and without a capacity no row is dropped: a
shard may receive the rows of all shards. Its receive buffer has room for a few more than it receives on average, and
the exchange takes place in rounds: each shard receives its next rows until the busiest has received all. Balanced
routing takes one round; memory does not grow with the number of shards (``receive_rows``).

Since the number of rounds is data, nothing can be kept between the forward and the backward pass but what went in: the
backward pass exchanges rows again, and computes the experts' inner activations again whatever the remat policy.

Legend: D embed, X experts of a shard, P expert shards, M rows of a shard to dispatch, R rows of a receive buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from pallas_kernels._compat import target_device, vary_over, varying_axes

RunExperts = Callable[[PyTree, Array, Array | None, Array], Array]
"""``(params, rows [M D] sorted by expert, scales [M], rows of each expert [X]) -> scaled expert outputs [M D]``.

Without scales (None) the outputs are not scaled. Rows after those of the last expert are undefined, and so are their
outputs and gradients; the gradients of ``params`` must not depend on them."""

SLACK = 1.25
"""Rows of a receive buffer over the average number of rows that a shard receives."""
LEAST = 1024
"""Rows of a receive buffer at least, where that many can arrive: the few rows of a decoding step take one round."""


def receive_rows(rows: int, shards: int) -> int:
    """Rows of a receive buffer, where each of so many shards dispatches so many rows."""
    return min(rows * shards, max(LEAST, -(-int(rows * SLACK) // 128) * 128))


def exchanged(
    run: RunExperts,
    params: PyTree,
    rows: Float[Array, "M D"],
    scales: Float[Array, " M"],
    sizes: Int[Array, "P X"],
    axes: tuple[str, ...],
    room: int | None = None,
) -> Float[Array, "M D"]:
    """Outputs of ``run`` on the shards of the rows' experts, for rows that are sorted by expert.

    Args:
        params: weights of the experts of this shard, for ``run``.
        scales: factor of each row's output.
        sizes: rows of this shard for each expert, grouped by the shard of the expert.
        axes: mesh axes the experts are split over, inside ``jax.shard_map``.
        room: rows of a receive buffer, R; None for ``receive_rows``.
    """
    room = receive_rows(rows.shape[0], sizes.shape[0]) if room is None else room
    over = varying_axes(rows, scales, *jax.tree.leaves(params))
    params, rows, scales, sizes = jax.tree.map(lambda x: vary_over(x, over), (params, rows, scales, sizes))
    leaves, tree = jax.tree.flatten(params)
    exact = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]  # packed weights have integers, too
    trained, fixed = ([x for x, is_trained in zip(leaves, exact, strict=True) if is_trained == want] for want in (1, 0))

    def run_leaves(trained: list[Array], fixed: list[Array], rows: Array, scales: Array, sizes: Array) -> Array:
        ways = {True: iter(trained), False: iter(fixed)}
        return run(jax.tree.unflatten(tree, [next(ways[is_trained]) for is_trained in exact]), rows, scales, sizes)

    return _exchanged(run_leaves, axes, room, trained, rows, scales, (fixed, sizes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _exchanged(
    run: Callable[..., Array],
    axes: tuple[str, ...],
    room: int,
    trained: list[Array],
    rows: Array,
    scales: Array,
    given: Any,
) -> Array:
    fixed, sizes = given
    rounds = _Rounds.of(sizes, room, axes)

    def step(turn: Array, out: Array) -> Array:
        there, factors = rounds.send(turn, rows), rounds.send(turn, scales)
        return rounds.back(turn, _by_expert(run, rounds.cells(turn), trained, fixed, there, factors), out)

    return rounds.fold(step, _undefined(rows, len(rows)))


def _forward(
    run: Any, axes: tuple[str, ...], room: int, trained: Any, rows: Array, scales: Array, given: Any
) -> tuple[Array, Any]:
    return _exchanged(run, axes, room, trained, rows, scales, given), (trained, rows, scales, given)


def _backward(run: Any, axes: tuple[str, ...], room: int, kept: Any, d_out: Array) -> tuple[Any, Array, Array, None]:
    trained, rows, scales, (fixed, sizes) = kept
    rounds = _Rounds.of(sizes, room, axes)

    def step(turn: Array, sums: Any) -> Any:
        d_trained, d_rows, d_scales = sums
        cells = rounds.cells(turn)
        there, factors, d_there = (rounds.send(turn, x) for x in (rows, scales, d_out))
        _, pull = jax.vjp(lambda t, x, s: _by_expert(run, cells, t, fixed, x, s), trained, there, factors)
        d_own, d_there, d_factors = pull(d_there)
        added = jax.tree.map(jnp.add, d_trained, d_own)
        return added, rounds.back(turn, d_there, d_rows), rounds.back(turn, d_factors, d_scales)

    begin = jax.tree.map(_zeros, trained), _undefined(rows, len(rows)), _undefined(scales, len(scales))
    return (*rounds.fold(step, begin), None)


_exchanged.defvjp(_forward, _backward)


def _by_expert(
    run: Callable[..., Array], cells: Int[Array, "P X"], trained: Any, fixed: Any, rows: Array, scales: Array
) -> Array:
    """``run`` on received rows, which are sorted by sender and then by expert; outputs in the same order.

    Args:
        cells: rows from each shard for each expert.
    """
    count = cells.shape[1]
    if count == 1:
        with jax.named_scope("experts"):
            return run(trained, fixed, rows, scales, cells.sum(0))
    with jax.named_scope("dispatch"):
        ends = jnp.cumsum(cells.reshape(-1))
        cell = jnp.searchsorted(ends, jnp.arange(rows.shape[0]), side="right")
        expert = jnp.where(cell < cells.size, cell % count, count)  # empty rows come last
        order = jnp.argsort(expert, stable=True)
        inverse = jnp.argsort(order)
        rows, scales = permute(rows, order, inverse), permute(scales, order, inverse)
    with jax.named_scope("experts"):
        out = run(trained, fixed, rows, scales, cells.sum(0))
    with jax.named_scope("combine"):
        return permute(out, inverse, order)


class _Rounds(NamedTuple):
    """Rounds of an exchange: in round r a shard receives rows r * R to (r + 1) * R of all that it receives.

    Attributes:
        table: rows from each shard to each, [P P].
        arriving: rows from each shard for each expert of this shard, [P X].
        room: rows of a receive buffer, R.
        axes: mesh axes.
    """

    table: Int[Array, "P P"]
    arriving: Int[Array, "P X"]
    room: int
    axes: tuple[str, ...]

    @classmethod
    def of(cls, sizes: Int[Array, "P X"], room: int, axes: tuple[str, ...]) -> _Rounds:
        """Rounds for ``sizes``: rows of this shard for each expert, grouped by the shard of the expert."""
        with jax.named_scope("dispatch"):
            arriving = jax.lax.all_to_all(sizes, axes, 0, 0, tiled=True)
            return cls(jax.lax.all_gather(sizes.sum(1), axes), arriving, room, axes)

    def fold(self, step: Callable[[Array, Any], Any], carry: Any) -> Any:
        """``carry = step(round, carry)`` over all rounds; at least one, so that the loop's length does not hide it."""
        count = -(-jnp.max(self.table.sum(0)) // self.room)
        return jax.lax.fori_loop(0, jnp.maximum(count, 1), step, carry)

    def cells(self, turn: Array) -> Int[Array, "P X"]:
        """Rows from each shard for each expert that arrive in a round."""
        ends = jnp.cumsum(self.arriving.reshape(-1))
        begin = ends - self.arriving.reshape(-1)
        inside = jnp.clip(ends, *self._window(turn)) - jnp.clip(begin, *self._window(turn))
        return inside.reshape(self.arriving.shape).astype(jnp.int32)

    def send(self, turn: Array, x: Float[Array, "M *D"]) -> Float[Array, "R *D"]:
        """Receive buffer of a round; undefined after the last row."""
        with jax.named_scope("dispatch"):
            return _ragged_all_to_all(x, _undefined(x, self.room), *self._pieces(turn), self.axes)

    def back(self, turn: Array, x: Float[Array, "R *D"], out: Float[Array, "M *D"]) -> Float[Array, "M *D"]:
        """``out`` with the results of a round in the places of the rows that were sent."""
        with jax.named_scope("combine"):
            begin, counts, lands = (table.T for table in self._pieces(turn))
            return _ragged_all_to_all(x, out, lands, counts, begin, self.axes)

    def _window(self, turn: Array) -> tuple[Array, Array]:
        return turn * self.room, (turn + 1) * self.room

    def _pieces(self, turn: Array) -> tuple[Int[Array, "P P"], Int[Array, "P P"], Int[Array, "P P"]]:
        """From each shard to each: first row at the sender, number of rows, and first row in the receive buffer."""
        first, last = self._window(turn)
        ends = jnp.cumsum(self.table, axis=0)  # of all that a shard receives
        begin = jnp.clip(ends - self.table, first, last)
        count = jnp.clip(ends, first, last) - begin
        skipped = begin - (ends - self.table)  # rows of the rounds before; at most all of them
        at_sender = jnp.cumsum(self.table, axis=1) - self.table + jnp.minimum(jnp.maximum(skipped, 0), self.table)
        return at_sender, count, begin - first


def _ragged_all_to_all(
    x: Float[Array, "N *D"],
    out: Float[Array, "L *D"],
    begin: Int[Array, "P P"],
    counts: Int[Array, "P P"],
    lands: Int[Array, "P P"],
    axes: tuple[str, ...],
) -> Float[Array, "L *D"]:
    """``jax.lax.ragged_all_to_all`` by tables from each shard to each, which all shards know.

    CPUs lack it, and TPUs pad single numbers to 512 bytes: there an all-to-all of slots of the largest size stands in.

    Args:
        out: what the result holds where nothing arrives.
        begin: first row at the sender.
        counts: number of rows.
        lands: where they land in the receiver's result.
    """
    here = jax.lax.axis_index(axes)
    if x.ndim > 1 and target_device().platform != "cpu":
        moves = (begin[here], counts[here], lands[here], counts[:, here])
        return jax.lax.ragged_all_to_all(x, out, *(move.astype(jnp.int32) for move in moves), axis_name=axes)
    slot = min(len(x), len(out))
    slots = x[jnp.minimum(begin[here][:, None] + jnp.arange(slot), len(x) - 1)]
    slots = jax.lax.all_to_all(slots, axes, 0, 0, tiled=True)
    place, start = jnp.arange(len(out)), lands[:, here]
    arrives = (start <= place[:, None]) & (place[:, None] < start + counts[:, here])
    sender = jnp.argmax(arrives, axis=1)
    found = slots[sender, jnp.clip(place - start[sender], 0, slot - 1)]
    return jnp.where(arrives.any(1).reshape(-1, *(1 for _ in x.shape[1:])), found, out)


def _zeros(x: Array) -> Array:
    """Zeros for a loop's carry, varying over the same mesh axes as ``x``."""
    return vary_over(jnp.zeros_like(x), varying_axes(x))


def _undefined(x: Float[Array, "N *D"], rows: int) -> Float[Array, "L *D"]:
    """So many undefined rows of the shape of those of ``x``: to fill them takes longer than to receive them.

    On CPUs they are NaN, so that whatever depends on them shows.
    """
    shape = (rows, *x.shape[1:])
    is_cpu = target_device().platform == "cpu"
    return vary_over(jnp.full(shape, jnp.nan, x.dtype) if is_cpu else jax.lax.empty(shape, x.dtype), varying_axes(x))


@jax.custom_vjp
def permute(x: Float[Array, "M *D"], order: Int[Array, " M"], inverse: Int[Array, " M"]) -> Float[Array, "M *D"]:
    """``x[order]``. Its gradient is a gather too, by the inverse; that of a gather would be a scatter."""
    return x.at[order].get(unique_indices=True, mode="promise_in_bounds")


permute.defvjp(
    lambda x, order, inverse: (permute(x, order, inverse), (order, inverse)),
    lambda ways, d_out: (permute(d_out, ways[1], ways[0]), None, None),
)
