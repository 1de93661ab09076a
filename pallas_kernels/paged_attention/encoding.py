"""KV cache quantisation: 8-bit elements with one scale per token and head.

A scale is the largest magnitude divided by the encoding's largest value. A token's stored bits depend on that token
alone, so they are the same whichever chunk, page or neighbours it comes with.

Legend: N elements that share a scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


class Encoding(NamedTuple):
    """Storage format of KV cache elements: their bits as integers.

    Compilers move integers unchanged. With narrow floats they may not: XLA on CPU scatters bfloat16, and reads pages
    of it, through a float32 copy of the pool.

    Attributes:
        kind: dtype that the bits represent.
        stored: integer dtype of the pool.
        most: largest magnitude, for encodings with scales; otherwise None.
    """

    kind: Any
    stored: Any
    most: float | None = None


ENCODINGS = {
    "int8": Encoding(jnp.dtype(jnp.int8), jnp.dtype(jnp.int8), 127.0),
    "fp8": Encoding(jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.int8), 448.0),
    "bits of bfloat16": Encoding(jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int16)),
}
"""Encodings by name; the error of x at scale s is at most s / 2 in int8, and max(|x| / 16, s / 1024) in fp8."""
SCALED = tuple(name for name, encoding in ENCODINGS.items() if encoding.most)
"""Encodings that have scales."""
SCALE = jnp.dtype(jnp.float32)
"""Dtype of the scales."""


def quantise(x: Float[Array, "*any N"], encoding: Encoding) -> tuple[Float[Array, "*any N"], Float[Array, "*any"]]:
    """(quantised values before the cast, scales), in at least float32.

    Zeros have scale 0; a value that is not finite makes its scale not finite.
    """
    assert encoding.most is not None
    x = x.astype(jnp.promote_types(x.dtype, SCALE))
    scale = (jnp.max(jnp.abs(x), axis=-1) / encoding.most).astype(SCALE)
    numbers = x / jnp.where(scale == 0.0, 1.0, scale)[..., None].astype(x.dtype)
    if jnp.issubdtype(encoding.kind, jnp.integer):
        numbers = jnp.round(numbers)
    # Where the scale was rounded down, the largest magnitude is slightly above the encoding's maximum.
    return jnp.clip(numbers, -encoding.most, encoding.most), scale


def to_bits(x: Float[Array, "*any"], encoding: Encoding) -> Int[Array, "*any"]:
    """Values as the integers that the pool stores."""
    return jax.lax.bitcast_convert_type(x.astype(encoding.kind), encoding.stored)


def from_bits(kept: Int[Array, "*any"], encoding: Encoding, dtype: DTypeLike) -> Float[Array, "*any"]:
    """Stored integers as values of ``dtype``."""
    return jax.lax.bitcast_convert_type(kept, encoding.kind).astype(dtype)
