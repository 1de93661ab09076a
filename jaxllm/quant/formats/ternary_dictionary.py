"""Ternary experts in a dictionary code, less than a bit a weight where most are 0 (QMoE, arXiv:2310.16795).

An expert's matrix has one scale for each output, and values of -1, 0 and 1 times it; the values of an output's inputs
are a row of ``jaxllm.quant.ternary_code``. Codewords of a matrix are one after another, and matrices that are stacked
are padded to the longest of them. Before them is where each output's begin (``pallas_kernels.ternary_matmul``).

A matmul decodes the matrix of one expert, and frees it; of few rows on GPUs, a kernel decodes within the matmul.

Legend: I inputs, O outputs, W codewords of the longest matrix and 2 O before them, E experts, M rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt16

from jaxllm.quant.grids import TernaryGrid
from jaxllm.quant.ternary_code import decode, dictionary, encode
from pallas_kernels._dispatch import may_be_default
from pallas_kernels.ternary_matmul import TernaryCode, ternary_matmul
from sharding import LogicalAxes


@dataclass(frozen=True)
class TernaryDictionary:
    """Codewords [..., W, 1] and scales [..., 1, O] of matrices [..., I, O].

    Attributes:
        inputs, outputs: sizes of a matrix, which the codewords do not tell; 0 before anything is packed.
    """

    inputs: int = 0
    outputs: int = 0

    def __str__(self) -> str:
        return "ternary, dictionary code"

    def shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the dense weight."""
        return (*values[:-2], self.inputs, self.outputs)

    def pack(self, weight: Float[Array, "..."]) -> tuple[Array, Array]:
        """Refused: how many codewords there are depends on the values; see ``pack_on_host``.

        Raises:
            ValueError: always.
        """
        raise ValueError("ternary: the size of the code depends on the weights; pack them on the host.")

    def pack_on_host(
        self, weight: Float[Array, "... I O"]
    ) -> tuple[UInt16[np.ndarray, "... W 1"], Float[np.ndarray, "... 1 O"], TernaryDictionary]:
        """Codewords, scales and format of matrices, one matrix at a time: an output's largest magnitude is its scale.

        What is ternary already, with one magnitude for each output, stays as it is.

        Raises:
            ValueError: the weight is on several devices.
        """
        if len(weight.sharding.device_set) > 1:
            raise ValueError("ternary: the code of a matrix cannot be split; load the model on one device.")
        lead, grid = weight.shape[:-2], TernaryGrid()
        words, scales = list[np.ndarray](), list[np.ndarray]()
        for at in np.ndindex(*lead):
            matrix = weight[at].astype(jnp.float32)
            params = grid.fit(matrix)
            values = np.asarray(grid.encode(matrix, params)).astype(np.int8) - grid.middle
            own, counts = encode(np.ascontiguousarray(values.T))
            starts = np.cumsum(counts) - counts
            header = np.stack([starts % 2**16, starts >> 16], axis=1).astype(np.uint16)
            words.append(np.concatenate([header.ravel(), own]))
            scales.append(np.asarray(params.scale))
        most = max(len(one) for one in words)
        stacked = np.stack([np.pad(one, (0, most - len(one))) for one in words])
        return (
            stacked.reshape(*lead, most, 1),
            np.stack(scales).reshape(*lead, 1, -1),
            replace(self, inputs=weight.shape[-2], outputs=weight.shape[-1]),
        )

    def unpack(
        self, values: UInt16[Array, "... W 1"], scales: Float[Array, "... 1 O"], dtype: DTypeLike
    ) -> Float[Array, "... I O"]:
        """Dense weight, matrix by matrix."""
        lead = values.shape[:-2]

        def one(arrays: tuple[Array, Array]) -> Array:
            words, scale = arrays
            wide = scale.astype(jnp.promote_types(jnp.float32, dtype))
            return (decode(words[2 * self.outputs :], self.outputs, self.inputs).T * wide).astype(dtype)

        flat = (values.reshape(math.prod(lead), -1), scales.reshape(math.prod(lead), -1))
        return jax.lax.map(one, flat).reshape(*lead, self.inputs, self.outputs)

    def multiply_rows(
        self, rows: Float[Array, "M I"], experts: Int[Array, " M"], values: Array, scales: Array
    ) -> Float[Array, "M O"] | None:
        """Matmul of each row with its expert's matrix, which the kernel decodes within it; None where there is none for
        the device, or it does not take the rows.
        """
        if not may_be_default("ternary_matmul", "pallas_gpu"):
            return None
        code = TernaryCode(values[..., 0], jnp.asarray(dictionary().runs))
        try:
            return ternary_matmul(rows, code, scales[:, 0], experts.astype(jnp.int32), implementation="pallas_gpu")
        except NotImplementedError:
            return None

    def scale_axes(self, axes: LogicalAxes) -> LogicalAxes:
        """Logical axes of the scales."""
        return (*axes[:-2], None, axes[-1])
