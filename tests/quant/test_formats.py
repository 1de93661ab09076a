"""Weight formats: packed and unpacked, a weight is the nearest value that the format has."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from scipy.stats import norm

from jaxllm.models import packed_weight
from jaxllm.models.packed_weight import PackedWeight
from jaxllm.quant.formats.block_float8 import BlockFloat8
from jaxllm.quant.formats.mxfp4 import MXFP4
from jaxllm.quant.formats.nf4 import LEVELS, NF4
from pallas_kernels._compat import TargetDevice
from pallas_kernels.packed_matmul import packed_matmul


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


def test_levels_of_nf4_are_quantiles_of_a_normal_distribution():
    """Appendix E of the QLoRA paper: both halves evenly spread in probability, with an exact zero."""
    offset = 0.9677083
    above, below = (norm.ppf(np.linspace(offset, 0.5, count)[:-1]) for count in (9, 8))
    levels = np.sort(np.concatenate([above, [0.0], -below]))
    np.testing.assert_allclose(LEVELS, levels / levels.max(), rtol=0, atol=1e-6)


def test_nf4_is_its_reference(rng):
    """Codes, double-quantised scales and dequantised values bit for bit, written out in numpy; bytes by the formula."""
    weight = (rng.standard_normal((3, 128, 2, 256)) * 0.02).astype(np.float32)
    weight[0, :64, 0, 0] = 0
    form = NF4(axis=-3)
    values, scales = form.pack(jnp.asarray(weight))
    blocks = weight.reshape(3, 2, 64, 2, 256)
    largest = np.abs(blocks).max(axis=2)
    units = blocks / np.where(largest > 0, largest, np.float32(1))[:, :, None]
    codes = np.abs(units[..., None].astype(np.float64) - np.array(LEVELS)).argmin(axis=-1).reshape(3, 128, 2, 256)
    found = np.stack([values & 15, values >> 4], axis=2).reshape(codes.shape)
    other = found != codes  # where a value is in the middle of two levels to within float32's rounding
    assert other.mean() < 1e-4
    middle = (np.array(LEVELS)[found] + np.array(LEVELS)[codes])[other] / 2
    np.testing.assert_allclose(units.reshape(codes.shape)[other], middle, rtol=0, atol=1e-6)
    codes = found
    mean = np.asarray(jnp.mean(jnp.asarray(largest), axis=-1, keepdims=True))
    unit = np.abs(largest - mean).max(axis=-1, keepdims=True) * np.float32(1 / 448)
    stored = ((largest - mean) / unit).astype(ml_dtypes.float8_e4m3fn)
    want = np.concatenate([x.view(np.uint8) for x in (stored, unit, mean)], axis=-1)
    np.testing.assert_array_equal(scales, want)
    again = np.repeat(stored.astype(np.float32) * unit + mean, 64, axis=1)
    np.testing.assert_array_equal(form.unpack(values, scales, jnp.float32), np.array(LEVELS, np.float32)[codes] * again)
    assert 8 * (values.nbytes + scales.nbytes) / weight.size == 4 + 8 / 64 + 64 / (64 * 256)
    assert form.shape(values.shape) == weight.shape


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("form", "contract"), [(MXFP4(-2), 2), (MXFP4(-3), 1), (NF4(-2), 2), (NF4(-3), 1)])
def test_a_matmul_with_nibbles_is_that_of_the_dense_weight(form, contract, rng, monkeypatch):
    """Unpacked within the matmul, and by the kernel's operands, whose plain implementation stands in on a CPU."""
    shape = (3, 64, 40) if contract == 2 else (64, 3, 40)
    packed = PackedWeight(*form.pack(jnp.asarray(rng.normal(size=shape), jnp.float32)), form)
    x = rng.normal(size=(2, 4, *shape[:contract])).astype(np.float32)
    want = np.tensordot(x, np.asarray(packed.dense(jnp.float32)), contract)
    out, used = (None,) * want.ndim, []
    np.testing.assert_allclose(packed.project(jnp.asarray(x), out, contract), want, rtol=0, atol=1e-4)
    monkeypatch.setattr(packed_weight, "target_device", lambda: TargetDevice("tpu", "TPU Test"))
    monkeypatch.setattr(packed_weight, "packed_matmul", lambda *args: used.append(args[2]) or packed_matmul(*args))
    np.testing.assert_allclose(packed.project(jnp.asarray(x), out, contract), want, rtol=0, atol=1e-4)
    assert used[0].dtype == jnp.uint8  # decoded by the kernels for GPUs


def test_nf4_packs_a_shard_like_the_whole(rng):
    """Blocks of scales lie within shards of the last dimension, so that shards are packed and put together."""
    weight = jnp.asarray(rng.standard_normal((64, 512)), jnp.float32)
    whole = NF4().pack(weight)
    halves = [NF4().pack(weight[:, i : i + 256]) for i in (0, 256)]
    for i in range(2):
        np.testing.assert_array_equal(whole[i], jnp.concatenate([half[i] for half in halves], axis=-1))
    with pytest.raises(ValueError, match="96 is no multiple of 64"):
        NF4().pack(jnp.zeros((96, 8)))
