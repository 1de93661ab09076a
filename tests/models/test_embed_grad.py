"""Scaled embedding gradient (GLM-130B): only the gradient through the lookup is scaled."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import DecoderConfig, functional
from jaxllm.train import value_and_grad
from tests import quick, tiny


def loss_and_grads(config: DecoderConfig, params: Any, **fields: Any) -> Any:
    config = dataclasses.replace(config, **fields)
    batch = jax.tree.map(jnp.asarray, tiny.batch(3, 4, 8, config.vocab_size, packed=True))
    sums, grads = quick.jit(value_and_grad(functional(config)))(params, batch)
    return jax.device_get((sums, grads))


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("fields", [{"embed_scale": 3.0}, {"learned_positions": 8}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_eighth_is_an_eighth_to_the_last_bit(fields, dtype):
    """A power of two: nothing is rounded. The loss and all other gradients are the same numbers."""
    config = dataclasses.replace(tiny.decoder(dtype="float32", tied=False, **fields), dtype=dtype)
    params = quick.params(config)
    (loss, whole), (shrunk_loss, shrunk) = (loss_and_grads(config, params, embed_grad=a) for a in (1.0, 0.125))
    assert loss == shrunk_loss
    table = shrunk["embedding"]["table"]
    assert np.any(table)
    np.testing.assert_array_equal(table, whole["embedding"]["table"] / 8)
    shrunk["embedding"]["table"] = whole["embedding"]["table"]
    jax.tree.map(np.testing.assert_array_equal, shrunk, whole)


def test_a_tied_output_matrix_keeps_its_part(float64):
    """A tied table's gradient is the lookup's, scaled down, plus the output matrix's, whole."""
    config = tiny.decoder(tied=True)
    params = quick.params(config)
    apart = params | {"head": params["head"] | {"weight": params["embedding"]["table"]}}
    _, parts = loss_and_grads(config, apart, tied=False)
    _, tied = loss_and_grads(config, params, embed_grad=0.1)
    want = 0.1 * parts["embedding"]["table"] + parts["head"]["weight"]
    np.testing.assert_allclose(tied["embedding"]["table"], want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, float("nan")])
def test_what_is_no_share_is_refused(share):
    with pytest.raises(ValueError, match=r"embed_grad = .*; give a fraction of the gradient"):
        DecoderConfig(embed_grad=share)
