"""8-bit optimizer state: codes, blocks, errors."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.optim.adam8bit import QuantisedMoments, block_dim_and_size, codebook, dequantise, quantise


@pytest.mark.parametrize("signed", [True, False])
def test_codes(signed):
    """256 of them; seven decades, each divided twice as finely as the one below (arXiv:2110.02861, section 1.3)."""
    codes = codebook(signed)
    assert len(codes) == len(np.unique(codes)) == 256
    assert {0.0, 1.0} <= set(codes)
    counts = [int(((codes > 10.0**-k) & (codes < 10.0 ** (1 - k))).sum()) for k in range(7, 0, -1)]
    assert counts == [2 ** (k + (not signed)) for k in range(7)]
    negative = -codes[codes < 0][::-1]
    np.testing.assert_array_equal(negative, codes[(codes > 0) & (codes < 1)] if signed else [])


@pytest.mark.parametrize("signed", [True, False])
def test_each_code_is_its_own(signed):
    codes = codebook(signed)
    whole = np.concatenate([codes, [1.0]])[None].repeat(2, 0)[:, :256] * np.array([[3.0], [1e-20]])
    found = quantise(jnp.asarray(whole, jnp.float32), signed)
    np.testing.assert_array_equal(found.codes[0], np.arange(256))
    np.testing.assert_allclose(dequantise(found, signed), whole, rtol=1e-6)


@pytest.mark.parametrize("signed", [True, False])
def test_errors_are_half_a_part(signed, rng):
    """The error is at most 0.45 of a decade, [0.1, 1], divided by the number of its parts."""
    x = 10.0 ** rng.uniform(-6.9, 0, (64, 256)) * (rng.choice([-1, 1], (64, 256)) if signed else 1)
    x[:, 0] = (-1.0) ** np.arange(64) if signed else 1
    got = np.asarray(dequantise(quantise(jnp.asarray(x, jnp.float32), signed), signed))
    decade = np.clip(np.floor(np.log10(np.abs(x))) + 7, 0, 6)
    most = 0.45 * 10.0 ** (decade - 6) / 2.0 ** (decade + (not signed))
    assert (np.abs(got - x) <= most * (1 + 1e-3)).all()
    assert np.abs(got - x).max() > 0.5 * most.max()


def test_blocks():
    assert block_dim_and_size((3, 512, 64)) == (1, 256)
    assert block_dim_and_size((3, 64, 64)) == (2, 64)
    assert block_dim_and_size((6, 5)) == (0, 2)
    assert block_dim_and_size((3, 5)) == (1, 1)
    x = jnp.concatenate([jnp.full((1, 256), 1e-9), jnp.full((1, 256), 1e9), jnp.zeros((1, 256))], axis=1)
    found = quantise(x, False)
    assert isinstance(found, QuantisedMoments)
    assert found.scales.shape == (1, 3)
    np.testing.assert_allclose(dequantise(found, False), x, rtol=1e-6)
