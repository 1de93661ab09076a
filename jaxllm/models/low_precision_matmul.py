"""LowPrecisionMatmul of activations and weights whose factors are rounded to 8 bits, forward and backward.

A layer's output, the gradient of its input and that of its weight are three products of the same three arrays: of x and
w, of dy and w, of x and dy. Each factor is divided by a scale that brings its largest number to the format's, rounded,
multiplied with the other in 8 bits, summed in at least 32, and scaled back. Scales are of

    a vector    all numbers that one sum runs over: a token's, a channel's (int8: arXiv:2208.07339, arXiv:2304.13013)
    the array   float8 e4m3, gradients of outputs in e5m2 (arXiv:2209.05433); from its own largest number ("current"),
                or from that of the last steps ("delayed", Transformer Engine), which is state
    a block     ``MX_BLOCK`` numbers along the sum (MX, arXiv:2310.10537; DeepSeek-V3, arXiv:2412.19437 section 3.3).
                What XLA has for all devices is a product of what the rounded numbers stand for, in compute dtype:
                the rounding is the format's, the speed is not.

Legend: T dimensions of tokens, C those that a product sums over, O those of its result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxllm.models.params import at_least_f32

MatmulPrecision = Literal["plain", "int8", "fp8_current", "fp8_delayed", "fp8_block"]
MX_BLOCK = 32
"""Numbers that share a scale in ``fp8_block``, as in MX formats; fewer where a sum is shorter or does not divide."""
AMAX_HISTORY_LENGTH = 16
"""Steps whose largest numbers ``fp8_delayed`` remembers."""
AMAX_HISTORY = "seen"
"""Where in a block's parameters the history of its products is during a step of ``fp8_delayed``."""
OPERANDS = 3
"""x, w and dy: what a product remembers largest numbers of."""

Axes = tuple[int, ...]


@dataclass(frozen=True)
class QuantisationScheme:
    """How factors are rounded.

    Attributes:
        kind: see the module.
    """

    kind: MatmulPrecision

    @property
    def bits8(self) -> bool:
        """Whether products themselves are of 8-bit numbers."""
        return self.kind in ("int8", "fp8_current", "fp8_delayed")

    def format(self, gradient: bool) -> Any:
        """The dtype that a factor is rounded to."""
        if self.kind == "int8":
            return jnp.int8
        return jnp.float8_e5m2 if gradient and self.kind != "fp8_block" else jnp.float8_e4m3fn

    def largest(self, x: Array, over: Axes) -> Array:
        """Of the numbers that share a scale, where ``over`` are the dimensions that a product sums over."""
        axes = over if self.kind == "int8" else None
        return jnp.maximum(jnp.max(x, axis=axes, keepdims=True), -jnp.min(x, axis=axes, keepdims=True))

    def rounded(self, x: Array, over: Axes, gradient: bool, largest: Array | None = None) -> tuple[Array, Array]:
        """Numbers in the format, and the scales to multiply them with, of x's dimensions or one each."""
        wide = x.astype(at_least_f32(x.dtype))
        if self.kind == "fp8_block":
            return _in_blocks(wide, over[-1], self.format(gradient)).astype(x.dtype), jnp.ones(
                (1,) * x.ndim, wide.dtype
            )
        form = self.format(gradient)
        most = 127 if form == jnp.int8 else float(jnp.finfo(form).max)
        found = self.largest(wide, over) if largest is None else largest.astype(wide.dtype)
        scale = jnp.where(found > 0, found, 1) / most
        scaled = jnp.clip(wide / scale, -most, most)
        return (jnp.round(scaled) if form == jnp.int8 else scaled).astype(form), scale


def _in_blocks(x: Array, axis: int, form: Any) -> Array:
    """What numbers stand for that share a power of two by blocks along ``axis``: the least that holds the largest."""
    size = x.shape[axis]
    length = next(n for n in range(min(MX_BLOCK, size), 0, -1) if size % n == 0)
    parts = x.reshape(*x.shape[:axis], size // length, length, *x.shape[axis + 1 :])
    found = jnp.max(jnp.abs(parts), axis=axis + 1, keepdims=True)
    scale = jnp.exp2(jnp.ceil(jnp.log2(jnp.where(found > 0, found, 1) / float(jnp.finfo(form).max))))
    return ((parts / scale).astype(form).astype(x.dtype) * scale).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def quantised_matmul(
    scheme: QuantisationScheme,
    contract: int,
    there: PartitionSpec | None,
    x: Array,
    w: Array,
    seen: Float[Array, "3 H"] | None,
) -> Array:
    """``x[*T, *C]`` times ``w[*C, *O]`` in x's dtype, over ``contract`` dimensions; its gradients likewise.

    Args:
        there: where the result is, as ``jax.lax.dot_general`` takes it.
        seen: of "fp8_delayed", the largest numbers of x, w and dy in the last steps; its "gradient" is what was seen in
            this one, first in each row and zeros after it. None: those of these arrays.
    """
    return _forward(scheme, contract, there, x, w, seen)[0]


def _forward(
    scheme: QuantisationScheme, contract: int, there: PartitionSpec | None, x: Array, w: Array, seen: Array | None
) -> tuple[Array, Any]:
    x_over, w_over = tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract))
    (qx, sx), (qw, sw) = (
        scheme.rounded(plain, over, False, _remembered(seen, i, plain))
        for i, (plain, over) in enumerate(((_plain(x), x_over), (_plain(w), w_over)))
    )
    tokens, out = tuple(range(x.ndim - contract)), tuple(range(contract, w.ndim))
    y = _times(_dot(qx, qw, x_over, w_over, there), _spread(sx, tokens, len(out)))
    y = _times(y, _spread(sw, out, len(tokens), after=False))
    # Kept as it is, not rounded: products of one x share it, and int8 and blocks are rounded along another sum later.
    return y.astype(x.dtype), (x, w, seen)


def _backward(
    scheme: QuantisationScheme, contract: int, there: PartitionSpec | None, kept: Any, dy: Array
) -> tuple[Any, ...]:
    x, w, seen = kept
    tokens, x_in = tuple(range(x.ndim - contract)), tuple(range(x.ndim - contract, x.ndim))
    w_in, w_out = tuple(range(contract)), tuple(range(contract, w.ndim))
    dy_out = tuple(range(len(tokens), dy.ndim))
    plain = [_plain(value) for value in (x, w, dy)]
    largest = [_remembered(seen, i, value) for i, value in enumerate(plain)]

    def rounded(i: int, over: Axes) -> tuple[Array, Array]:
        return scheme.rounded(plain[i], over, i == 2, largest[i])

    (qdy, sdy), (qw, sw) = rounded(2, dy_out), rounded(1, w_out)
    dx = _times(_dot(qdy, qw, dy_out, w_out, _of_gradient(x)), _spread(sdy, tokens, contract))
    dx = _times(dx, _spread(sw, w_in, len(tokens), after=False))
    (qdy, sdy), (qx, sx) = rounded(2, tokens), rounded(0, tokens)
    dw = _times(_dot(qx, qdy, tokens, tokens, _of_gradient(w)), _spread(sx, x_in, len(dy_out)))
    dw = _times(dw, _spread(sdy, dy_out, contract, after=False))
    if seen is None:
        return dx.astype(x.dtype), dw.astype(w.dtype), None
    now = jnp.stack([jnp.max(jnp.abs(value)).astype(seen.dtype) for value in plain])
    return dx.astype(x.dtype), dw.astype(w.dtype), jnp.zeros_like(seen).at[:, 0].set(now)


quantised_matmul.defvjp(_forward, _backward)


def _remembered(seen: Array | None, factor: int, x: Array) -> Array | None:
    """The largest number of the last steps; of this array, before there were any."""
    if seen is None:
        return None
    before = jnp.max(seen[factor])
    return jnp.where(before > 0, before, jnp.max(jnp.abs(x)).astype(seen.dtype)).reshape((1,) * x.ndim)


def _dot(a: Array, b: Array, a_over: Axes, b_over: Axes, there: PartitionSpec | None) -> Array:
    sums = jnp.int32 if a.dtype == jnp.int8 else jnp.float32 if a.dtype.itemsize == 1 else at_least_f32(a.dtype)
    y = jax.lax.dot_general(a, b, ((a_over, b_over), ((), ())), preferred_element_type=sums, out_sharding=there)
    return y.astype(jnp.float32) if sums == jnp.int32 else y


def _spread(scale: Array, own: Axes, others: int, after: bool = True) -> Array:
    """Scales of dimensions ``own``, with as many more of one after them, or before them, as a result has others."""
    ones, kept = (1,) * others, tuple(scale.shape[i] for i in own)
    return scale.reshape(*kept, *ones) if after else scale.reshape(*ones, *kept)


def _times(y: Array, scale: Array) -> Array:
    """Devices that hold summands of y each multiply theirs."""
    spec = _spec(y)
    if spec is not None and spec.unreduced:
        scale = jax.sharding.reshard(scale, jax.P(*_spec(scale).partitions, reduced=spec.unreduced))  # type: ignore[union-attr]
    return y * scale.astype(y.dtype)


def _spec(x: Array) -> PartitionSpec | None:
    """Where an array is, under a mesh of explicit axes."""
    return None if jax.sharding.get_abstract_mesh().empty else jax.typeof(x).sharding.spec


def _of_gradient(x: Array) -> PartitionSpec | None:
    """Where the gradient of an array is: summands are left as they are where it says so."""
    spec = _spec(x)
    return None if spec is None else jax.P(*spec.partitions, unreduced=spec.reduced)


def _plain(x: Array) -> Array:
    """The array without word of how its gradient is to be summed: that is ours to say."""
    spec = _spec(x)
    return x if spec is None or not spec.reduced else jax.sharding.reshard(x, jax.P(*spec.partitions))


class LowPrecisionMatmul:
    """The products of one block as they are traced, in order: hands each its row of largest numbers.

    Attributes:
        scheme: of all of them.
        seen: of "fp8_delayed" in training; None: there is no such state, and what is there now decides.
        count: products so far.
    """

    def __init__(self, kind: MatmulPrecision, seen: Float[Array, "P 3 H"] | None = None):
        self.scheme, self.seen, self.count = QuantisationScheme(kind), seen, 0

    def __call__(self, x: Array, w: Array, contract: int, there: PartitionSpec | None) -> Array:
        """``sharding.Product``."""
        seen = None if self.seen is None else self.seen[self.count]
        self.count += 1
        return quantised_matmul(self.scheme, contract, there, x, w, seen)


def init_amax_history(products: Sequence[int], repeats: int) -> dict[str, Float[Array, "L P 3 H"]]:
    """What "fp8_delayed" knows of a segment's blocks before the first step, of so many products each."""
    return {str(b): jnp.zeros((repeats, count, OPERANDS, AMAX_HISTORY_LENGTH)) for b, count in enumerate(products)}


def update_amax_history(seen: Float[Array, "..."], now: Float[Array, "..."]) -> Float[Array, "..."]:
    """The history after a step whose "gradient" of it is ``now``; the oldest step is forgotten."""
    return jnp.concatenate([now[..., :1], seen[..., :-1]], axis=-1)
