"""8-bit optimizer state: moments quantised blockwise, as in 8-bit Adam (arXiv:2110.02861).

A value is stored as the nearest of 256 codes times the largest magnitude of its block. The codes are those of the
paper's dynamic tree quantisation (section 1.3): seven decades, the larger ones divided more finely; for the second
moment, which has no sign, twice as finely. A block has 256 elements, as in its authors' library, or the largest power
of two that divides a dimension; blocks do not depend on the mesh.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, UInt8

Moments = Literal["float32", "8bit"]
BLOCK = 256
DECADES = 7


class QuantisedMoments(NamedTuple):
    """An array in 8 bits: codes of its shape, and scales with one element per block along the blocked dimension."""

    codes: UInt8[Array, " *shape"]
    scales: Float[Array, " *blocks"]


@functools.cache
def codebook(signed: bool) -> np.ndarray:
    """Values of the codes, ascending: Float64[256] with 0, 1, midpoints of equal parts of [0.1, 1] in each decade."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        edges = np.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - DECADES + 1)
        values.extend(middles)
        if signed:
            values.extend(-middles)
    return np.sort(values)


def block_dim_and_size(shape: tuple[int, ...]) -> tuple[int, int]:
    """(dimension divided into blocks, block size): of the dimensions with the largest blocks the last."""
    sizes = [min(BLOCK, size & -size) for size in shape]
    best = max(sizes)
    return len(sizes) - 1 - sizes[::-1].index(best), best


def quantise(x: Float[Array, " *shape"], signed: bool) -> QuantisedMoments:
    """Quantises an array: the codes of the intervals that its values lie in. Blocks of zeros have a scale of zero.

    The error is at most half an interval. Codes are computed by arithmetic; a binary search would read the codebook
    once per bit.
    """
    dim, size = block_dim_and_size(x.shape)
    parts = x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :])
    scales = jnp.max(jnp.abs(parts), axis=dim + 1)
    inside = (parts / jnp.expand_dims(jnp.where(scales > 0, scales, 1), dim + 1)).reshape(x.shape)
    decades, codes = 10.0 ** np.arange(-DECADES, 0), codebook(signed)
    far = jnp.abs(inside)
    decade = sum((far >= edge).astype(jnp.int32) for edge in decades[1:])
    number = jnp.left_shift(1 if signed else 2, decade)  # of parts in the decade, and before it but for one
    along = (far / jnp.asarray(decades, x.dtype)[decade] - 1) / 9
    part = jnp.clip((along * number).astype(jnp.int32), 0, number - 1)
    place = part + number - (0 if signed else 1)
    place = jnp.where(far < codes[codes > 0][0] / 2, 0, place)
    place = jnp.where(inside >= (codes[-2] + 1) / 2, 128 if signed else 255, place)
    if signed:
        place = 127 + jnp.where(inside < 0, -place, place)
    return QuantisedMoments(place.astype(jnp.uint8), scales)


def dequantise(blocks: QuantisedMoments, signed: bool) -> Float[Array, " *shape"]:
    """Dequantised values: codes times scales."""
    dim, size = block_dim_and_size(blocks.codes.shape)
    values = jnp.asarray(codebook(signed), blocks.scales.dtype)[blocks.codes]
    return values * jnp.repeat(blocks.scales, size, axis=dim)


def quantise_moments(
    moments: Moments, transform: optax.GradientTransformation, *, first: str, second: str
) -> optax.GradientTransformation:
    """The same rule with its moments stored in 8 bits between steps.

    On a mesh, wrap it in ``jaxllm.optim.param_groups.auto_sharded``: a device's shard need not be whole blocks.

    Args:
        moments: "float32" returns the rule unchanged.
        transform: the rule; its state is a named tuple.
        first, second: fields of the state, trees of arrays: the signed and the unsigned moment.
    """
    if moments == "float32":
        return transform
    signs = {first: True, second: False}

    def init(params: Any) -> Any:
        state: Any = transform.init(params)
        return state._replace(
            **{
                name: jax.tree.map(lambda x, signed=signed: _zeros(x, signed), getattr(state, name))
                for name, signed in signs.items()
            }
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        of = lambda fn, state, signed, name: jax.tree.map(  # noqa: E731
            lambda x: fn(x, signed), getattr(state, name), is_leaf=lambda x: isinstance(x, QuantisedMoments)
        )
        wide: Any = state._replace(**{name: of(dequantise, state, signed, name) for name, signed in signs.items()})
        updates, new = cast("tuple[Any, Any]", transform.update(updates, wide, params))
        return updates, new._replace(**{name: of(quantise, new, signed, name) for name, signed in signs.items()})

    return optax.GradientTransformation(init, update)


def _zeros(x: Array, signed: bool) -> QuantisedMoments:
    """Quantised zeros with an array's shape and sharding; scales are sharded alike where shards are whole blocks."""
    dim, size = block_dim_and_size(x.shape)
    zero = int(np.searchsorted(codebook(signed), 0.0))
    codes = jnp.zeros_like(x, dtype=jnp.uint8) + jnp.uint8(zero)
    scales = jnp.zeros((*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :]), x.dtype)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return QuantisedMoments(codes, scales)
    split = list(jax.typeof(x).sharding.spec)
    names = (split[dim],) if isinstance(split[dim], str) else split[dim] or ()
    if scales.shape[dim] % int(np.prod([mesh.shape[name] for name in names], initial=1)):
        split[dim] = None
    return QuantisedMoments(codes, jax.sharding.reshard(scales, jax.P(*split)))
