"""Engines over meshes of simulated devices."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import sharding
from jaxllm.infer import Engine, EngineConfig
from jaxllm.models import functional, unstack_layers
from tests import quick
from tests.infer import engines


def over(
    mesh: str, model: str, config: EngineConfig, dtype: str = "float32", *, apart: bool = False, **fields: Any
) -> Engine:
    """An engine whose programs compile fast, on as many devices as the mesh says."""
    spec = sharding.MeshSpec.parse(mesh)
    there = spec.build(jax.devices()[: spec.abstract().size])
    params = engines.params_of(model, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        made = functional(engines.model_of(model, dtype))
        return Engine.of(made, unstack_layers(params) if apart else params, config, mesh=there, strict=True, **fields)
