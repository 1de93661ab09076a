"""An engine over a mesh: what it serves is what one device serves, and what it cannot serve on it says by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest

import sharding
from jaxllm.infer import Engine, EngineConfig
from jaxllm.models import functional
from tests import quick
from tests.infer import engines

SIZES = dataclasses.replace(engines.ENGINES["roomy"], preemption="swap", sequences=2, budget=8, buckets=(8,))


def over(
    mesh: str, model: str = "llama", config: EngineConfig = SIZES, dtype: str = "float32", **fields: Any
) -> Engine:
    spec = sharding.MeshSpec.parse(mesh)
    devices = jax.devices()[: spec.abstract().size]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        made = functional(engines.model_of(model, dtype))
        return Engine.of(made, engines.params_of(model, dtype), config, mesh=spec.build(devices), strict=True, **fields)


@pytest.mark.parametrize(("mesh", "model"), [("tensor=2", "llama"), ("data=2", "llama"), ("expert=2", "mixtral")])
def test_a_mesh_serves_what_one_device_serves(mesh: str, model: str, rng):
    engine = over(mesh, model)
    made = engines.serve(engine, engines.traffic(rng, engine.config, 8))
    assert engines.error(model, "float32", made) < 1e-3
