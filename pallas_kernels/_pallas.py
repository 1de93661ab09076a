"""What the Pallas kernels of several operations share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels._compat import explicit_axes, is_interpreting, target_device


def check(name: str, **arrays: Array) -> None:
    """Refuses what no Pallas kernel here can do. ``name`` is "pallas_tpu" or "pallas_gpu".

    Raises:
        NotImplementedError: not traced for such a device and not interpreted, a mesh with explicit axes outside
            ``jax.shard_map``, a dtype other than one of bfloat16 and float32, or an empty array.
    """
    platform, here = name.removeprefix("pallas_"), target_device()
    if here.platform != platform and not is_interpreting():
        raise NotImplementedError(
            f"{name} needs a {platform.upper()}, not {here.kind}; to check values elsewhere, trace it inside "
            "pallas_kernels._compat.interpreting()."
        )
    if axes := explicit_axes():
        raise NotImplementedError(
            f"{name} must be called inside a jax.shard_map that is manual over {', '.join(axes)}."
        )
    named = ", ".join(f"{what} {x.dtype}{list(x.shape)}" for what, x in arrays.items())
    dtypes = {x.dtype for x in arrays.values()}
    if len(dtypes) > 1 or not dtypes <= {jnp.dtype("bfloat16"), jnp.dtype("float32")}:
        raise NotImplementedError(f"{name} takes arrays all in bfloat16 or all in float32, not {named}.")
    if any(0 in x.shape for x in arrays.values()):
        raise NotImplementedError(f"{name} takes no empty arrays: {named}.")


def interpret_tpu() -> Any:
    """For ``pl.pallas_call(interpret=...)`` of a TPU kernel."""
    return pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan") if is_interpreting() else False


def dot(a: Array, b: Array, over: tuple[int, int], product: Callable[..., Array] = jax.lax.dot_general) -> Array:
    """Product over one dimension of each, in float32; float32 operands are multiplied as such, not rounded first."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dims = (((over[0],), (over[1],)), ((), ()))
    return product(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is not less than ``n``."""
    return -(-n // multiple) * multiple


def cost(flops: float, moved: float, exponentials: float = 0) -> pl.CostEstimate:
    """What a kernel takes, for XLA's scheduler and for whoever reads its program (``jaxllm.compiler.program_walker``).

    Args:
        flops: of its products; where a mask that is data leaves some out, of all that may be left in.
        moved: bytes, read and written in the device's memory.
        exponentials: and the like.
    """
    return pl.CostEstimate(flops=round(flops), bytes_accessed=round(moved), transcendentals=round(exponentials))


def bytes_of(*arrays: Array | jax.ShapeDtypeStruct) -> int:
    """Of all of them."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
