"""Layouts and fusion bounds of TPUs change no value: the same program with and without them, computed here."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from jaxllm.models import functional, tpu_layout
from jaxllm.train import value_and_grad
from tests import tiny
from tests.models.jaxprs import equations


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("mesh", "tied"), [("fsdp=2,tensor=2", True), ("data=1", False)])
def test_values_and_gradients_are_those_without(mesh, tied, monkeypatch, float64):
    config = tiny.decoder(heads=4, kv_heads=1, head_dim=128, vocab_size=16, tied=tied, remat="full")
    batch = jax.tree.map(jnp.asarray, tiny.batch(0, 2, 8, config.vocab_size, packed=True))
    built = sharding.MeshSpec.parse(mesh).build(jax.devices()[: 1 if mesh == "data=1" else 4])
    results = []
    for on_tpu in (False, True):
        monkeypatch.setattr(tpu_layout, "_on_tpu", lambda on_tpu=on_tpu: on_tpu)
        model = functional(config)
        with jax.set_mesh(built):
            abstract = sharding.abstract_params(model.abstract(), model.logical_axes(), built, model.rules)
            params = model.init(jax.random.key(0), sharding.shardings_of(abstract))
            batch = jax.device_put(batch, jax.NamedSharding(built, model.rules.spec(("batch", "seq"), built)))
            run = jax.jit(value_and_grad(model))
            found = [e.primitive.name for e in equations(run.trace(params, batch).jaxpr)]
            assert on_tpu == ("layout_constraint" in found)
            results.append(run(params, batch))
    (plain, plain_grads), (laid_out, grads) = results
    assert abs(float(plain.loss - laid_out.loss)) <= 1e-12 * abs(float(plain.loss))
    for a, b in zip(jax.tree.leaves(plain_grads), jax.tree.leaves(grads), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.linalg.norm(a - b) <= 1e-10 * np.linalg.norm(a)


def test_only_heads_that_fill_lanes_are_laid_out(monkeypatch):
    monkeypatch.setattr(tpu_layout, "_on_tpu", lambda: True)
    laid_out = {
        width: "layout_constraint" in str(jax.make_jaxpr(tpu_layout.heads_first)(jnp.zeros((1, 8, 2, width))))
        for width in (64, 80, 128, 256)
    }
    assert laid_out == {64: False, 80: False, 128: True, 256: True}
