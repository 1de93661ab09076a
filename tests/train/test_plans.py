"""Parallel plans: the loss and gradients of one device, and what each plan communicates."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxllm.models import DecoderConfig, MoeConfig, functional
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import value_and_grad
from jaxllm.train.run import Run
from sharding import MeshSpec, ShardingError, shardings_of
from sharding.state import abstract_params
from tests import quick, tiny
from tests.train import runs

SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 4, "embed_dim": 8, "mlp": 8, "vocab_size": 16, "layers": 2}


@functools.cache
def program(config: DecoderConfig, plan: ParallelConfig, accumulate: int) -> Any:
    """Loss and gradients, compiled once for all tests with the same shapes."""
    model = functional(config, plan.rules())
    return quick.jit(value_and_grad(model, z_loss=0.01, accumulate=accumulate, layout=plan.layout, zero=plan.zero))


def loss_and_grads(config: DecoderConfig, batch: Any, mesh: str, plan: ParallelConfig, accumulate: int = 1) -> Any:
    model = functional(config, plan.rules())
    built = MeshSpec.parse(mesh).build(jax.devices()[: np.prod([n for _, n in MeshSpec.parse(mesh).axes])])
    abstract = abstract_params(model.abstract(), model.logical_axes(), built, model.rules)
    run = program(config, plan, accumulate)
    with jax.set_mesh(built):
        params = jax.device_put(quick.params(config), shardings_of(abstract))
        spec = model.rules.spec(("batch", "seq"), built)
        sums, grads = run(params, jax.device_put(batch, jax.NamedSharding(built, spec)))
        jax.tree.map(lambda g, p: np.testing.assert_equal(str(g.sharding.spec), str(p.sharding.spec)), grads, params)
        return jax.device_get((sums, grads))


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(
    ("mesh", "plan", "accumulate"),
    [
        ("data=2,fsdp=2,tensor=2", ParallelConfig(zero=1), 2),
        ("fsdp=4,tensor=2", ParallelConfig(zero=2, sequence=True), 2),
        ("fsdp=2,ulysses=2,context=2", ParallelConfig(context="all_gather", layout="striped"), 1),
        ("context=2,ulysses=2,tensor=2", ParallelConfig(zero=1, sequence=True), 1),
        ("expert=4,data=2", ParallelConfig(zero=2), 2),
        ("expert=2,fsdp=2,tensor=2", ParallelConfig(sequence=True), 1),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_equals_one_device(mesh, plan, accumulate, rng, float64):
    config = tiny.decoder(**SMALL, window=5, norms="sandwich", bias="all", embed_grad=0.1)
    if "expert" in mesh:
        block = dataclasses.replace(config.pattern[0], mlp=MoeConfig(experts=8, top_k=2, hidden=4))
        config = dataclasses.replace(config, pattern=(block,))
    batch = tiny.batch(int(rng.integers(2**16)), 16, 8, 16, packed=True, padding=True)
    one = loss_and_grads(config, batch, "data=1", ParallelConfig())
    many = loss_and_grads(config, batch, mesh, plan, accumulate)
    assert tiny.leaf_error(many, one) < 1e-10


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("mesh", "plan", "changes"),
    [
        ("data=2,context=2,tensor=2", ParallelConfig(experts="expert=8"), {}),
        ("data=2,context=2,tensor=2", ParallelConfig(experts="expert=4,tensor=2", sequence=True), {"shared": 4}),
        ("fsdp=2,context=2,tensor=2", ParallelConfig(experts="expert=2"), {"bias": True}),
        ("fsdp=4,tensor=2", ParallelConfig(experts="expert=1,tensor=8", zero=1), {"bias": True}),
        ("expert=2,ulysses=2,tensor=2", ParallelConfig(experts="expert=4,tensor=2", zero=2), {}),
        ("fsdp=4,expert=2", ParallelConfig(experts="expert=1,tensor=1"), {"capacity": 9.0}),
        ("data=2,context=2,tensor=2", ParallelConfig(experts="expert=8", sequence=True), {"capacity": 9.0}),
        ("fsdp=2,expert=2,tensor=2", ParallelConfig(experts="expert=1"), {}),
        ("data=2,context=2,tensor=2", ParallelConfig(experts="expert=1"), {"shared": 4}),
        ("data=2,fsdp=2,tensor=2", ParallelConfig(experts="expert=1", zero=2), {"bias": True}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_folded_experts_equal_one_device(mesh, plan, changes, rng, float64):
    """Attention and experts factor the same devices in two ways; routing losses and their gradients too."""
    config = tiny.decoder(**SMALL)
    moe = MoeConfig(experts=8, top_k=2, hidden=8, **changes)
    config = dataclasses.replace(config, pattern=(dataclasses.replace(config.pattern[0], mlp=moe),))
    batch = tiny.batch(int(rng.integers(2**16)), 16, 16, 16, packed=True, padding=True)
    one = loss_and_grads(config, batch, "data=1", ParallelConfig())
    many = loss_and_grads(config, batch, mesh, plan)
    assert tiny.leaf_error(many, one) < 1e-10


@pytest.mark.drawn(1)
@pytest.mark.parametrize("remat", ["none", "full"])
def test_experts_with_room_for_all_rows_equal_one_device(remat, rng, float64):
    """A capacity is of a shard: where it drops nothing, the shards together do what one device does."""
    config = tiny.decoder(**SMALL | {"layers": 1}, remat=remat)
    block = dataclasses.replace(config.pattern[0], mlp=MoeConfig(experts=4, top_k=2, hidden=4, capacity=9.0))
    config = dataclasses.replace(config, pattern=(block,))
    batch = tiny.batch(int(rng.integers(2**16)), 8, 8, 16, packed=True)
    one = loss_and_grads(config, batch, "data=1", ParallelConfig())
    many = loss_and_grads(config, batch, "expert=2,fsdp=2", ParallelConfig())
    assert tiny.leaf_error(many, one) < 1e-10


def test_one_kv_head_goes_to_all_head_shards_without_full_rematerialization(rng, float64, capfd, tmp_path):
    """One kv head, heads split over tensor and ulysses: XLA inverts both moves, and does not replicate the gradient."""
    config = tiny.decoder(**SMALL | {"kv_heads": 1, "layers": 1})
    batch = tiny.batch(int(rng.integers(2**16)), 8, 8, 16, packed=True)
    one = loss_and_grads(config, batch, "data=1", ParallelConfig())
    kept = jax.config.jax_compilation_cache_dir
    try:  # a program from the cache warns of nothing
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        compilation_cache.reset_cache()
        many = loss_and_grads(config, batch, "ulysses=2,tensor=2,data=2", ParallelConfig())
    finally:
        jax.config.update("jax_compilation_cache_dir", kept)
        compilation_cache.reset_cache()
    assert tiny.leaf_error(many, one) < 1e-10
    assert "rematerialization" not in capfd.readouterr().err


def test_gathered_once_in_compute_dtype():
    """Matrices are whole and narrow, their gradients summed late; gains keep their dtype."""
    config = dataclasses.replace(tiny.decoder(**SMALL, dtype="float32"), dtype="bfloat16")
    model = functional(config)
    mesh = MeshSpec.parse("data=2,fsdp=2,tensor=2").build()
    with jax.set_mesh(mesh):
        abstract = abstract_params(model.abstract(), model.logical_axes(), mesh, model.rules)
        whole = jax.eval_shape(model.gather, abstract)
    up, gain = whole["segments"]["0"]["0"]["mlp"]["up"], whole["head"]["norm"]["gain"]
    assert up.dtype == jax.numpy.bfloat16
    assert up.sharding.spec.partitions == (None, None, "tensor")
    assert set(up.sharding.spec.reduced) == {"data", "fsdp"}
    assert (gain.dtype, gain.sharding.spec.partitions) == (np.float32, (None,))


def test_a_sequence_that_does_not_divide_over_tensor_is_refused(tmp_path):
    base = runs.run_config(tmp_path, mesh="tensor=2,data=4", seq_len=17)
    Run(base)
    with pytest.raises(ShardingError, match="residual_seq = 17 cannot be split 2 ways"):
        Run(dataclasses.replace(base, parallel=ParallelConfig(sequence=True)))
