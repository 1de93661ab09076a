"""Helpers shared by the Mosaic-GPU kernels: support checks, shared memory as wgmma and TMA want it, interpret mode.

Mosaic GPU is Pallas for Hopper: a program of one or more warpgroups copies tiles from device memory into shared memory
by TMA, asynchronously, and multiplies them there with wgmma, whose accumulator is in registers.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # public since jax 0.11
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels._compat import is_interpreting, target_device
from pallas_kernels._pallas import check_supported

NAME = "mosaic_gpu"
HOPPER = re.compile(r"\bG?H(100|200|800|20)\b")
DTYPES = ("bfloat16", "float16")


def check_hopper(**arrays: Array) -> None:
    """Raises for devices and arrays that no Mosaic-GPU kernel in this package supports.

    Args:
        arrays: the array operands by name, for messages.

    Raises:
        NotImplementedError: the program is not traced for a Hopper GPU and not interpreted, the dtypes are not all
            bfloat16 or all float16, or see ``pallas_kernels._pallas.check_supported``.
    """
    check_supported(NAME, DTYPES, **arrays)
    here = target_device()
    if not is_interpreting() and not HOPPER.search(here.kind):
        raise NotImplementedError(f"{NAME} needs a Hopper GPU (H100, H200, GH200, H800 or H20), not {here.kind}.")


def interpret_mosaic_gpu() -> Any:
    """``interpret=`` of a kernel: GPU interpret mode inside ``interpreting()``, memory full of nan; else False."""
    return InterpretGPUParams(detect_races=True, uninitialized_memory="nan") if is_interpreting() else False


def swizzled(dtype: DTypeLike, width: int) -> tuple[Any, ...]:
    """Transforms of a matrix of so many columns in shared memory: tiles of 8 rows, swizzled as wgmma reads them."""
    item = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(width * item * 8)
    return plgpu.TilingTransform((8, swizzle // item)), plgpu.SwizzleTransform(swizzle)


def add_product(acc: Any, a: Any, b: Any, *, transposed: str = "") -> None:
    """Adds ``a @ b`` to the accumulator by wgmma, with one operand or none read transposed.

    Args:
        acc: ref of the accumulator.
        a, b: refs in shared memory.
        transposed: "a", "b" or "".
    """
    if not transposed:
        plgpu.wgmma(acc, a, b)
        return
    ref = a if transposed == "a" else b
    multiply = lambda other: plgpu.wgmma(acc, *((other, b) if transposed == "a" else (a, other)))  # noqa: E731
    if not (is_interpreting() and _COPIES):
        multiply(ref.transpose((1, 0)))
        return

    def copied(scratch: Any) -> None:
        scratch[...] = ref[...].T
        multiply(scratch)

    pl.run_scoped(copied, plgpu.SMEM(ref.shape[::-1], ref.dtype))


_COPIES = jax.__version_info__ < (0, 11)
"""Whether the interpreter knows no transposed operand of wgmma, so that its values are copied."""
