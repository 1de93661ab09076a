"""RMSNorm against numpy, and its compute dtype."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.layers.norm import rms_normalize
from tests.models import numpy_llama


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 1), (2, 5, 6), (2, 3, 4, 10)])
def test_equals_numpy(shape, rng, float64):
    x, gain = rng.normal(size=shape), rng.normal(size=shape[-1])
    got = rms_normalize(jnp.asarray(x), jnp.asarray(gain), 1e-5)
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, numpy_llama.rms_norm(x, gain, 1e-5), rtol=1e-14)


def test_eps_decides_for_small_inputs(rng, float64):
    x = 1e-6 * rng.normal(size=(4, 8))
    for eps in (1e-5, 1e-12):
        got = rms_normalize(jnp.asarray(x), jnp.ones(8), eps)
        np.testing.assert_allclose(got, numpy_llama.rms_norm(x, np.ones(8), eps), rtol=1e-14)
    np.testing.assert_array_equal(rms_normalize(jnp.zeros((2, 8)), jnp.ones(8), 1e-5), 0)


def test_bfloat16_is_normalised_in_float32(rng):
    """A sum of 4,096 squares accumulated in bfloat16 would stall at 256 times its terms."""
    x = jnp.asarray(rng.normal(size=(2, 4096)) + 1, jnp.bfloat16)
    got = rms_normalize(x, jnp.ones(4096, jnp.float32), 1e-5)
    assert got.dtype == jnp.bfloat16
    want = numpy_llama.rms_norm(np.asarray(x, np.float64), np.ones(4096), 1e-5)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8)  # one rounding
