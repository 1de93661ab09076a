"""Grouped low-rank matmul (the batched LoRA of S-LoRA, arXiv:2311.03285), and its implementations.

Legend: M rows, P pages, R ranks of a page, K columns of a row, N columns of the result, S slots.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float

from pallas_kernels._compat import vary_over, varying_axes
from pallas_kernels._dispatch import Implementation, dispatch
from pallas_kernels.grouped_lora.adapter_tiles import AdapterTiles
from pallas_kernels.grouped_lora.reference import grouped_lora_reference
from pallas_kernels.grouped_lora.xla import grouped_lora_xla


def _pallas_tpu(*args: Any) -> Array:
    from pallas_kernels.grouped_lora.pallas_tpu import grouped_lora_pallas_tpu

    return grouped_lora_pallas_tpu(*args)


def _pallas_gpu(*args: Any) -> Array:
    from pallas_kernels.grouped_lora.pallas_gpu import grouped_lora_pallas_gpu

    return grouped_lora_pallas_gpu(*args)


IMPLEMENTATIONS = {
    "pallas_tpu": _pallas_tpu,
    "pallas_gpu": _pallas_gpu,
    "xla": grouped_lora_xla,
    "reference": grouped_lora_reference,
}


def grouped_lora(
    x: Float[Array, "M K"],
    a: Float[Array, "P R K"],
    b: Float[Array, "P R N"],
    rows: AdapterTiles,
    *,
    implementation: Implementation = None,
) -> Float[Array, "M N"]:
    """Grouped low-rank matmul: ``scale[s] * (x[m] @ A[s]) @ B[s]`` for each row m, where s is the row's slot.

    The ranks of ``A[s]`` (transposed) and ``B[s]`` are in the pages ``tables[s]`` of ``a`` and ``b``. Adapters of any
    ranks share a batch. Rows without an adapter return zeros.

    Args:
        x: rows, in any order of adapters.
        a, b: pages of factors; ranks of a page that its adapter does not have are zero.
        rows: adapter of each row, see ``schedule_tiles``.
        implementation: "pallas_tpu", "pallas_gpu", "xla" or "reference"; see ``pallas_kernels._dispatch``.

    Returns:
        The result in ``x.dtype``, accumulated in at least float32. It has no gradients: adapters that are trained are
        not in pages.

    Raises:
        ValueError: the shapes do not match.
        NotImplementedError: the implementation does not support these arguments.
    """
    if x.shape[1] != a.shape[2] or a.shape[:2] != b.shape[:2] or x.shape[0] != rows.slots.shape[0]:
        raise ValueError(
            f"grouped_lora: rows {list(x.shape)} with {rows.slots.shape[0]} slots, and pages {list(a.shape)} and "
            f"{list(b.shape)} do not go together; they are [M, K], M, [P, R, K] and [P, R, N]."
        )
    axes = varying_axes(x, a, b, *rows)
    rows = AdapterTiles(*(vary_over(array, axes) for array in rows))
    operands = (vary_over(array, axes) for array in (x, a, b))
    return dispatch("grouped_lora", IMPLEMENTATIONS, implementation, *operands, rows)
