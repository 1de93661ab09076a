"""Expert dispatch and combine: routes token rows to their experts and back, per shard (expert parallelism).

Rows are sorted by expert, so that the rows of an expert are one group of a grouped matmul (MegaBlocks,
arXiv:2211.15841). Where experts are split over a mesh axis, ``expert_exchange`` sends rows to the device of their
expert. The combine weights go along and scale the experts' inner activations: the backward pass then needs no expert
outputs, and a recomputed block leaves out their last matmul.

Legend: T tokens of a shard, D embed, E experts, X experts of a shard, A experts per token (top-k), P expert shards,
M = T * A rows to dispatch.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from jaxllm.models.moe.expert_exchange import RunExperts, exchanged, permute
from pallas_kernels._compat import vary_over, varying_axes


def dispatch_and_combine(
    x: Float[Array, "T D"],
    experts: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    run: RunExperts,
    params: PyTree,
    count: int,
    *,
    expert_axes: tuple[str, ...] | None = None,
    room: int | None = None,
    partial: bool = False,
) -> Float[Array, "T D"]:
    """Dropless mixture: ``sum over a of weights[t, a] * expert[experts[t, a]](x[t])``.

    Args:
        experts: indices among all experts; those of a token differ.
        weights: combine weights.
        run: applies the experts of this shard to rows and scales them.
        params: weights of the experts of this shard, for ``run``.
        count: number of experts of this shard, X.
        expert_axes: mesh axes the experts are split over, inside ``jax.shard_map``; None if all experts are here.
        room: rows of a receive buffer, see ``expert_exchange.receive_rows``; None for its default.
        partial: an index of ``count`` is none of the experts, and contributes nothing; with all experts here.
    """
    shards = 1 if expert_axes is None else jax.lax.axis_size(expert_axes)
    with jax.named_scope("dispatch"):
        flat = experts.T.reshape(-1)  # [A T]: with the choices outermost, sums over them are of whole tiles
        by_expert = jnp.argsort(flat, stable=True)
        back = jnp.argsort(by_expert)
        rows: Any = _rows_of_choices(x, by_expert, back, x.shape[0])
        scales = permute(weights.T.reshape(-1), by_expert, back)
        sizes = jnp.bincount(flat, length=shards * count).astype(jnp.int32)
    if expert_axes is None:
        with jax.named_scope("experts"):
            out = run(params, rows, scales, sizes)
            if partial:  # rows after those of the last expert are undefined
                out = jnp.where(jnp.arange(out.shape[0])[:, None] < jnp.sum(sizes), out, 0)
    else:
        out = exchanged(run, params, rows, scales, sizes.reshape(shards, -1), expert_axes, room)
    with jax.named_scope("combine"):
        return _sum_of_choices(out, by_expert, back, x.shape[0])


def dispatch_within_capacity(
    x: Float[Array, "T D"],
    experts: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    run: RunExperts,
    params: PyTree,
    count: int,
    capacity: float,
    *,
    expert_axes: tuple[str, ...] | None = None,
) -> tuple[Float[Array, "T D"], Int[Array, ""]]:
    """``dispatch_and_combine`` with a capacity of ``capacity * M / E`` rows per expert and shard, rounded up.

    The buffers have static sizes. Rows beyond an expert's capacity are dropped and contribute zero; first choices come
    before second ones, earlier tokens before later ones.

    Returns:
        The weighted sums, and the number of dropped rows.
    """
    shards = 1 if expert_axes is None else jax.lax.axis_size(expert_axes)
    (t, a), all_experts = experts.shape, shards * count
    room = room_of_expert(capacity, t, a, all_experts)
    with jax.named_scope("dispatch"):
        flat = experts.T.reshape(-1)  # all first choices, then all second ones
        by_expert = jnp.argsort(flat, stable=True)
        starts = jnp.searchsorted(flat[by_expert], jnp.arange(all_experts))
        rank = jnp.zeros_like(by_expert).at[by_expert].set(jnp.arange(t * a) - starts[flat[by_expert]])
        kept = rank < room
        place = jnp.where(kept, flat * room + rank, all_experts * room)
        buffer = vary_over(jnp.zeros((all_experts * room, x.shape[1]), x.dtype), varying_axes(x))
        buffer = buffer.at[place].set(jnp.tile(x, (a, 1)), mode="drop", unique_indices=True)
        if expert_axes is not None:
            buffer = jax.lax.all_to_all(buffer.reshape(shards, -1, x.shape[1]), expert_axes, 0, 0)
            buffer = buffer.reshape(shards, count, room, -1).swapaxes(0, 1).reshape(all_experts * room, -1)
    with jax.named_scope("experts"):
        out = run(params, buffer, None, vary_over(jnp.full(count, shards * room, jnp.int32), varying_axes(x)))
    with jax.named_scope("combine"):
        if expert_axes is not None:
            out = out.reshape(count, shards, room, -1).swapaxes(0, 1).reshape(shards, count * room, -1)
            out = jax.lax.all_to_all(out, expert_axes, 0, 0).reshape(all_experts * room, -1)
        out = jnp.where(kept[:, None], out[jnp.minimum(place, all_experts * room - 1)], 0).reshape(a, t, -1)
        return jnp.einsum("atd,ta->td", out, weights.astype(x.dtype)), jnp.sum(~kept)


def room_of_expert(capacity: float, tokens: int, top_k: int, experts: int) -> int:
    """Rows of an expert's buffer for the tokens of one shard, with a capacity: it never takes a token twice."""
    return min(tokens, math.ceil(capacity * tokens * top_k / experts))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rows_of_choices(
    x: Float[Array, "T D"], order: Int[Array, " M"], inverse: Int[Array, " M"], tokens: int
) -> Float[Array, "M D"]:
    """Row of a token for each of its choices, in the order of the experts, without a copy in the order of the tokens.

    Row m of all choices, [A T], is that of token m mod T. The gradient is ``_sum_of_choices``: a gather too, where that
    of a gather would be a scatter.
    """
    return x.at[order % tokens].get(mode="promise_in_bounds")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sum_of_choices(
    rows: Float[Array, "M D"], order: Int[Array, " M"], inverse: Int[Array, " M"], tokens: int
) -> Float[Array, "T D"]:
    """Sum of the rows of each token, which are in the order of the experts; its gradient is ``_rows_of_choices``."""
    picked = rows.at[inverse].get(unique_indices=True, mode="promise_in_bounds")
    return jnp.sum(picked.reshape(-1, tokens, rows.shape[1]), axis=0)


_rows_of_choices.defvjp(
    lambda x, order, inverse, tokens: (_rows_of_choices(x, order, inverse, tokens), (order, inverse)),
    lambda tokens, ways, d_rows: (_sum_of_choices(d_rows, *ways, tokens), None, None),
)
_sum_of_choices.defvjp(
    lambda rows, order, inverse, tokens: (_sum_of_choices(rows, order, inverse, tokens), (order, inverse)),
    lambda tokens, ways, d_out: (_rows_of_choices(d_out, *ways, tokens), None, None),
)
