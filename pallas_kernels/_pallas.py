"""Helpers shared by the Pallas kernels: support checks, mask value, dot in float32, padding, cost estimates."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels._compat import explicit_axes, is_interpreting, target_device

MASK_VALUE = -0.5 * float(np.finfo(np.float32).max)
"""Finite stand-in for minus infinity in float32 masks, small enough that the difference of two stays finite."""


def check_supported(name: str, dtypes: tuple[str, ...] = ("bfloat16", "float32"), /, **arrays: Array) -> None:
    """Raises for arguments that no Pallas kernel in this package supports.

    Args:
        name: the implementation, such as "pallas_tpu" or "mosaic_gpu"; its platform is behind the underscore.
        dtypes: of which all arrays must have one.
        arrays: the array operands by name, for messages.

    Raises:
        NotImplementedError: the program is not traced for such a device and not interpreted, the mesh has explicit
            axes outside ``jax.shard_map``, the arrays do not all have one of ``dtypes``, or an array is empty.
    """
    platform, here = name.rpartition("_")[2], target_device()
    if here.platform != platform and not is_interpreting():
        raise NotImplementedError(
            f"{name} needs a {platform.upper()}, not {here.kind}; to check values on another device, trace it inside "
            "pallas_kernels._compat.interpreting()."
        )
    if axes := explicit_axes():
        raise NotImplementedError(
            f"{name} must be called inside a jax.shard_map that is manual over {', '.join(axes)}."
        )
    named = ", ".join(f"{what} {x.dtype}{list(x.shape)}" for what, x in arrays.items())
    found = {str(x.dtype) for x in arrays.values()}
    if len(found) > 1 or not found <= set(dtypes):
        legal = " or ".join(f"all in {dtype}" for dtype in dtypes)
        raise NotImplementedError(f"{name} takes arrays {legal}, not {named}.")
    if any(0 in x.shape for x in arrays.values()):
        raise NotImplementedError(f"{name} takes no empty arrays: {named}.")


def interpret_tpu(cores: int = 1) -> Any:
    """``interpret=`` of a TPU kernel's ``pallas_call``: TPU interpret mode inside ``interpreting()``, else False.

    Args:
        cores: cores of a device that run the kernel at the same time.
    """
    if not is_interpreting():
        return False
    return pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=cores)


def dot(a: Array, b: Array, over: tuple[int, int]) -> Array:
    """Matmul that contracts one dimension of each operand and accumulates in float32; float32 operands are not rounded
    first.

    Args:
        a, b: the operands.
        over: contracted dimension of ``a`` and of ``b``.
    """
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dims = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is not less than ``n``."""
    return -(-n // multiple) * multiple


def pad_to_multiple(x: Array, axis: int, multiple: int, value: int = 0) -> Array:
    """``x`` padded with ``value`` at the end of ``axis`` up to a multiple of ``multiple``."""
    missing = -x.shape[axis] % multiple
    widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if missing else x


def cost(flops: float, moved: float, exponentials: float = 0) -> pl.CostEstimate:
    """Cost estimate of a kernel, for XLA's scheduler and for ``jaxllm.compiler.program_walker``.

    Args:
        flops: FLOPs of the matmuls; for a mask known only at run time, an upper bound.
        moved: bytes read from and written to device memory.
        exponentials: number of transcendental operations.
    """
    return pl.CostEstimate(flops=round(flops), bytes_accessed=round(moved), transcendentals=round(exponentials))


def stated(estimate: pl.CostEstimate) -> dict[str, str]:
    """Metadata with which a Triton kernel states its cost in a program's text: the GPU compiler drops estimates."""
    return {"flops": str(estimate.flops), "bytes_accessed": str(estimate.bytes_accessed)}


def bytes_of(*arrays: Array | jax.ShapeDtypeStruct) -> int:
    """Total bytes of the arrays."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
