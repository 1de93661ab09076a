"""Rotary position embedding: the formula, its relative positions, Llama 3's scaling."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import Llama3Scaling, RopeConfig
from jaxllm.models.layers.rope import rotate, rotation
from jaxllm.models.layers.rope_scaling import geometric
from tests.models import numpy_llama


def turn(x, positions, config=RopeConfig()):  # noqa: B008
    """``rotate`` of [S N H] at positions [S]."""
    cos, sin = rotation(config, jnp.asarray(positions)[None], x.shape[-1], x.dtype)
    return np.asarray(rotate(jnp.asarray(x)[None], cos, sin))[0]


@pytest.mark.parametrize("head_dim", [2, 6, 64])
def test_equals_multiplication_of_complex_numbers(head_dim, rng, float64):
    x = rng.normal(size=(5, 3, head_dim))
    positions = np.array([0, 1, 7, 1000, 131071])
    config = RopeConfig(theta=5e5)
    got = turn(x, positions, config)
    assert got.dtype == np.float64
    for n in range(3):
        # Angles up to 1.3e5 keep 11 digits of their remainder in float64.
        np.testing.assert_allclose(got[:, n], numpy_llama.rope(x[:, n], positions, config), rtol=0, atol=1e-10)


def test_scores_depend_on_the_distance_only(rng, float64):
    q, k = rng.normal(size=(2, 1, 1, 16))
    score = lambda m, n: np.vdot(turn(q, [m]), turn(k, [n]))  # noqa: E731
    for distance in (0, 1, 5):
        scores = [score(m, m - distance) for m in (5, 6, 100, 4096)]
        np.testing.assert_allclose(scores, scores[0], rtol=0, atol=1e-10)
    assert abs(score(5, 0) - score(0, 5)) > 1e-3, "the direction matters"


def test_position_zero_is_the_identity_and_lengths_stay(rng, float64):
    x = rng.normal(size=(1, 2, 8))
    np.testing.assert_array_equal(turn(x, [0]), x)
    np.testing.assert_allclose(np.linalg.norm(turn(x, [12345])), np.linalg.norm(x), rtol=1e-13)


def test_bfloat16_is_turned_in_float32(rng):
    """Positions above 256 have no bfloat16 of their own: angles in bfloat16 would be off by radians."""
    x = rng.normal(size=(3, 1, 8))
    positions = np.array([257, 1001, 8191])
    cos, sin = rotation(RopeConfig(), jnp.asarray(positions)[None], 8, jnp.dtype(jnp.bfloat16))
    assert cos.dtype == sin.dtype == jnp.float32
    rounded = jnp.asarray(x, jnp.bfloat16)
    got = rotate(rounded[None], cos, sin)
    assert got.dtype == jnp.bfloat16
    want = numpy_llama.rope(np.asarray(rounded, np.float64)[:, 0], positions, RopeConfig())
    error = np.linalg.norm(np.asarray(got, np.float64)[0, :, 0] - want) / np.linalg.norm(want)
    assert error < 4e-3, error  # one rounding to bfloat16


# Llama 3.1 (theta 500,000, head dim 128, factor 8, 1 and 4, 8,192) as transformers 5.23 computes it in float32, by
# pair. Wavelengths: up to 1,956 kept, from 2,402 to 6,695 between, from 8,219 stretched.
LLAMA31 = {
    0: 1.0,
    20: 0.016560440883040428,
    28: 0.0032114461064338684,
    29: 0.0021665706299245358,
    30: 0.0013718936825171113,
    32: 0.0005248460220173001,
    34: 0.0001785077911335975,
    35: 9.556212171446532e-05,
    36: 7.784655463183299e-05,
    63: 3.068925877869333e-07,
}


def test_llama3_scaling_has_the_released_frequencies():
    got = Llama3Scaling().frequencies(500000.0, 128)
    assert got.dtype == np.float64
    assert got.shape == (64,)
    for pair, value in LLAMA31.items():
        assert got[pair] == pytest.approx(value, rel=1e-6), pair


def test_llama3_scaling_keeps_short_and_stretches_long_wavelengths():
    scaling = Llama3Scaling(factor=32.0, low_freq_factor=2.0, high_freq_factor=6.0, original_length=4096)
    plain, scaled = geometric(1e6, 256), scaling.frequencies(1e6, 256)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 4096 / 6, wavelength > 4096 / 2
    assert short.any()
    assert long.any()
    np.testing.assert_array_equal(scaled[short], plain[short])
    np.testing.assert_allclose(scaled[long], plain[long] / 32, rtol=1e-15)
    between = ~(short | long)
    assert between.sum() > 3
    ratio = scaled[between] / plain[between]
    assert (np.diff(ratio) < 0).all()
    assert ratio.max() < 1
    assert ratio.min() > 1 / 32
    assert (np.diff(scaled) < 0).all(), "frequencies still fall"


def test_interleaved_pairs_are_neighbours(rng, float64):
    """Pairs (0, 1), (2, 3), ... turn as complex numbers; the result has their real parts first, then the others."""
    x, positions = rng.normal(size=(4, 2, 8)), np.array([0, 1, 5, 900])
    config = RopeConfig(interleaved=True)
    cos, sin = rotation(config, jnp.asarray(positions)[None], 8, x.dtype)
    got = np.asarray(rotate(jnp.asarray(x)[None], cos, sin, interleaved=True))[0]
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * positions[:, None, None] * geometric(config.theta, 8))
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], axis=-1), rtol=0, atol=1e-12)
