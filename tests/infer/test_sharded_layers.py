"""Streamed layers over a mesh: each device has its part of the window, and tokens are those of resident weights."""

from __future__ import annotations

import math

import jax
import pytest

import sharding
from jaxllm.cli.errors import UsageError
from jaxllm.cli.model_loading import check_offload, load_with_progress
from jaxllm.infer.streaming.layer_store import LoadedLayers, Unit
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.sharded_layers import device_bytes
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from jaxllm.models import functional
from tests.infer import engines


def mesh_of(text: str) -> jax.sharding.Mesh:
    spec = sharding.MeshSpec.parse(text)
    return spec.build(jax.devices()[: math.prod(size for _, size in spec.axes)])


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(("model", "tensor", "files"), [("llama", 2, True), ("qwen3", 2, False), ("mixtral", 2, False)])
def test_each_device_has_its_part_of_the_window(model, tensor, files, rng, float64, tmp_path):
    config = engines.ENGINES["tight, recompute"]
    placement = WeightPlacement(1, 1, 0 if files else None, tmp_path if files else None)
    engine = engines.build(config, model, "float64", placement=placement, mesh=mesh_of(f"tensor={tensor}"))
    made = engines.serve(engine, engines.traffic(rng, config, 4))
    assert engines.error(model, "float64", made) <= 1e-10
    runner = engine.runner
    assert isinstance(runner, StreamedRunner)
    assert runner.window.counts.most == 1
    unit = runner.units[-1]
    weights = runner.window.there(unit)
    whole = sum(x.nbytes for x in jax.tree.leaves(weights) if x.ndim > 1)
    vectors = sum(x.nbytes for x in jax.tree.leaves(weights) if x.ndim == 1)
    router = 8 * 16 * 4 if model == "mixtral" else 0
    assert runner.window.resident_bytes == (whole - router) / tensor + vectors + router
    for device in mesh_of(f"tensor={tensor}").devices.flat:
        held = [s.data.nbytes for x in jax.tree.leaves(weights) for s in x.addressable_shards if s.device == device]
        assert sum(held) == runner.window.resident_bytes
    assert engine.runner.program_cache.counts.late == 0  # type: ignore[union-attr]


def test_what_does_not_go_over_a_mesh_is_refused():
    config = engines.ENGINES["roomy"]
    with pytest.raises(ValueError, match="not over data=2; give tensor alone"):
        engines.build(config, placement=WeightPlacement(1), mesh=mesh_of("data=2"))
    with pytest.raises(ValueError, match="experts in slots are on one device"):
        engines.build(config, "mixtral", placement=WeightPlacement(1, expert_slots=2), mesh=mesh_of("tensor=2"))
    check_offload("window=2", "tensor=2")
    for offload, said in (("fit,device=1GiB", "fit places layers"), ("window=2,experts=2", "experts in slots are")):
        with pytest.raises(UsageError, match=f"{said} for one device"):
            check_offload(offload, "tensor=2")
    for mesh in ("dp", "data=2,tensor=4", "fsdp=8"):  # before anything is read
        with pytest.raises(UsageError, match="give tensor alone"):
            load_with_progress("no such model", None, mesh=mesh, offload="window=2")


def test_bytes_are_those_of_each_device(float64):
    """Matrices are divided; keys and values of two heads, and norms, are whole on each of four devices."""
    params, mesh = engines.params_of("few kv heads", "float64"), mesh_of("tensor=4")
    model, unit = functional(engines.model_of("few kv heads", "float64")), Unit(0, 0, 0)
    weights = LoadedLayers(params).read(unit, jax.devices()[0])
    whole = 8 * (2 * 16 * 2 * 4 + 2 * 16)
    divided = sum(x.nbytes for x in jax.tree.leaves(weights)) - whole
    assert device_bytes(model, 0, weights, mesh) == whole + divided // 4
    assert OffloadBudget.parse("device=200B,disk=d,host=300B").placement([100] * 10).device_units == 2
    found = OffloadBudget.parse("device=200B,disk=d,host=300B").placement([100] * 10, [40] * 10)
    assert (found.device_units, found.host_units) == (5, 3), "host memory has whole layers"
