"""How keys and values are kept where not as they are: numbers of eight bits with a scale for each token and head.

A scale is the largest magnitude over the largest number of the encoding. What is written for a token depends on that
token alone, so it is the same bits whichever chunk, page or neighbours it comes with.

Legend: N numbers that share a scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


class Encoding(NamedTuple):
    """How numbers are kept: their bits as integers, which compilers move about as they are.

    Narrow floats they may not: XLA on a CPU scatters bfloat16, and reads pages of it, in a float32 copy of the pool.

    Attributes:
        kind: what the bits are.
        stored: the integers.
        most: the largest number, for numbers with scales.
    """

    kind: Any
    stored: Any
    most: float | None = None


ENCODINGS = {
    "int8": Encoding(jnp.dtype(jnp.int8), jnp.dtype(jnp.int8), 127.0),
    "fp8": Encoding(jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.int8), 448.0),
    "bits of bfloat16": Encoding(jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int16)),
}
"""By name. The error of a number x with scale s is at most s / 2 in int8, and max(|x| / 16, s / 1024) in fp8."""
SCALED = tuple(name for name, encoding in ENCODINGS.items() if encoding.most)
"""Those with scales."""
SCALE = jnp.dtype(jnp.float32)
"""The dtype of scales."""


def quantised(x: Float[Array, "*any N"], encoding: Encoding) -> tuple[Float[Array, "*any N"], Float[Array, "*any"]]:
    """(numbers to be kept, scales), in at least float32. Zeros have scale 0; what is not finite spoils its scale."""
    assert encoding.most is not None
    x = x.astype(jnp.promote_types(x.dtype, SCALE))
    scale = (jnp.max(jnp.abs(x), axis=-1) / encoding.most).astype(SCALE)
    numbers = x / jnp.where(scale == 0.0, 1.0, scale)[..., None].astype(x.dtype)
    if jnp.issubdtype(encoding.kind, jnp.integer):
        numbers = jnp.round(numbers)
    # A scale that was rounded down leaves the largest a hair above what there is.
    return jnp.clip(numbers, -encoding.most, encoding.most), scale


def bits(x: Float[Array, "*any"], encoding: Encoding) -> Int[Array, "*any"]:
    """Numbers as they are kept."""
    return jax.lax.bitcast_convert_type(x.astype(encoding.kind), encoding.stored)


def numbers(kept: Int[Array, "*any"], encoding: Encoding, dtype: DTypeLike) -> Float[Array, "*any"]:
    """What is kept, as numbers of ``dtype``."""
    return jax.lax.bitcast_convert_type(kept, encoding.kind).astype(dtype)
