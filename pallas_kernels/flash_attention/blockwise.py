"""Flash attention shared by the Pallas kernels: online softmax of a block, block-sparse mask ranges, and the custom
VJP.

A kernel decides the orientation of a block of scores (queries along rows or along columns); all functions here take
arrays that broadcast against the scores. arXiv:2205.14135, arXiv:2307.08691.

Legend: B batch (1 where all rows are alike), S queries, T keys, N query heads, K kv heads, H head dim of keys, V of
values, I blocks of queries, J blocks of keys.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._pallas import MASK_VALUE, pad_to_multiple
from pallas_kernels._pallas import check_supported as check_operands
from pallas_kernels.flash_attention.xla import RESIDUALS, AttentionMask, ScoreOptions

MAX_HEAD_DIM = 256
_Q_PAD, _K_PAD = np.iinfo(np.int32).min, np.iinfo(np.int32).max


# --- one block of scores --------------------------------------------------------------------------------------------


def visibility_mask(
    q_pos: Array, kv_pos: Array, q_seg: Array | None, kv_seg: Array | None, window: int | None
) -> Array:
    """Causal, sliding-window and segment mask of a block: which keys each query sees.

    Args:
        q_pos, kv_pos: positions of the queries and keys.
        q_seg, kv_seg: segment ids, or None.
        window: size of the sliding window, or None.
    """
    seen = kv_pos <= q_pos
    if window is not None:
        seen = seen & (kv_pos > q_pos - window)
    if q_seg is not None and kv_seg is not None:
        seen = seen & (q_seg == kv_seg) & (q_seg != 0)
    return seen


def masked_scores(products: Array, seen: Array | None, options: ScoreOptions) -> tuple[Array, Array | float]:
    """Scaled, soft-capped and masked scores, and their derivative with respect to ``products`` (q k^T)."""
    scores, slope = products * options.scale, options.scale
    if options.softcap is not None:
        part = jnp.tanh(scores * (1 / options.softcap))
        scores, slope = options.softcap * part, options.scale * (1.0 - part * part)
    return scores if seen is None else jnp.where(seen, scores, MASK_VALUE), slope


def init_softmax(sink: Array | None, like: tuple[int, ...]) -> tuple[Array, Array]:
    """Initial online-softmax state (maximum, sum of weights): that of the attention sink, or that of an empty row.

    Without a sink the maximum starts at half the mask value, so that masked scores get weight exp(mask / 2) = 0.
    """
    if sink is None:
        return jnp.full(like, MASK_VALUE / 2, jnp.float32), jnp.zeros(like, jnp.float32)
    return jnp.broadcast_to(sink, like), jnp.ones(like, jnp.float32)


def online_softmax_step(top: Array, total: Array, scores: Array, axis: int) -> tuple[Array, Array, Array, Array]:
    """Online-softmax update by a block: (maximum, sum, weights of these scores, factor that rescales earlier sums)."""
    highest = jnp.maximum(top, jnp.max(scores, axis=axis, keepdims=True))
    weights = jnp.exp(scores - highest)
    keep = jnp.exp(top - highest)
    return highest, total * keep + jnp.sum(weights, axis=axis, keepdims=True), weights, keep


def finish_softmax(top: Array, total: Array) -> tuple[Array, Array]:
    """(divisor of the accumulated values, logsumexp); a row that has seen nothing has logsumexp ``-MASK_VALUE``."""
    safe = jnp.where(total > 0.0, total, 1.0)
    return safe, jnp.where(total > 0.0, top + jnp.log(safe), -MASK_VALUE)


def score_gradients(
    scores: Array, slope: Array | float, lse: Array, d_weights: Array, delta: Array
) -> tuple[Array, Array]:
    """Recomputed probabilities of a block, and the gradient of ``products`` (q k^T).

    Args:
        scores, slope: see ``masked_scores``.
        lse: logsumexp of each query.
        d_weights: gradient of the probabilities, d_out v^T.
        delta: row sum of ``out * d_out``, less the gradient of the logsumexp.
    """
    weights = jnp.exp(scores - lse)
    return weights, weights * (d_weights - delta) * slope


def visible_pairs(queries: int, keys: int, window: int | None) -> float:
    """Number of (query, key) pairs that a causal sliding-window mask leaves; the last query is at the last key."""
    if queries == keys:
        reach = keys if window is None else min(window, keys)
        return reach * (reach + 1) / 2 + (keys - reach) * reach
    return queries * (keys if window is None else min(window, keys))


# --- blocks that the mask leaves ------------------------------------------------------------------------------------


class PaddedMask(NamedTuple):
    """Positions and segment ids padded to whole blocks: a padded query precedes all keys, a padded key follows all
    queries.
    """

    q_pos: Int[Array, "B S"]
    kv_pos: Int[Array, "B T"]
    q_seg: Int[Array, "B S"] | None
    kv_seg: Int[Array, "B T"] | None

    @classmethod
    def of(cls, mask: AttentionMask, s: int, t: int, q_block: int, kv_block: int) -> PaddedMask:
        """Mask of S queries and T keys, padded to whole blocks."""
        q_pos, kv_pos = mask.q_positions, mask.kv_positions
        if q_pos is None or kv_pos is None:
            q_pos, kv_pos = jnp.arange(s)[None], jnp.arange(t)[None]
        # The two extreme values are reserved for padding.
        q_pos, kv_pos = (jnp.clip(x, _Q_PAD + 1, _K_PAD - 1).astype(jnp.int32) for x in (q_pos, kv_pos))
        q_seg, kv_seg = (None if x is None else x.astype(jnp.int32) for x in (mask.q_segments, mask.kv_segments))
        return cls(
            pad_to_multiple(q_pos, 1, q_block, _Q_PAD),
            pad_to_multiple(kv_pos, 1, kv_block, _K_PAD),
            None if q_seg is None else pad_to_multiple(q_seg, 1, q_block),
            None if kv_seg is None else pad_to_multiple(kv_seg, 1, kv_block),
        )

    def blocks(self, q_block: int, kv_block: int, window: int | None) -> tuple[Array, Array]:
        """Block masks Bool[B I J] twice: blocks with some visible pair (live), and blocks in which every pair is
        visible (whole).
        """
        q_pos, kv_pos = _into_blocks(self.q_pos, q_block), _into_blocks(self.kv_pos, kv_block)
        q_first, q_last = _min_max(jnp.where(q_pos == _Q_PAD, _K_PAD, q_pos), q_pos, queries=True)
        kv_first, kv_last = _min_max(kv_pos, jnp.where(kv_pos == _K_PAD, _Q_PAD, kv_pos), queries=False)
        live = kv_first <= q_last
        whole = (kv_last <= q_first) & jnp.all(q_pos != _Q_PAD, -1)[:, :, None] & jnp.all(kv_pos != _K_PAD, -1)[:, None]
        if window is not None:
            live &= kv_last > q_first - window
            whole &= kv_first > q_last - window
        if self.q_seg is not None and self.kv_seg is not None:
            q_seg, kv_seg = _into_blocks(self.q_seg, q_block), _into_blocks(self.kv_seg, kv_block)
            (q_low, q_high), (kv_low, kv_high) = (
                _min_max(jnp.where(x == 0, _K_PAD, x), jnp.where(x == 0, _Q_PAD, x), queries=queries)
                for x, queries in ((q_seg, True), (kv_seg, False))
            )
            live &= (q_low <= kv_high) & (kv_low <= q_high)
            alike = (q_low == q_high) & (q_low == kv_low) & (q_low == kv_high)
            whole &= alike & jnp.all(q_seg != 0, -1)[:, :, None] & jnp.all(kv_seg != 0, -1)[:, None]
        return live, whole


def block_ranges(live: Bool[Array, "B I J"], whole: Bool[Array, "B I J"]) -> Int[Array, " B*I*4"]:
    """Key-block ranges (live start, live stop, whole start, whole stop) of each query block i, flattened.

    Only the blocks in the live range are visited; in the whole range, which lies inside it, the mask is not computed.
    """
    j = jnp.arange(live.shape[2])
    first = jnp.argmax(live, axis=-1)
    stop = jnp.max(jnp.where(live, j + 1, 0), axis=-1)
    whole_first = jnp.where(jnp.any(whole, -1), jnp.argmax(whole, axis=-1), stop)
    ends = ~whole & (j >= whole_first[..., None])
    whole_stop = jnp.where(jnp.any(ends, -1), jnp.argmax(ends, axis=-1), live.shape[2])
    whole_first, whole_stop = jnp.clip(whole_first, first, stop), jnp.clip(whole_stop, first, stop)
    return jnp.stack([first, stop, whole_first, whole_stop], axis=-1).reshape(-1).astype(jnp.int32)


def _into_blocks(x: Array, block: int) -> Array:
    return x.reshape(x.shape[0], -1, block)


def _min_max(low: Array, high: Array, *, queries: bool) -> tuple[Array, Array]:
    """(minimum, maximum) of each block, shaped to broadcast over the blocks of the other kind."""
    low, high = jnp.min(low, axis=-1), jnp.max(high, axis=-1)
    return (low[:, :, None], high[:, :, None]) if queries else (low[:, None, :], high[:, None, :])


# --- the operation --------------------------------------------------------------------------------------------------


@runtime_checkable
class FlashKernels(Protocol):
    """Interface of a platform's forward and backward kernels; a logsumexp here is ``-MASK_VALUE`` for a query that
    sees nothing.

    ``forward`` applies ``name_residuals`` to its results in the kernel's own layout: a remat policy then saves that
    layout, and no transposed copy is made for it.
    """

    def forward(
        self, options: ScoreOptions, q: Array, k: Array, v: Array, sinks: Array | None, mask: AttentionMask
    ) -> tuple[Float[Array, "B S N V"], Float[Array, "B S N"]]:
        """Attention output and logsumexp."""
        ...

    def backward(
        self,
        options: ScoreOptions,
        q: Array,
        k: Array,
        v: Array,
        d_out: Array,
        lse: Array,
        delta: Array,
        mask: AttentionMask,
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B T K H"], Float[Array, "B T K V"]]:
        """Gradients (dq, dk, dv), given the output's gradient, the logsumexp and delta."""
        ...


def check_supported(name: str, q: Array, k: Array, v: Array) -> None:
    """Raises for arguments that no Pallas attention kernel supports.

    Raises:
        NotImplementedError: a head dim is above ``MAX_HEAD_DIM``, or see ``pallas_kernels._pallas.check_supported``.
    """
    check_operands(name, q=q, k=k, v=v)
    if max(q.shape[3], v.shape[3]) > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"{name} takes head dims up to {MAX_HEAD_DIM}, not q {list(q.shape)} and v {list(v.shape)}."
        )


def name_residuals(out: Array, lse: Array) -> tuple[Array, Array]:
    """Attention output and logsumexp, named for policies of ``jax.checkpoint``."""
    return checkpoint_name(out, RESIDUALS[3]), checkpoint_name(lse, RESIDUALS[4])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    kernels: FlashKernels, options: ScoreOptions, q: Array, k: Array, v: Array, sinks: Array | None, mask: AttentionMask
) -> tuple[Float[Array, "B S N V"], Float[Array, "B S N"]]:
    """Flash attention by a platform's kernels: (output, logsumexp), differentiable."""
    return _forward(kernels, options, q, k, v, sinks, mask)[0]


def _forward(
    kernels: FlashKernels, options: ScoreOptions, q: Array, k: Array, v: Array, sinks: Array | None, mask: AttentionMask
) -> tuple[tuple[Array, Array], Any]:
    q, k, v = (checkpoint_name(x, name) for x, name in zip((q, k, v), RESIDUALS, strict=False))
    out, lse = kernels.forward(options, q, k, v, sinks, mask)
    return (out, jnp.where(lse == -MASK_VALUE, -jnp.inf, lse)), (q, k, v, sinks, out, lse, mask)


def _backward(
    kernels: FlashKernels, options: ScoreOptions, residuals: Any, d_results: tuple[Array, Array]
) -> tuple[Array | None, ...]:
    q, k, v, sinks, out, lse, mask = residuals
    d_out, d_lse = d_results
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1) - d_lse
    # A row that has seen nothing has a logsumexp of minus infinity, whose incoming gradient may be nan.
    delta = jnp.where(lse == -MASK_VALUE, 0.0, delta)
    d_q, d_k, d_v = kernels.backward(options, q, k, v, d_out, lse, delta, mask)
    d_sinks = None
    if sinks is not None:
        d_sinks = -jnp.sum(jnp.exp(sinks.astype(jnp.float32) - lse) * delta, axis=(0, 1)).astype(sinks.dtype)
    return d_q, d_k, d_v, d_sinks, None


attend.defvjp(_forward, _backward)
