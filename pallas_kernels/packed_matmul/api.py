"""Packed matmul (w4a16 of MARLIN, arXiv:2408.11743; lookup tables of FLUTE, arXiv:2407.10960), and its implementations.

Legend: M rows, K inputs, n codes of a tuple, B bytes of an output, N outputs, G groups of inputs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._compat import vary_over, varying_axes
from pallas_kernels._dispatch import Implementation, dispatch
from pallas_kernels.packed_matmul.codes import BITS, PackedBytes, PackedCodes
from pallas_kernels.packed_matmul.reference import dequantised, packed_matmul_reference
from pallas_kernels.packed_matmul.scales import Scales, block_count
from pallas_kernels.packed_matmul.xla import packed_matmul_xla


def _pallas_tpu(*args: Any) -> Array:
    from pallas_kernels.packed_matmul.pallas_tpu import packed_matmul_pallas_tpu

    return packed_matmul_pallas_tpu(*args)


def _pallas_gpu(*args: Any) -> Array:
    from pallas_kernels.packed_matmul.pallas_gpu import packed_matmul_pallas_gpu

    return packed_matmul_pallas_gpu(*args)


def _native(*args: Any) -> Array:
    from pallas_kernels.packed_matmul.native import packed_matmul_native

    return packed_matmul_native(*args)


IMPLEMENTATIONS = {
    "pallas_tpu": _pallas_tpu,
    "pallas_gpu": _pallas_gpu,
    "native": _native,
    "xla": packed_matmul_xla,
    "reference": packed_matmul_reference,
}


def packed_matmul(
    x: Float[Array, "M K"],
    packed: PackedBytes,
    scales: Scales,
    form: PackedCodes,
    *,
    implementation: Implementation = None,
) -> Float[Array, "M _"]:
    """Packed matmul: ``x @ (value[code] * scale)``, where the codes of a group of inputs share each output's scale.

    Args:
        x: rows.
        packed: bytes of tuples of neighbouring inputs' codes, the first in the lowest bits.
        scales: scale of each group of K / G neighbouring inputs and output; bytes are exponents of powers of two
            (e8m0), of which the kernels decode as many as a tile has, or blocks (see ``scales``), of which those for
            GPUs do.
        form: bits of a code, the values that codes stand for, and whether bytes and scales are stored by row, as
            [N, B] and [N, G], where the kernels for GPUs read them; the others transpose them.
        implementation: "pallas_tpu", "pallas_gpu", "native", "xla" or "reference"; see ``pallas_kernels._dispatch``.

    Returns:
        The result in ``x.dtype``, accumulated in at least float32, from weights rounded to ``x.dtype``; of wide codes
        in at least float32, from weights that are not rounded, to 2^-16 of their size. Differentiable in x, by the
        dequantised matrix.

    Raises:
        ValueError: the shapes do not match, groups cut a tuple, codes have no 2, 3, 4, 6 or 8 bits or another number
            of levels, wide ones have levels, or codes by row scales in blocks.
        NotImplementedError: the implementation does not support these arguments.
    """
    if form.bits not in BITS or (form.levels is not None and len(form.levels) != 2**form.bits):
        raise ValueError(
            f"packed_matmul: {form.bits} bits; codes have 2, 3, 4, 6 or 8 bits and as many levels as codes."
        )
    if form.wide and form.levels is not None:
        raise ValueError("packed_matmul: wide codes are integers; leave out their levels, or wide.")
    (rows, n), (groups, columns) = (a.shape[::-1] if form.by_row else a.shape for a in (packed, scales))
    one_each = columns == n or (scales.dtype == jnp.uint8 and not form.by_row and block_count(columns, n))
    if x.shape[1] * form.bytes != rows * form.lanes or not one_each or groups == 0 or rows % (groups * form.bytes):
        raise ValueError(
            f"packed_matmul: rows of {x.shape[1]} inputs, bytes [{rows}, {n}] with {form.lanes} codes in {form.bytes} "
            f"and scales [{groups}, {columns}] do not go together; a group has whole bytes."
        )
    axes = varying_axes(x, packed, scales)
    return _differentiable(implementation, form, *(vary_over(array, axes) for array in (x, packed, scales)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(implementation: Implementation, form: PackedCodes, x: Array, packed: Array, scales: Array) -> Array:
    return dispatch("packed_matmul", IMPLEMENTATIONS, implementation, x, packed, scales, form)


def _forward(
    implementation: Implementation, form: PackedCodes, x: Array, packed: Array, scales: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _differentiable(implementation, form, x, packed, scales), (packed, scales, jnp.zeros((), x.dtype))


def _backward(
    implementation: Implementation, form: PackedCodes, kept: tuple[Array, Array, Array], dy: Array
) -> tuple[Array, None, None]:
    packed, scales, like = kept
    matrix = dequantised(packed, scales, form).astype(dy.dtype)
    return (dy @ matrix.T).astype(like.dtype), None, None


_differentiable.defvjp(_forward, _backward)
