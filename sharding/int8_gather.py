"""Int8 gather: a weight is all-gathered as 8-bit integers, with a scale for each block of its last dimension.

Half the bytes of bfloat16 (the quantised gathers of ZeRO++, arXiv:2306.10209). The gradient is that of a plain
all-gather: rounding has none of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from sharding import layer_layouts
from sharding.mesh import divisors
from sharding.rules import mesh_axes_of

MOST, LEAST = 256, 16
"""Values that share a scale: at most, and at least, or a weight is gathered as it is."""


def block_of(shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[str, int]) -> int:
    """Values that share a scale: the largest divisor of a shard's last dimension of at most ``MOST``; 0: too few.

    Args:
        shape: of the whole weight.
        spec: its partition spec before the all-gather.
        sizes: of the mesh axes.
    """
    if not shape:
        return 0
    ways = math.prod(sizes[axis] for axis in mesh_axes_of(spec[len(shape) - 1 :]))
    block = max(size for size in divisors(shape[-1] // ways) if size <= MOST)
    return block if block >= LEAST else 0


def gathered(w: Array, whole: PartitionSpec) -> Array:
    """Weight that is all-gathered in 8 bits, where its shards have blocks of ``LEAST`` values; else as it is.

    Args:
        w: split over mesh axes.
        whole: partition spec of the result.
    """
    stored = PartitionSpec(*jax.typeof(w).sharding.spec.partitions)
    if not (block := block_of(w.shape, stored, jax.sharding.get_abstract_mesh().shape)):
        return jax.sharding.reshard(w, whole)
    blocks = (*w.shape[:-1], w.shape[-1] // block, block)
    x = jax.lax.reshape(jax.sharding.reshard(w, stored), blocks, out_sharding=PartitionSpec(*stored, None))
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = (jnp.abs(x).max(-1) / 127).astype(jnp.float32)
    steps = x / jnp.where(scale > 0, scale, 1).astype(x.dtype)[..., None]
    codes = jnp.clip(jnp.round(steps), -127, 127).astype(jnp.int8)
    there = whole.partitions
    codes = jax.sharding.reshard(codes, PartitionSpec(*there, None))
    scale = jax.sharding.reshard(scale, PartitionSpec(*there))
    x = (codes.astype(scale.dtype) * scale[..., None]).astype(w.dtype)
    return jax.sharding.reshard(jax.lax.reshape(x, w.shape, out_sharding=PartitionSpec(*there)), whole)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(w: Array, whole: PartitionSpec, stored: PartitionSpec) -> Array:
    """``gathered`` whose gradient is that of a plain all-gather.

    Args:
        w: split over mesh axes.
        whole: partition spec of the result.
        stored: partition spec of ``w``.
    """
    return gathered(w, whole)


def _forward(w: Array, whole: PartitionSpec, stored: PartitionSpec) -> tuple[Array, None]:
    return gathered(w, whole), None


def _backward(whole: PartitionSpec, stored: PartitionSpec, _: None, gradient: Array) -> tuple[Array]:
    if (last := layer_layouts.between(stored, whole)) is not None:
        late = whole.reduced - {layer_layouts.AXIS}
        gradient = jax.sharding.reshard(gradient, jax.P(*last, unreduced=late))
    return (jax.sharding.reshard(gradient, jax.P(*stored.partitions, unreduced=stored.reduced)),)


gather.defvjp(_forward, _backward)
