"""Matmul with ternary matrices in a dictionary code (QMoE, arXiv:2310.16795, section 4.3), and its implementations.

Legend: M rows, K inputs, E experts, N outputs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._compat import vary_over, varying_axes
from pallas_kernels._dispatch import Implementation, dispatch
from pallas_kernels.ternary_matmul.codewords import TernaryCode
from pallas_kernels.ternary_matmul.reference import ternary_matmul_reference


def _pallas_gpu(*args: Any) -> Array:
    from pallas_kernels.ternary_matmul.pallas_gpu import ternary_matmul_pallas_gpu

    return ternary_matmul_pallas_gpu(*args)


IMPLEMENTATIONS = {"pallas_gpu": _pallas_gpu, "reference": ternary_matmul_reference}


def ternary_matmul(
    x: Float[Array, "M K"],
    code: TernaryCode,
    scales: Float[Array, "E N"],
    experts: Int32[Array, " M"],
    *,
    implementation: Implementation = None,
) -> Float[Array, "M N"]:
    """Matmul of each row with the matrix of its expert: ``x[m] @ value[e] * scale[e]``, where e is ``experts[m]``.

    No matrix is written: a codeword is looked up, and its values are multiplied where they are decoded. Each row
    decodes its expert's matrix, so it is for few rows.

    Args:
        x: rows, in any order of experts.
        code: values -1, 0 and 1 of the experts' matrices.
        scales: scale of each output.
        experts: expert of each row; a row without one has E or more.
        implementation: "pallas_gpu" or "reference"; see ``pallas_kernels._dispatch``.

    Returns:
        The result in ``x.dtype``, accumulated in at least float32; zeros for rows without expert. Differentiable in x.

    Raises:
        ValueError: the shapes do not match.
        NotImplementedError: the implementation does not support these arguments.
    """
    if code.words.shape[0] != scales.shape[0] or x.shape[0] != experts.shape[0]:
        raise ValueError(
            f"ternary_matmul: rows {list(x.shape)} with {experts.shape[0]} experts, codewords "
            f"{list(code.words.shape)} and scales {list(scales.shape)} do not go together; they are [M, K], M, [E, W] "
            "and [E, N]."
        )
    axes = varying_axes(x, *code, scales, experts)
    own = TernaryCode(*(vary_over(array, axes) for array in code))
    return _differentiable(implementation, vary_over(x, axes), own, vary_over(scales, axes), vary_over(experts, axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(
    implementation: Implementation, x: Array, code: TernaryCode, scales: Array, experts: Array
) -> Array:
    return dispatch("ternary_matmul", IMPLEMENTATIONS, implementation, x, code, scales, experts)


def _forward(
    implementation: Implementation, x: Array, code: TernaryCode, scales: Array, experts: Array
) -> tuple[Array, tuple[Any, ...]]:
    like = jnp.zeros((0, x.shape[1]), x.dtype)
    return _differentiable(implementation, x, code, scales, experts), (like, code, scales, experts)


def _backward(implementation: Implementation, kept: tuple[Any, ...], dy: Array) -> tuple[Array, None, None, None]:
    like, code, scales, experts = kept
    x = jax.ShapeDtypeStruct((dy.shape[0], like.shape[1]), like.dtype)
    back = jax.linear_transpose(lambda x: ternary_matmul_reference(x, code, scales, experts), x)
    return back(dy)[0], None, None, None


_differentiable.defvjp(_forward, _backward)
