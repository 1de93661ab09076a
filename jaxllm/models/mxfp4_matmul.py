"""MXFP4 matmul of activations and weights, forward and backward: Quartet (arXiv:2505.14669, algorithm 1).

All three matmuls of a layer have operands of 4-bit floats (e2m1), 32 of which share a power-of-two scale:

    forward   x and w are rotated by a Hadamard matrix in blocks of 32 along the sum, which spreads outliers, and
              rounded to the nearest with the scale of least mean squared error of a normal distribution (QuEST,
              arXiv:2502.05003). Values beyond the largest are clipped; the trust mask says which are not.
    backward  dy and the rounded w, and the rounded x and dy, are rotated once more with random signs and rounded
              stochastically (arXiv:2502.20586), at 3/4 of their size, so that none is clipped. The gradients are
              unbiased estimates of those of the rounded operands; they pass the mask and are rotated back.

XLA has no such matmul on all devices, so the dequantised values are multiplied in compute dtype: the rounding is that
of the format, the speed is not.

Legend: T token dimensions, C contracted dimensions, O output dimensions.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

from jaxllm.models.fp4_arithmetic import (
    LARGEST,
    LARGEST_EXPONENT,
    block_length,
    power_of_two_below,
    rotate_blocks,
    round_to_e2m1,
    round_to_e2m1_stochastically,
    split_blocks,
)
from jaxllm.models.operand_specs import gradient_spec, spec_of, without_reduced
from jaxllm.models.params import at_least_f32

CLIP = 2.92247856
"""Standard deviations at which e2m1 clips a normal distribution with the least mean squared error (QuEST)."""
MARGIN = 3 / 4
"""Factor before stochastic rounding: the largest of a block is less than 8 scales, and 6 is the largest value."""

Axes = tuple[int, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def mxfp4_matmul(
    contract: int,
    there: PartitionSpec | None,
    x: Float[Array, "..."],
    w: Float[Array, "..."],
    key: UInt32[Array, " K"] | None,
) -> Float[Array, "..."]:
    """MXFP4 matmul ``x[*T, *C] @ w[*C, *O] -> [*T, *O]`` in x's dtype; its two gradients are so too.

    Args:
        contract: number of contracted dimensions, C.
        there: ``out_sharding`` of the result, as ``jax.lax.dot_general`` takes it.
        key: data of the RNG key of the backward pass; None where there is none.

    Raises:
        ValueError: a backward pass without a key.
    """
    return _forward(contract, there, x, w, key)[0]


def _forward(contract: int, there: PartitionSpec | None, x: Array, w: Array, key: Array | None) -> tuple[Array, Any]:
    (qx, _), (qw, _) = _operands(contract, x, w)
    over = tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract))
    # The masks and the rounded operands are computed again from what is saved: several matmuls share x.
    return _dot(qx, qw, over, there).astype(x.dtype), (x, w, key)


def _backward(contract: int, there: PartitionSpec | None, kept: Any, dy: Array) -> tuple[Any, ...]:
    x, w, key = kept
    if key is None:
        raise ValueError(
            'matmul_precision = "mxfp4": the gradients are rounded stochastically, seeded by the tokens of the batch, '
            "which are not known here; call Functional.forward."
        )
    (qx, trusted_x), (qw, trusted_w) = _operands(contract, x, w)
    dy, tokens = without_reduced(dy), x.ndim - contract
    *keys, of_signs = jax.random.split(jax.random.wrap_key_data(key), 5)
    words = jax.random.bits(of_signs, (2,))
    outs = tuple(range(tokens, dy.ndim)), tuple(range(contract, w.ndim))
    rows = tuple(range(tokens)), tuple(range(tokens))
    dx = _stochastic_dot((dy, qw), outs, words[0], keys[:2], gradient_spec(spec_of(x)))
    dw = _stochastic_dot((qx, dy), rows, words[1], keys[2:], gradient_spec(spec_of(w)))
    dx = _rotated_back(dx, trusted_x, x.ndim - 1, _blocks(x, x.ndim - 1))
    dw = _rotated_back(dw, trusted_w, contract - 1, _blocks(x, x.ndim - 1))
    return dx.astype(x.dtype), dw.astype(w.dtype), None


mxfp4_matmul.defvjp(_forward, _backward)


def _operands(contract: int, x: Array, w: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Rotated and rounded operands of the forward matmul, and their trust masks."""
    length = _blocks(x, x.ndim - 1)
    return tuple(  # pyright: ignore[reportReturnType]
        project_to_mxfp4(without_reduced(one), axis, length) for one, axis in ((x, x.ndim - 1), (w, contract - 1))
    )


def project_to_mxfp4(
    x: Float[Array, "*shape"], axis: int, length: int
) -> tuple[Float[Array, "*shape"], Bool[Array, "*shape"]]:
    """Values rotated in blocks and rounded to MXFP4, dequantised; and the trust mask, which excludes clipped values.

    Args:
        axis: dimension of the blocks.
        length: of a block, whose values share a scale: the power of two nearest to the one of least mean squared error
            of a normal distribution with the block's standard deviation (0.0127 of its variance).
    """
    wide = x.astype(at_least_f32(x.dtype))
    turned = rotate_blocks(wide, axis, length)
    parts = split_blocks(turned, axis, length)
    centred = parts - jnp.mean(parts, axis=axis + 1, keepdims=True)
    spread = jnp.sqrt(jnp.mean(centred * centred, axis=axis + 1, keepdims=True))
    scale = power_of_two_below(spread * (CLIP / LARGEST * 2**0.5))  # from sqrt(2) times the lower one, the upper one
    magnitude = jnp.abs(parts) / scale
    rounded = jnp.sign(parts) * round_to_e2m1(jnp.minimum(magnitude, LARGEST)) * scale
    return rounded.reshape(x.shape).astype(x.dtype), (magnitude <= LARGEST).reshape(x.shape)


def round_blocks_stochastically(
    x: Float[Array, "*shape"], axis: int, length: int, key: PRNGKeyArray
) -> Float[Array, "*shape"]:
    """Values times 3/4, rounded stochastically to MXFP4 in blocks along a dimension, dequantised; unbiased."""
    wide = split_blocks(x.astype(at_least_f32(x.dtype)), axis, length)
    scale = power_of_two_below(jnp.max(jnp.abs(wide), axis=axis + 1, keepdims=True))
    place = None if spec_of(wide) is None else jax.typeof(wide).sharding
    bits = jax.random.bits(key, wide.shape, jnp.uint16, out_sharding=place)
    # The scale itself is that over 4, which is less than the smallest float32 where all values are 0.
    rounded = round_to_e2m1_stochastically(wide * (MARGIN * 2**LARGEST_EXPONENT) / scale, bits)
    return (rounded * scale / 2**LARGEST_EXPONENT).reshape(x.shape).astype(x.dtype)


def _stochastic_dot(
    operands: tuple[Array, Array],
    over: tuple[Axes, Axes],
    word: UInt32[Array, ""],
    keys: list[PRNGKeyArray],
    there: PartitionSpec | None,
) -> Array:
    """Matmul times 9/16 of operands that are rotated with the same random signs and rounded stochastically.

    Args:
        over: contracted dimensions of each.
        word: random bits, the signs of a block's values.
        keys: RNG keys of the two roundings.
    """
    dtype, length = operands[0].dtype, _blocks(operands[0], over[0][-1])
    signs = 1 - 2 * ((word >> jnp.arange(length, dtype=jnp.uint32)) & 1).astype(at_least_f32(dtype))
    rounded = [
        round_blocks_stochastically(
            rotate_blocks(one.astype(signs.dtype), axes[-1], length, signs), axes[-1], length, k
        )
        for one, axes, k in zip(operands, over, keys, strict=True)
    ]
    return _dot(rounded[0].astype(dtype), rounded[1].astype(dtype), over, there)


def _rotated_back(gradient: Array, trusted: Array, axis: int, length: int) -> Array:
    """Gradient of an operand before its rotation, from 9/16 of that of the rotated one, of trusted values only."""
    mask, spec = jnp.where(trusted, MARGIN**-2, 0).astype(gradient.dtype), spec_of(gradient)
    if spec is not None and spec.unreduced:  # partial sums over devices, each of which masks its own
        mask = jax.sharding.reshard(mask, jax.P(*spec.partitions, reduced=spec.unreduced))
    return rotate_blocks(gradient * mask, axis, length)  # the matrix is symmetric, so it is its own inverse


def _dot(a: Array, b: Array, over: tuple[Axes, Axes], there: PartitionSpec | None) -> Array:
    return jax.lax.dot_general(a, b, (over, ((), ())), preferred_element_type=at_least_f32(a.dtype), out_sharding=there)


def _blocks(x: Array, axis: int) -> int:
    """Length of the blocks along a contracted dimension, which is split over devices alike in both operands."""
    spec = spec_of(x)
    names = () if spec is None or spec.partitions[axis] is None else spec.partitions[axis]
    names = names if isinstance(names, tuple) else (names,)
    shards = 1
    for name in names:
        shards *= jax.sharding.get_abstract_mesh().shape[name]
    return block_length(x.shape[axis], shards)
