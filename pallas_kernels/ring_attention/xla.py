"""Ring attention in plain JAX from the blocks of ``flash_attention``, for any backend.

At each step a shard attends to the keys it holds and sends them on; the partial outputs are combined by their
logsumexps. The backward pass goes around once more: gradients of keys and values follow the keys, accumulating, and
return home at the end (arXiv:2310.01889). Communication and computation of a step are independent, so the compiler can
overlap them.

What is masked for a whole step is not computed: with a contiguous layout the steps with later keys, and all beyond a
sliding window; with zigzag the half of every step that the causal mask hides.

Legend: B batch, S tokens of a shard, N query heads, K kv heads, H head dim of keys, V of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_over, varying_axes
from pallas_kernels.flash_attention.xla import attention_xla, block_gradients
from pallas_kernels.ring_attention.layout import Layout, places


class RingConfig(NamedTuple):
    """Static configuration of a ring: mesh axis, number of shards, layout and score options.

    Attributes:
        axis: mesh axis.
        shards: devices of the ring: all of the axis, or each of its aligned groups of so many neighbours.
        devices: of the axis.
        layout: positions that each shard holds; None: they are given with the tokens.
        scale, window, softcap: of the scores.
    """

    axis: str
    shards: int
    devices: int
    layout: Layout | None
    scale: float
    window: int | None
    softcap: float | None

    def steps(self, size: int) -> int:
        """Number of shards whose keys a shard can see, its own included."""
        if self.layout == "contiguous" and self.window is not None:
            return min(self.shards, 1 + -(-(self.window - 1) // size))
        return self.shards

    def place(self) -> Int[Array, ""]:
        """Index of this shard in its ring."""
        mine = jax.lax.axis_index(self.axis)
        return mine if self.shards == self.devices else mine % self.shards

    def gather(self, x: Array) -> Array:
        """The arrays of all shards of this ring, in order, along a new first dimension (all-gather)."""
        if self.shards == self.devices:
            return jax.lax.all_gather(x, self.axis)
        groups = [list(range(r, r + self.shards)) for r in range(0, self.devices, self.shards)]
        return jax.lax.all_gather(x, self.axis, axis_index_groups=groups)

    def shift(self, tree: Any, by: int) -> Any:
        """Sends each shard's arrays to the shard ``by`` places further (collective permute)."""
        if by % self.shards == 0:
            return tree
        to = [(r, r - r % self.shards + (r + by) % self.shards) for r in range(self.devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, to), tree)


def in_one_ring(pass_of: Callable[..., Any]) -> Callable[..., Any]:
    """A pass around one of several rings: ``(rings, which, *arrays)``, where ``pass_of(ring, *arrays)`` is around one.

    ``which`` is traced, and the same on all devices. Each ring is a branch of one conditional, inside the forward and
    inside the backward pass, so that the residuals are those of one ring.
    """

    def chosen(rings: tuple[RingConfig, ...], which: Array | None, *arrays: Any) -> Any:
        if which is None:
            return pass_of(rings[0], *arrays)
        return jax.lax.switch(which, [functools.partial(pass_of, ring) for ring in rings], *arrays)

    return chosen


class KVShard(NamedTuple):
    """Rotating shard: keys, values, their segment ids, and their positions where no layout says them."""

    k: Array
    v: Array
    segments: Array | None
    positions: Array | None


class VisibleSlices(NamedTuple):
    """Queries and keys of a step that can see one another: all of them, or one half."""

    queries: slice
    keys: slice


def ring_attention_xla(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    segment_ids: Int[Array, "B S"] | None,
    positions: Int[Array, "B S"] | None,
    sinks: Float[Array, " N"] | None,
    *,
    rings: tuple[RingConfig, ...],
    which: Int[Array, ""] | None,
) -> Float[Array, "B S N V"]:
    """Ring attention in plain JAX; see ``ring_attention``."""
    return _ring(rings, which, q, k, v, segment_ids, positions, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(rings: tuple[RingConfig, ...], which: Array | None, *arrays: Array | None) -> Array:
    return _forward(rings, which, *arrays)[0]


def _forward(rings: tuple[RingConfig, ...], which: Array | None, *arrays: Array | None) -> tuple[Array, Any]:
    out, lse = _attend(rings, which, *arrays)
    return out, (which, *arrays, out, lse)


@in_one_ring
def _attend(
    ring: RingConfig,
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    positions: Array | None,
    sinks: Array | None,
) -> tuple[Array, Array]:
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    own = KVShard(k, v, segments, positions)

    def attend(keys: KVShard, place: _StepPositions, part: VisibleSlices) -> Any:
        """(output, logsumexp) of all queries; queries outside the slices have seen nothing."""
        masks = place.masks(part, segments, keys.segments)
        out, lse = attention_xla(
            q[:, part.queries],
            keys.k[:, part.keys],
            keys.v[:, part.keys],
            None,
            **masks,
            scale=ring.scale,
            window=ring.window,
            softcap=ring.softcap,
        )
        full = jnp.zeros((*q.shape[:3], v.shape[3]), dtype), jnp.full(q.shape[:3], -jnp.inf, dtype)
        return tuple(_into(whole, x.astype(dtype), part.queries) for whole, x in zip(full, (out, lse), strict=True))

    def join(total: tuple[Array, Array], part: tuple[Array, Array]) -> tuple[Array, Array]:
        top = jnp.maximum(total[1], part[1])
        top = jnp.where(top == -jnp.inf, 0.0, top)
        a, b = jnp.exp(total[1] - top), jnp.exp(part[1] - top)
        whole = jnp.where(a + b == 0.0, 1.0, a + b)
        out = (total[0] * a[..., None] + part[0] * b[..., None]) / whole[..., None]
        return out, jnp.where(a + b == 0.0, -jnp.inf, top + jnp.log(whole))

    nothing = jnp.zeros((*q.shape[:3], v.shape[3]), dtype), jnp.full(q.shape[:3], -jnp.inf, dtype)
    nothing = _vary_like(q, nothing)

    def step(i: Array | int, total: tuple[Array, Array], keys: KVShard) -> tuple[Array, Array]:
        given = _given(ring, positions, keys)
        return join(total, _where_visible(ring, q, i, nothing, functools.partial(attend, keys), given))

    def body(carry: tuple[Any, KVShard], i: Array) -> tuple[tuple[Any, KVShard], None]:
        total, keys = carry
        return (step(i, total, keys), ring.shift(keys, 1)), None

    last = ring.steps(q.shape[1]) - 1
    (total, keys), _ = jax.lax.scan(body, (nothing, own), jnp.arange(last, dtype=jnp.int32))
    out, lse = step(last, total, keys)
    if sinks is not None:
        with_sink = jnp.logaddexp(lse, sinks.astype(dtype))
        out, lse = out * jnp.exp(lse - with_sink)[..., None], with_sink
    return out.astype(q.dtype), lse


def _backward(rings: tuple[RingConfig, ...], residuals: Any, d_out: Array) -> tuple[Array | None, ...]:
    which, *arrays = residuals
    d_q, d_k, d_v, d_sinks = _gradients(rings, which, *arrays, d_out)
    return None, d_q, d_k, d_v, None, None, d_sinks


@in_one_ring
def _gradients(
    ring: RingConfig,
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    positions: Array | None,
    sinks: Array | None,
    out: Array,
    lse: Array,
    d_out: Array,
) -> tuple[Array | None, ...]:
    dtype = lse.dtype

    def gradients(keys: KVShard, place: _StepPositions, part: VisibleSlices) -> Any:
        """Gradients (dq, dk, dv) of all queries, keys and values; zero outside the slices."""
        rows = (x[:, part.queries] for x in (out, lse, d_out))
        d_q, d_k, d_v = block_gradients(
            q[:, part.queries],
            keys.k[:, part.keys],
            keys.v[:, part.keys],
            *rows,
            **place.masks(part, segments, keys.segments),
            scale=ring.scale,
            window=ring.window,
            softcap=ring.softcap,
        )
        wholes = (jnp.zeros(x.shape, dtype) for x in (q, k, v))
        at = part.queries, part.keys, part.keys
        return tuple(_into(w, x.astype(dtype), i) for w, x, i in zip(wholes, (d_q, d_k, d_v), at, strict=True))

    nothing = _vary_like(q, tuple(jnp.zeros(x.shape, dtype) for x in (q, k, v)))
    last = ring.steps(q.shape[1]) - 1

    def step(i: Array | int, d_q: Array, keys: KVShard, d_keys: tuple[Array, Array]) -> tuple[Array, Any]:
        # Gradients follow their keys one step behind: sent after this step's addition, they could not be overlapped.
        arrived = ring.shift(d_keys, 1) if last else d_keys
        given = _given(ring, positions, keys)
        more = _where_visible(ring, q, i, nothing, functools.partial(gradients, keys), given)
        return d_q + more[0], (arrived[0] + more[1], arrived[1] + more[2])

    def body(carry: tuple[Array, KVShard, Any], i: Array) -> tuple[Any, None]:
        d_q, keys, d_keys = carry
        passed = ring.shift(keys, 1)
        d_q, d_keys = step(i, d_q, keys, d_keys)
        return (d_q, passed, d_keys), None

    start = nothing[0], KVShard(k, v, segments, positions), nothing[1:]
    (d_q, keys, d_keys), _ = jax.lax.scan(body, start, jnp.arange(last, dtype=jnp.int32))
    d_q, d_keys = step(last, d_q, keys, d_keys)
    d_k, d_v = ring.shift((d_keys[0].astype(k.dtype), d_keys[1].astype(v.dtype)), -last)
    d_sinks = None
    if sinks is not None:
        delta = jnp.sum(out.astype(dtype) * d_out.astype(dtype), axis=-1)
        d_sinks = -jnp.sum(jnp.exp(sinks.astype(dtype) - lse) * delta, axis=(0, 1)).astype(sinks.dtype)
    return d_q.astype(q.dtype), d_k, d_v, d_sinks


_ring.defvjp(_forward, _backward)


class _StepPositions(NamedTuple):
    """Positions of a shard's queries and of the keys it holds at a step; None: by index."""

    queries: Int[Array, "B S"] | None
    keys: Int[Array, "B S"] | None

    def masks(
        self, part: VisibleSlices, q_segments: Array | None, kv_segments: Array | None
    ) -> dict[str, Array | None]:
        """Mask arguments of ``flash_attention`` for these slices."""
        rows = None if q_segments is None else q_segments[:, part.queries]
        return {
            "q_positions": None if self.queries is None else self.queries[:, part.queries],
            "kv_positions": None if self.keys is None else self.keys[:, part.keys],
            "q_segment_ids": rows,
            "kv_segment_ids": None if kv_segments is None else kv_segments[:, part.keys],
        }


def _given(ring: RingConfig, positions: Array | None, keys: KVShard) -> _StepPositions | None:
    """Positions of a step that come with the tokens; None: those of the layout."""
    if ring.layout is not None:
        return None
    # A shard has the tokens of each segment in order: alone, it is masked by index, whose bands are known when traced.
    return _StepPositions(None, None) if ring.shards == 1 else _StepPositions(positions, keys.positions)


def _where_visible(
    ring: RingConfig,
    q: Array,
    step: Array | int,
    nothing: Any,
    compute: Callable[[_StepPositions, VisibleSlices], Any],
    given: _StepPositions | None,
) -> Any:
    """``compute(place, part)`` on the visible slices of a step; ``nothing`` where no key is visible."""
    batch, size = q.shape[:2]
    axes = varying_axes(*jax.tree.leaves(nothing))
    everything, half = VisibleSlices(slice(0, size), slice(0, size)), size // 2
    if ring.layout is None:
        assert given is not None
        return jax.tree.map(lambda x: vary_over(x, axes), compute(given, everything))
    mine = ring.place()
    theirs = (mine - step) % ring.shards
    both = (places(ring.layout, shard, ring.shards, size) for shard in (mine, theirs))
    place = _StepPositions(*(jnp.broadcast_to(x, (batch, size)) for x in both))

    def branch(part: VisibleSlices) -> Callable[[], Any]:
        return lambda: jax.tree.map(lambda x: vary_over(x, axes), compute(place, part))

    if ring.layout == "striped":
        return branch(everything)()
    if ring.layout == "contiguous":
        return jax.lax.cond(theirs <= mine, branch(everything), lambda: nothing)
    # Zigzag. An earlier shard's first half precedes all queries here and its second half follows them; a later
    # shard's keys all lie between this shard's first half and its second.
    earlier, later = VisibleSlices(slice(0, size), slice(0, half)), VisibleSlices(slice(half, size), slice(0, size))
    which = jnp.where(theirs == mine, 0, jnp.where(theirs < mine, 1, 2))
    return jax.lax.switch(which, [branch(everything), branch(earlier), branch(later)])


def _into(whole: Array, part: Array, rows: slice) -> Array:
    """``whole`` with ``part`` at these rows."""
    if part.shape[1] == whole.shape[1]:
        return part
    return jax.lax.dynamic_update_slice_in_dim(vary_over(whole, varying_axes(part)), part, rows.start, 1)


def _vary_like(x: Array, tree: Any) -> Any:
    return jax.tree.map(lambda y: vary_over(y, varying_axes(x)), tree)
