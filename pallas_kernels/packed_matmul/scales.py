"""Scales of groups of codes as they are stored, and their values.

Three forms: floats; bytes that are exponents of powers of two (e8m0); and blocks of bytes, double-quantised scales as
QLoRA's (arXiv:2305.14314, section 3): of each row of scales, as many e4m3 values as a block has, then the bytes of two
float32 numbers, which the values are multiplied by and which is added.

Legend: G groups of inputs, N outputs, S bytes of a group's blocks, c scales of a block.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt8

Scales = Float[Array, "_ _"] | UInt8[Array, "_ _"]
"""Scales [G, N], exponents [G, N], or blocks [G, S]; by row [N, G]."""
EXTRA = 8
"""Bytes of a block beside its values: of the number that they are multiplied by and of the one that is added."""


def block_count(stored: int, n: int) -> int:
    """Blocks in which the scales of ``n`` outputs are ``stored`` bytes; 0: a scale has one element of its own.

    Raises:
        ValueError: there are no such blocks.
    """
    blocks, rest = divmod(stored - n, EXTRA)
    if rest or blocks < 0 or (blocks and n % blocks):
        raise ValueError(f"{stored} bytes are no scales of {n} outputs, in blocks of c + {EXTRA} bytes.")
    return blocks


def scale_values(scales: Shaped[Array, "..."], n: int | None = None) -> Float[Array, "..."]:
    """Scales in at least float32.

    Args:
        n: number of outputs; None: none are in blocks.
    """
    if scales.dtype != jnp.uint8:
        return scales.astype(jnp.promote_types(scales.dtype, jnp.float32))
    if n is not None and block_count(scales.shape[-1], n):
        return block_values(scales, n)
    bits = scales.astype(jnp.int32) << 23
    # Exponent 0 stands for half of the smallest normal float32.
    return jax.lax.bitcast_convert_type(jnp.where(bits == 0, 1 << 22, bits), jnp.float32)


def block_values(packed: UInt8[Array, "*lead S"], n: int, dtype: DTypeLike = jnp.float32) -> Float[Array, "*lead n"]:
    """Double-quantised scales in ``dtype``.

    Programs of float32 may differ in the last bit, since a compiler may fuse the multiplication and the addition.
    """
    blocks = block_count(packed.shape[-1], n)
    rows = packed.reshape(*packed.shape[:-1], blocks, -1)
    unit, mean = (
        jax.lax.bitcast_convert_type(rows[..., n // blocks + i : n // blocks + i + 4], jnp.float32)[..., None]
        for i in (0, 4)
    )
    values = jax.lax.bitcast_convert_type(rows[..., : n // blocks], jnp.float8_e4m3fn).astype(dtype)
    return (values * unit.astype(dtype) + mean.astype(dtype)).reshape(*packed.shape[:-1], n)


def float8_values(byte: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Values of e4m3 in float32 by integer arithmetic, for kernels that lack the dtype; none is NaN."""
    wide = byte.astype(jnp.int32)
    exponent, mantissa = wide >> 3 & 15, wide & 7
    normal = jax.lax.bitcast_convert_type(exponent + 120 << 23 | mantissa << 20, jnp.float32)
    magnitude = jnp.where(exponent == 0, mantissa.astype(jnp.float32) * 2.0**-9, normal)
    return jnp.where(wide >> 7 == 1, -magnitude, magnitude)


def joined_float(parts: Sequence[UInt8[Array, "..."]]) -> Float[Array, "..."]:
    """Float32 numbers of their four bytes, the lowest first."""
    bits = functools.reduce(operator.or_, (byte.astype(jnp.int32) << 8 * i for i, byte in enumerate(parts)))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
