"""Weight formats: packed and unpacked, a weight is the nearest value that the format has."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.quant.formats.block_float8 import BlockFloat8
from jaxllm.quant.formats.mxfp4 import MXFP4


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """For each value the distance to the nearest of the table."""
    return np.abs(values[..., None] - table).min(axis=-1)


def test_formats_round_to_the_nearest(rng):
    """Packed and unpacked again, no value of the format at the scale of its group is nearer to the weight."""
    weight = (rng.standard_normal((64, 6)) * 2.0 ** rng.integers(-6, 6, (64, 6))).astype(np.float32)
    form = MXFP4(axis=-2)
    values, scales = form.pack(jnp.asarray(weight))
    assert (values.shape, scales.shape) == ((32, 6), (2, 6))
    back = np.asarray(form.unpack(values, scales, jnp.float32))
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for group in range(2):
        part, got = weight[32 * group : 32 * group + 32], back[32 * group : 32 * group + 32]
        # The scale: the power of two of the largest magnitude, less 2 (OCP MX 1.0, section 6.3).
        scale = 2.0 ** (np.floor(np.log2(np.abs(part).max(axis=0))) - 2)
        table = scale[None, :, None] * np.concatenate([-magnitudes, magnitudes])
        assert (np.abs(got[..., None] - table).min(axis=-1) == 0).all()
        np.testing.assert_allclose(np.abs(got - part), nearest(part, table), rtol=1e-6, atol=0)
    blocks = BlockFloat8((16, 4))
    values, scales = blocks.pack(jnp.asarray(weight))
    assert scales.shape == (4, 2)
    back = np.asarray(blocks.unpack(values, scales, jnp.float32))
    for row, column in itertools.product(range(4), range(2)):
        at = slice(16 * row, 16 * row + 16), slice(4 * column, 4 * column + 4)
        largest = np.abs(weight[at]).max()
        assert np.abs(back[at]).max() == pytest.approx(largest, rel=1e-6)
        # e4m3 has three bits of mantissa: half a step is 1/16 of a value, or of the smallest normal number.
        assert (np.abs(back[at] - weight[at]) <= np.maximum(np.abs(weight[at]), largest / 448 / 64) / 16 + 1e-12).all()
