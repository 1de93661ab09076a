"""What the Pallas kernels for TPU and GPU share: the arithmetic of a block, which blocks to visit, and the derivative.

A kernel decides how a block of scores lies (queries along rows or along columns); everything here takes arrays that
broadcast against the scores. arXiv:2205.14135, arXiv:2307.08691.

Legend: B batch (1 where all rows are alike), S queries, T keys, N query heads, K kv heads, H head dim of keys, V of
values, I blocks of queries, J blocks of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels._compat import explicit_axes
from pallas_kernels.flash_attention.xla import RESIDUALS, Mask, Options

MAX_HEAD_DIM = 256
LOWEST = -0.5 * float(np.finfo(np.float32).max)
"""A finite stand-in for minus infinity, small enough that the difference of two stays finite."""
_FIRST, _LAST = np.iinfo(np.int32).min, np.iinfo(np.int32).max


# --- one block of scores --------------------------------------------------------------------------------------------


def visible(q_at: Array, kv_at: Array, q_in: Array | None, kv_in: Array | None, window: int | None) -> Array:
    """Which keys (at a position, in a segment) each query sees."""
    seen = kv_at <= q_at
    if window is not None:
        seen = seen & (kv_at > q_at - window)
    if q_in is not None and kv_in is not None:
        seen = seen & (q_in == kv_in) & (q_in != 0)
    return seen


def score(products: Array, seen: Array | None, options: Options) -> tuple[Array, Array | float]:
    """Scores with what is not seen at the lowest, and their derivative by the product of query and key."""
    scores, slope = products * options.scale, options.scale
    if options.softcap is not None:
        part = jnp.tanh(scores * (1 / options.softcap))
        scores, slope = options.softcap * part, options.scale * (1.0 - part * part)
    return scores if seen is None else jnp.where(seen, scores, LOWEST), slope


def start(sink: Array | None, like: tuple[int, ...]) -> tuple[Array, Array]:
    """(maximum, sum of weights) of rows that have seen only their sink, or nothing.

    Without a sink the maximum is half the lowest score, so that the weights of what is not seen are
    exp(lowest / 2) = 0.
    """
    if sink is None:
        return jnp.full(like, LOWEST / 2, jnp.float32), jnp.zeros(like, jnp.float32)
    return jnp.broadcast_to(sink, like), jnp.ones(like, jnp.float32)


def more_keys(top: Array, total: Array, scores: Array, axis: int) -> tuple[Array, Array, Array, Array]:
    """The online softmax: (maximum, sum, weights of these scores, what earlier sums are to be multiplied by)."""
    highest = jnp.maximum(top, jnp.max(scores, axis=axis, keepdims=True))
    weights = jnp.exp(scores - highest)
    keep = jnp.exp(top - highest)
    return highest, total * keep + jnp.sum(weights, axis=axis, keepdims=True), weights, keep


def finish(top: Array, total: Array) -> tuple[Array, Array]:
    """(what to divide the values by, logsumexp); minus the lowest for a row that has seen nothing."""
    safe = jnp.where(total > 0.0, total, 1.0)
    return safe, jnp.where(total > 0.0, top + jnp.log(safe), -LOWEST)


def gradients(scores: Array, slope: Array | float, lse: Array, d_weights: Array, delta: Array) -> tuple[Array, Array]:
    """(weights, gradient of the products of query and key)."""
    weights = jnp.exp(scores - lse)
    return weights, weights * (d_weights - delta) * slope


# --- which blocks ---------------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """Positions and segments, padded to whole blocks: a padded query comes before all keys, a padded key after all."""

    q_at: Int[Array, "B S"]
    kv_at: Int[Array, "B T"]
    q_in: Int[Array, "B S"] | None
    kv_in: Int[Array, "B T"] | None

    @classmethod
    def of(cls, mask: Mask, s: int, t: int, q_block: int, kv_block: int) -> Places:
        """Of S queries and T keys, padded to whole blocks."""
        q_at, kv_at = mask.q_positions, mask.kv_positions
        if q_at is None or kv_at is None:
            q_at, kv_at = jnp.arange(s)[None], jnp.arange(t)[None]
        # Two values are kept for padding.
        q_at, kv_at = (jnp.clip(x, _FIRST + 1, _LAST - 1).astype(jnp.int32) for x in (q_at, kv_at))
        q_in, kv_in = (None if x is None else x.astype(jnp.int32) for x in (mask.q_segments, mask.kv_segments))
        return cls(
            pad(q_at, 1, q_block, _FIRST),
            pad(kv_at, 1, kv_block, _LAST),
            None if q_in is None else pad(q_in, 1, q_block),
            None if kv_in is None else pad(kv_in, 1, kv_block),
        )

    def blocks(self, q_block: int, kv_block: int, window: int | None) -> tuple[Array, Array]:
        """Bool[B I J] twice: blocks in which something may be visible, and blocks in which everything is."""
        q_at, kv_at = _cut(self.q_at, q_block), _cut(self.kv_at, kv_block)
        q_first, q_last = _extent(jnp.where(q_at == _FIRST, _LAST, q_at), q_at, queries=True)
        kv_first, kv_last = _extent(kv_at, jnp.where(kv_at == _LAST, _FIRST, kv_at), queries=False)
        live = kv_first <= q_last
        whole = (kv_last <= q_first) & jnp.all(q_at != _FIRST, -1)[:, :, None] & jnp.all(kv_at != _LAST, -1)[:, None]
        if window is not None:
            live &= kv_last > q_first - window
            whole &= kv_first > q_last - window
        if self.q_in is not None and self.kv_in is not None:
            q_in, kv_in = _cut(self.q_in, q_block), _cut(self.kv_in, kv_block)
            (q_low, q_high), (kv_low, kv_high) = (
                _extent(jnp.where(x == 0, _LAST, x), jnp.where(x == 0, _FIRST, x), queries=queries)
                for x, queries in ((q_in, True), (kv_in, False))
            )
            live &= (q_low <= kv_high) & (kv_low <= q_high)
            alike = (q_low == q_high) & (q_low == kv_low) & (q_low == kv_high)
            whole &= alike & jnp.all(q_in != 0, -1)[:, :, None] & jnp.all(kv_in != 0, -1)[:, None]
        return live, whole


def ranges(live: Bool[Array, "B I J"], whole: Bool[Array, "B I J"]) -> Int[Array, " B*I*4"]:
    """For each i: the first j and one past the last in which something is live, and such a run of whole ones inside."""
    j = jnp.arange(live.shape[2])
    first = jnp.argmax(live, axis=-1)
    stop = jnp.max(jnp.where(live, j + 1, 0), axis=-1)
    whole_first = jnp.where(jnp.any(whole, -1), jnp.argmax(whole, axis=-1), stop)
    ends = ~whole & (j >= whole_first[..., None])
    whole_stop = jnp.where(jnp.any(ends, -1), jnp.argmax(ends, axis=-1), live.shape[2])
    whole_first, whole_stop = jnp.clip(whole_first, first, stop), jnp.clip(whole_stop, first, stop)
    return jnp.stack([first, stop, whole_first, whole_stop], axis=-1).reshape(-1).astype(jnp.int32)


def pad(x: Array, axis: int, multiple: int, value: int = 0) -> Array:
    """``x`` with ``value`` after its end, up to a multiple."""
    missing = -x.shape[axis] % multiple
    widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if missing else x


def _cut(x: Array, block: int) -> Array:
    return x.reshape(x.shape[0], -1, block)


def _extent(low: Array, high: Array, *, queries: bool) -> tuple[Array, Array]:
    """(least, greatest) of each block, to broadcast over blocks of the other kind."""
    low, high = jnp.min(low, axis=-1), jnp.max(high, axis=-1)
    return (low[:, :, None], high[:, :, None]) if queries else (low[:, None, :], high[:, None, :])


# --- the operation --------------------------------------------------------------------------------------------------


@runtime_checkable
class Kernels(Protocol):
    """What a platform provides. A logsumexp here is minus the lowest for a query that sees nothing.

    Forward's results are ``named`` as its kernel writes them: where a backward pass keeps them, it keeps that form, and
    no other order of dimensions has to be made for it.
    """

    def forward(
        self, options: Options, q: Array, k: Array, v: Array, sinks: Array | None, mask: Mask
    ) -> tuple[Float[Array, "B S N V"], Float[Array, "B S N"]]: ...

    def backward(
        self, options: Options, q: Array, k: Array, v: Array, d_out: Array, lse: Array, delta: Array, mask: Mask
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B T K H"], Float[Array, "B T K V"]]: ...


def check(name: str, q: Array, k: Array, v: Array) -> None:
    """Refuses what no Pallas kernel here can do.

    Raises:
        NotImplementedError: a dtype other than one of bfloat16 and float32, a head dim above ``MAX_HEAD_DIM``, or a
            mesh with explicit axes outside ``jax.shard_map``.
    """
    if axes := explicit_axes():
        raise NotImplementedError(
            f"{name} must be called inside a jax.shard_map that is manual over {', '.join(axes)}."
        )
    dtypes = {x.dtype for x in (q, k, v)}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype("bfloat16"), jnp.dtype("float32")}:
        named = ", ".join(f"{what} {x.dtype}{list(x.shape)}" for what, x in (("q", q), ("k", k), ("v", v)))
        raise NotImplementedError(f"{name} takes q, k and v all in bfloat16 or all in float32, not {named}.")
    if max(q.shape[3], v.shape[3]) > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"{name} takes head dims up to {MAX_HEAD_DIM}, not q {list(q.shape)} and v {list(v.shape)}."
        )
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise NotImplementedError(f"{name} takes no empty arrays: q {list(q.shape)}, k {list(k.shape)}.")


def named(out: Array, lse: Array) -> tuple[Array, Array]:
    """Attended values and logsumexp, named for policies of ``jax.checkpoint``."""
    return checkpoint_name(out, RESIDUALS[3]), checkpoint_name(lse, RESIDUALS[4])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
    kernels: Kernels, options: Options, q: Array, k: Array, v: Array, sinks: Array | None, mask: Mask
) -> tuple[Float[Array, "B S N V"], Float[Array, "B S N"]]:
    """(attended values, logsumexp) by a platform's kernels, differentiable."""
    return _forward(kernels, options, q, k, v, sinks, mask)[0]


def _forward(
    kernels: Kernels, options: Options, q: Array, k: Array, v: Array, sinks: Array | None, mask: Mask
) -> tuple[tuple[Array, Array], Any]:
    q, k, v = (checkpoint_name(x, name) for x, name in zip((q, k, v), RESIDUALS, strict=False))
    out, lse = kernels.forward(options, q, k, v, sinks, mask)
    return (out, jnp.where(lse == -LOWEST, -jnp.inf, lse)), (q, k, v, sinks, out, lse, mask)


def _backward(
    kernels: Kernels, options: Options, residuals: Any, d_results: tuple[Array, Array]
) -> tuple[Array | None, ...]:
    q, k, v, sinks, out, lse, mask = residuals
    d_out, d_lse = d_results
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1) - d_lse
    # The logsumexp of a row that has seen nothing is minus infinity, and what reaches back through it may be nan.
    delta = jnp.where(lse == -LOWEST, 0.0, delta)
    d_q, d_k, d_v = kernels.backward(options, q, k, v, d_out, lse, delta, mask)
    d_sinks = None
    if sinks is not None:
        d_sinks = -jnp.sum(jnp.exp(sinks.astype(jnp.float32) - lse) * delta, axis=(0, 1)).astype(sinks.dtype)
    return d_q, d_k, d_v, d_sinks, None


attend.defvjp(_forward, _backward)


def dot(a: Array, b: Array, over: tuple[int, int], product: Callable[..., Array] = jax.lax.dot_general) -> Array:
    """Product over one dimension of each, in float32; float32 operands are multiplied as such, not rounded first."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dims = (((over[0],), (over[1],)), ((), ()))
    return product(a, b, dims, precision=exact, preferred_element_type=jnp.float32)
