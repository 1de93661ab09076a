"""3-level ZeRO and gathers in 8 bits: the run of one level, inner gathers, bytes of a device."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxllm.config import ConfigError
from jaxllm.models import functional
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.run_sharding import sharding_table
from sharding import MeshSpec, int8_gather
from tests import quick, tiny
from tests.train.outer_runs import float32, run_of, trained
from tests.train.test_plans import SMALL, loss_and_grads

MESH = "data=2,local=2,fsdp=2"
LEVELS = ParallelConfig(zero="3level")


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(
    ("mesh", "accumulate"), [(MESH, 1), (MESH, 2), ("data=2,fsdp=2,tensor=2", 2), ("data=2,local=2,context=2", 1)]
)
def test_gradients_are_those_of_one_device(mesh, accumulate, rng, float64):
    """They are sharded as the parameters are: over all levels."""
    config = tiny.decoder(**SMALL, bias="all")
    batch = tiny.batch(int(rng.integers(2**16)), 16, 8, 16, packed=True, padding=True)
    one = loss_and_grads(config, batch, "data=1", ParallelConfig())
    many = loss_and_grads(config, batch, mesh, LEVELS, accumulate)
    assert tiny.leaf_error(many, one) < 1e-10


@pytest.mark.drawn(0.5)
def test_a_run_is_that_of_one_level(float64):
    fields = {"steps": 3}
    found = [trained(run_of(MESH, OuterConfig(), parallel=plan, **fields)) for plan in (LEVELS, ParallelConfig(zero=3))]
    assert tiny.leaf_error(*(jax.device_get(one.state.params) for one in found)) < 1e-10
    table = found[0].state.params["embedding"]["table"]
    assert len({str(shard.index) for shard in table.addressable_shards}) == 8, "every device has a part of its own"


def test_bytes_of_a_device_by_formula():
    """State over all devices, weights over fsdp, gradients over local and fsdp; biases and gains have no embed axis."""
    run = float32(run_of(MESH, OuterConfig(), parallel=LEVELS))
    table = sharding_table(run, 8)
    split = [row for row in table.parameters if "fsdp" in row.place]
    assert sum(row.bytes for row in split) > 0.99 * sum(row.bytes for row in table.parameters)
    assert all(row.device_bytes * 8 == row.bytes for row in split)
    work = DeviceWork.of(run, MeshSpec.parse(MESH))
    for weight in work.weights:
        if math.prod(weight.shape) * 8 == math.prod(_shape(run, weight.name)):
            assert (weight.in_step, weight.summed) == (4 * weight.stored, 2 * weight.stored)


def _shape(run, name):
    leaves = jax.tree_util.tree_leaves_with_path(functional(run.model).abstract())
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}[name]


def rounded(w: np.ndarray, block: int) -> np.ndarray:
    """A weight in blocks of 8-bit integers and back, by definition."""
    x = w.reshape(*w.shape[:-1], -1, block)
    scale = (np.abs(x).max(-1, keepdims=True) / 127).astype(np.float32)
    codes = np.clip(np.round(x / np.where(scale > 0, scale, 1).astype(w.dtype)), -127, 127)
    return (codes.astype(np.float32) * scale).astype(w.dtype).reshape(w.shape)


@pytest.mark.parametrize(
    ("spec", "whole"), [(P("fsdp", None), P()), (P(None, "fsdp"), P()), (P("data", "fsdp"), P("data"))]
)
def test_a_gathered_weight_is_rounded_in_blocks(spec, whole, rng):
    w = rng.normal(size=(8, 96)).astype(np.float32)
    mesh = MeshSpec.parse("data=2,fsdp=2").build(jax.devices()[:4])
    whole = P(*whole, *(None,) * (2 - len(whole)))
    with jax.set_mesh(mesh):
        block = int8_gather.block_of(w.shape, spec, mesh.shape)
        run = jax.jit(lambda w: int8_gather.gather(w, whole, spec))
        placed = jax.device_put(w, jax.NamedSharding(mesh, spec))
        found, text = run(placed), run.lower(placed).compile().as_text()
        slope = jax.jit(jax.grad(lambda w: jnp.sum(jnp.square(int8_gather.gather(w, whole, spec)))))(placed)
    assert block == (96 if spec == P("fsdp", None) else 48)
    assert found.sharding.spec == whole
    np.testing.assert_allclose(found, rounded(w, block), rtol=1e-6)
    np.testing.assert_allclose(slope, 2 * rounded(w, block), rtol=1e-6)
    assert slope.sharding.spec == spec
    assert any("all-gather" in line and "s8[" in line for line in text.splitlines())
    assert int8_gather.block_of((8, 15), P("fsdp", None), mesh.shape) == 0


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(
    ("mesh", "zero", "bound"), [("fsdp=2,data=2", 3, 1e-10), ("fsdp=4", 2, 1e-10), (MESH, "3level", 0.5)]
)
def test_gradients_are_taken_at_the_rounded_weights(mesh, zero, bound, rng, float64, monkeypatch):
    """With three levels weights may be rounded twice, in blocks of other sizes."""
    config = tiny.decoder(**SMALL | {"embed_dim": 64, "head_dim": 16, "mlp": 64})
    batch = tiny.batch(int(rng.integers(2**16)), 16, 8, 16, packed=True)
    packed = loss_and_grads(config, batch, mesh, ParallelConfig(zero=zero, gather="int8"))
    model, spec = functional(config), MeshSpec.parse(mesh).abstract()

    def of_gathers(w, axes, matrix):
        stacked = axes[0] == "layers"
        there = model.rules.spec(axes, spec)
        whole = model.rules.spec(axes, spec, gathered=True)
        block = int8_gather.block_of(w.shape[stacked:], P(*there[stacked:]), spec.shape)
        return rounded(w, block) if matrix and block and there != whole else w

    plain = loss_and_grads(config, batch, mesh, ParallelConfig(zero=zero))
    params, axes = quick.params(config), model.logical_axes()
    given = jax.tree.map(of_gathers, params, axes, model.matrices(), is_leaf=lambda x: isinstance(x, np.ndarray))
    monkeypatch.setattr(quick, "params", lambda _: given)
    want = loss_and_grads(config, batch, mesh, ParallelConfig(zero=zero))
    assert tiny.leaf_error(packed, want) < bound
    assert tiny.leaf_error(packed, plain) > 1e-3


def test_what_does_not_go_with_three_levels():
    for mesh, outer, said in (
        ("fsdp=8", OuterConfig(), "data=2,local=2,fsdp=2"),
        ("replica=2,data=2,fsdp=2", OuterConfig("diloco"), "outer.kind"),
    ):
        with pytest.raises(ConfigError, match=said):
            sharding_table(run_of(mesh, outer, parallel=LEVELS), 8)
    packed = dataclasses.replace(
        run_of("stage=2,fsdp=2", OuterConfig(), model=tiny.decoder(kv_heads=4)), parallel=ParallelConfig(gather="int8")
    )
    with pytest.raises(ConfigError, match=r"parallel\.gather"):
        sharding_table(packed, 4)
