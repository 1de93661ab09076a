"""Samples on which the kernels of the packed matmul are compared with the reference before first use."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels._self_check import Sample, normal
from pallas_kernels.packed_matmul.api import packed_matmul
from pallas_kernels.packed_matmul.codes import PackedCodes

LEVELS = tuple(float(x) for x in np.sort(np.random.default_rng(3).normal(size=16)))


def samples(dtype: DTypeLike) -> list[Sample]:
    """int4 in groups, levels of a table with one scale, int8, tuples of three bytes, and weights that are not rounded.

    No size is a multiple of a tile.
    """

    def sample(label: str, form: PackedCodes, groups: int, inputs: int) -> Sample:
        packed = np.random.default_rng(groups).integers(
            0, 256, (inputs // form.lanes * form.bytes, 200), dtype=np.uint8
        )
        scales = 0.5 + jnp.abs(normal(1, groups, 200, dtype=jnp.float32))
        return Sample(
            label,
            lambda name, x, packed, scales: packed_matmul(x, packed, scales, form, implementation=name),
            (normal(0, 37, inputs, dtype=dtype), jnp.asarray(packed), scales),
            1,
        )

    return [
        sample("int4 in groups", PackedCodes(4), 18, 1152),
        sample("levels of a table", PackedCodes(4, LEVELS), 1, 1152),
        sample("int8", PackedCodes(8), 9, 576),
        sample("levels of 3 bits", PackedCodes(3, LEVELS[::2]), 8, 512),
        sample("wide int4 in groups", PackedCodes(4, wide=True), 18, 1152),
        sample("wide int8", PackedCodes(8, wide=True), 1, 576),
    ]
