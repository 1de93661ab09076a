"""MXFP4 arithmetic: rounding to 4-bit floats (e2m1) with power-of-two scales (e8m0), and block Hadamard transforms.

Values are rounded by plain arithmetic, since not every compiler has a 4-bit dtype, and are given as floats that a
4-bit dtype could hold. OCP Microscaling Formats (MX) 1.0; arXiv:2310.10537.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, UInt

from jaxllm.models.operand_specs import spec_of

GROUP = 32
"""Values that share a scale."""
LARGEST = 6.0
"""Largest e2m1 value."""
LARGEST_EXPONENT = 2
"""Exponent of the largest e2m1 value, 6 = 1.5 * 2 ** 2."""
BIAS = 127
"""Bias of the scale's exponent."""


def round_to_e2m1(magnitude: Float[Array, "..."]) -> Float[Array, "..."]:
    """Nearest e2m1 value of magnitudes of at most 6, ties to even."""
    step = e2m1_step(magnitude)
    return jnp.round(magnitude / step) * step


def round_to_e2m1_stochastically(x: Float[Array, "..."], bits: UInt[Array, "..."]) -> Float[Array, "..."]:
    """One of the two e2m1 values around each x, whose mean is x; magnitudes above 6 are clipped.

    Args:
        bits: random 16-bit words; the probabilities are multiples of 1 / 65536.
    """
    magnitude = jnp.minimum(jnp.abs(x), LARGEST)
    step = e2m1_step(magnitude)
    steps = magnitude / step
    below = jnp.floor(steps)
    up = (bits.astype(x.dtype) + 0.5) / 65536 < steps - below
    return jnp.sign(x) * (below + up) * step


def e2m1_step(magnitude: Float[Array, "..."]) -> Float[Array, "..."]:
    """Distance of neighbouring e2m1 values: 0.5 below 2, 1 below 4, 2 above."""
    return jnp.where(magnitude < 2, 0.5, jnp.where(magnitude < 4, 1.0, 2.0))


def power_of_two(biased: Int[Array, "..."] | UInt[Array, "..."]) -> Float[Array, "..."]:
    """``2 ** (biased - 127)`` by its float32 bits; exponent 0 stands for half of the smallest normal float32."""
    bits = biased.astype(jnp.uint32) << 23
    return jax.lax.bitcast_convert_type(jnp.where(bits == 0, jnp.uint32(1 << 22), bits), jnp.float32)


def power_of_two_below(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Largest power of two that is at most x, by its float32 bits without mantissa; 2 ** -126 for less, and for 0."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jax.lax.bitcast_convert_type(jnp.maximum(bits & 0x7F800000, 1 << 23), jnp.float32).astype(x.dtype)


def block_length(size: int, shards: int = 1) -> int:
    """Length of the blocks of a dimension: the largest power of two, at most 32, that divides each device's part."""
    return math.gcd(size // shards, GROUP)


def hadamard(length: int) -> np.ndarray:
    """Hadamard matrix of a power of two, by Sylvester's construction; entries 1 and -1, symmetric."""
    places = np.arange(length)
    return 1.0 - 2.0 * (np.bitwise_count(places[:, None] & places[None, :]) % 2)


def rotate_blocks(
    x: Float[Array, "*shape"], axis: int, length: int, signs: Float[Array, " b"] | None = None
) -> Float[Array, "*shape"]:
    """Every block of x along a dimension times the orthogonal Hadamard matrix; x may be partial sums over devices.

    Args:
        axis: the dimension.
        length: of a block, a power of two that divides the dimension.
        signs: of a block's values before the rotation (a randomised Hadamard transform); None: all positive.
    """
    matrix = jnp.asarray(hadamard(length), x.dtype)
    if signs is not None:
        matrix = signs[:, None] * matrix
    spec = spec_of(x)
    if spec is not None and spec.unreduced:
        return _rotate_partial_sums(x, axis, length**-0.5 * matrix, spec)
    sums = ((axis + 1,), (0,)), ((), ())
    out = jax.lax.dot_general(split_blocks(x, axis, length), matrix, sums, precision=jax.lax.Precision.HIGHEST)
    return jnp.moveaxis(out, -1, axis + 1).reshape(x.shape) * length**-0.5


def _rotate_partial_sums(x: Array, axis: int, matrix: Array, spec: PartitionSpec) -> Array:
    """Every block of partial sums over devices times a matrix.

    JAX has no matmul of partial sums, but products with an array that is alike on all devices, and their sums.
    """
    length, whole = matrix.shape[0], (slice(None),)

    def local(x: Array, matrix: Array) -> Array:
        terms = split_blocks(x, axis, length)[whole * (axis + 2) + (None,)] * matrix
        return jnp.sum(terms, axis=axis + 1).reshape(x.shape)

    matrix = matrix.reshape(length, length, *(1,) * (x.ndim - axis - 1))
    here, alike = (
        jax.P(*spec.partitions, unreduced=spec.unreduced),
        jax.P(*(None,) * matrix.ndim, reduced=spec.unreduced),
    )
    return jax.shard_map(local, in_specs=(here, alike), out_specs=here)(x, jax.sharding.reshard(matrix, alike))


def split_blocks(x: Array, axis: int, length: int) -> Array:
    """Array whose dimension ``axis`` is split into blocks: ``[..., size / length, length, ...]``."""
    return x.reshape(*x.shape[:axis], x.shape[axis] // length, length, *x.shape[axis + 1 :])
