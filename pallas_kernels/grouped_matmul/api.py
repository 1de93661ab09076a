"""Grouped matmul (ragged dot, megablox): the matmul of a dropless mixture of experts, and its implementations.

Legend: M rows, E groups (experts), K columns of a row, N columns of the result.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_over, varying_axes
from pallas_kernels._dispatch import Implementation, dispatch
from pallas_kernels.grouped_matmul.ragged_dot import grouped_matmul_ragged_dot
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.grouped_matmul.xla import grouped_matmul_xla


def _pallas_tpu(*args: Any) -> Array:
    from pallas_kernels.grouped_matmul.pallas_tpu import grouped_matmul_pallas_tpu

    return grouped_matmul_pallas_tpu(*args)


def _pallas_gpu(*args: Any) -> Array:
    from pallas_kernels.grouped_matmul.pallas_gpu import grouped_matmul_pallas_gpu

    return grouped_matmul_pallas_gpu(*args)


def _mosaic_gpu(*args: Any) -> Array:
    from pallas_kernels.grouped_matmul.mosaic_gpu import grouped_matmul_mosaic_gpu

    return grouped_matmul_mosaic_gpu(*args)


IMPLEMENTATIONS = {
    "pallas_tpu": _pallas_tpu,
    "pallas_gpu": _pallas_gpu,
    "mosaic_gpu": _mosaic_gpu,
    "xla": grouped_matmul_xla,
    "ragged_dot": grouped_matmul_ragged_dot,
    "reference": grouped_matmul_reference,
}


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "E K N"],
    group_sizes: Int[Array, " E"],
    *,
    implementation: Implementation = None,
) -> Float[Array, "M N"]:
    """Grouped matmul: ``lhs[m] @ rhs[e]`` for each row m, where e is the row's group (arXiv:2211.15841).

    The first ``group_sizes[0]`` rows are group 0, the next ``group_sizes[1]`` group 1, and so on. Groups may be empty.
    Rows after the last group return zeros.

    Args:
        lhs: rows sorted by group.
        rhs: one matrix per group.
        group_sizes: rows of each group, not negative; their sum is at most M. Data-dependent (known at run time).
        implementation: "pallas_tpu", "pallas_gpu", "mosaic_gpu", "xla", "ragged_dot" (``jax.lax.ragged_dot``) or
            "reference"; see ``pallas_kernels._dispatch``.

    Returns:
        The result in ``lhs.dtype``, accumulated in at least float32. Differentiable in lhs and rhs.

    Raises:
        ValueError: the shapes do not match.
        NotImplementedError: the implementation does not support these arguments.
    """
    if lhs.shape[1] != rhs.shape[1] or group_sizes.shape[0] != rhs.shape[0]:
        raise ValueError(
            f"grouped_matmul: rows of {lhs.shape[1]} columns, {rhs.shape[0]} matrices of {rhs.shape[1]} rows and "
            f"{group_sizes.shape[0]} group sizes do not go together."
        )
    axes = varying_axes(lhs, rhs, group_sizes)
    return dispatch(
        "grouped_matmul",
        IMPLEMENTATIONS,
        implementation,
        vary_over(lhs, axes),
        vary_over(rhs, axes),
        vary_over(group_sizes, axes),
    )
