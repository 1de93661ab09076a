"""Adapted weights on a mesh: rows through base and adapters, column-parallel and row-parallel, by one all-reduce."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding
from jaxllm.infer.runner.adapted_weight import AdaptedWeight, with_rows
from jaxllm.infer.runner.serving_mesh import serving_rules
from tests import quick

TOKENS = 21


@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "tensor=4"])
@pytest.mark.parametrize(
    ("axes", "of_x", "of_y"),
    [(("embed", "mlp"), "act_embed", "act_mlp"), (("mlp", "embed"), "act_mlp", "act_embed")],
    ids=["columns", "rows"],
)
def test_rows_on_a_mesh_are_those_on_one_device(mesh, axes, of_x, of_y, rng, float64):
    spec = sharding.MeshSpec.parse(mesh)
    devices = spec.build(jax.devices()[: spec.abstract().size])
    rules, replicas = serving_rules(sharding.DEFAULT), devices.shape.get("data", 1)
    x, w = rng.normal(size=(replicas, TOKENS, 24)), rng.normal(size=(24, 16))
    a, b = rng.normal(size=(5, 16, 24)), rng.normal(size=(5, 16, 16))
    tables, scales = np.array([[3, 1], [0, -1], [2, 4]]), np.array([2.0, 0.5, 1.0])
    slots = rng.integers(-1, 3, (replicas, TOKENS))
    want = x @ w
    for r, t in np.ndindex(slots.shape):
        for page in tables[slots[r, t]] if slots[r, t] >= 0 else ():
            want[r, t] += (scales[slots[r, t]] * (x[r, t] @ a[page].T) @ b[page]) * (page >= 0)

    def run(x, w, a, b, slots, tables, scales):
        with sharding.use_rules(rules):
            weights = with_rows({"w": AdaptedWeight(w, a, b)}, slots, tables, scales)
            return weights["w"].gather(x.dtype, axes, False).project(x, ("batch", "residual_seq", of_y), 1)

    def put(value, *names, gathered=False):
        place = rules.spec(names, devices, np.shape(value), gathered=gathered)
        return jax.device_put(jnp.asarray(value), jax.NamedSharding(devices, place))

    with jax.set_mesh(devices):
        every = (np.stack([value] * replicas) for value in (tables.astype(np.int32), scales))
        arguments = (
            put(x, "batch", "seq", of_x), put(w, *axes), put(a, None, None, axes[0], gathered=True),
            put(b, None, None, axes[1], gathered=True), put(slots.astype(np.int32), "batch", "seq"),
            *(put(value, "batch", *(None,) * (value.ndim - 1)) for value in every),
        )  # fmt: skip
        program = quick.jit(run).lower(*arguments).compile()
        got = np.asarray(program(*arguments))
    np.testing.assert_allclose(got, want, atol=1e-12)
    assert program.as_text().count(" all-reduce(") == (of_x == "act_mlp")
