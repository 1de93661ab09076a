"""A subset of the parameters is trained, on meshes and in pipelines: gradients, optimizer state and nothing else."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.data import DataConfig
from jaxllm.models import functional
from jaxllm.models.param_subset import merge, select, trainable_mask
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.plan.formulas import memory_estimate
from jaxllm.train import RunConfig, abstract_state, init_state
from jaxllm.train.host_offload import HostConfig
from jaxllm.train.run import build_value_and_grad, fitting_mesh
from jaxllm.train.step.routing_losses import RoutingConfig
from jaxllm.train.step.step_builder import build_optimizer, build_step
from jaxllm.train.step.training_step import jit_step
from sharding.topology import Topology
from tests import environment, tiny

MODEL = tiny.decoder(dtype="float32", kv_heads=4, layers=2, remat="full", tied=False, norms="pre")
PARTS = {
    "fsdp=4,tensor=2": ParallelConfig(),
    "stage=2,fsdp=2,tensor=2": ParallelConfig(schedule="1f1b"),
    "stage=2,data=2,fsdp=2": ParallelConfig(schedule="zb_h1"),
}
LAYERS, QUERIES = ("attention", "mlp"), ("segments/*/attention/q", "*norm*")


def run_of(mesh: str, trainable: tuple[str, ...] = (), **fields: Any) -> RunConfig:
    shared: dict[str, Any] = {
        "model": MODEL,
        "mesh": mesh,
        "parallel": PARTS[mesh],
        "data": DataConfig(batch_size=16, seq_len=8),
        "optim": OptimConfig(ScheduleConfig("constant", peak=0.1, warmup=0.0)),
        "accumulate": 2,
        "steps": 4,
        "trainable": trainable,
    }
    return RunConfig(**(shared | fields))


class Made:
    """A run's model, mesh, abstract state and functions."""

    def __init__(self, config: RunConfig):
        self.config = config
        self.model = functional(config.model, config.parallel.rules())
        self.mesh = fitting_mesh(config, self.model, 8).build()
        self.optimizer = build_optimizer(config, self.model)
        self.abstract = abstract_state(self.model, self.optimizer, self.mesh)
        self.grads = build_value_and_grad(config, self.model, self.mesh)
        self.step = jit_step(build_step(config, self.model, self.grads, self.optimizer), self.abstract)
        spec = self.model.rules.spec(("batch", "seq"), self.mesh)
        self.batch = jax.device_put(tiny.batch(3, 16, 8, 64, packed=True), jax.sharding.NamedSharding(self.mesh, spec))

    def compiled(self, fn: Any, *arguments: Any) -> Any:
        with jax.set_mesh(self.mesh):
            return jax.jit(fn).lower(*arguments).compile(environment.AS_EVER).memory_analysis()


@functools.cache
def made(mesh: str, trainable: tuple[str, ...] = ()) -> Made:
    return Made(run_of(mesh, trainable))


def shard_bytes(tree: Any) -> int:
    """Bytes of a device's shards of abstract arrays."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def frozen_bytes(mesh: str) -> int:
    """Bytes of a device's frozen parameters. AdamW's state has two numbers less for each."""
    whole, part = made(mesh), made(mesh, LAYERS)
    mask = trainable_mask(part.model, LAYERS)
    frozen = shard_bytes(whole.abstract.params) - shard_bytes(select(mask, whole.abstract.params))
    assert frozen > 0
    assert shard_bytes(whole.abstract.opt_state) - shard_bytes(part.abstract.opt_state) == 2 * frozen
    return frozen


def check_gradient_bytes(mesh: str) -> None:
    """Compiled gradients are smaller by those of the frozen parameters."""
    whole, part = made(mesh), made(mesh, LAYERS)
    mask = trainable_mask(part.model, LAYERS)
    leaves = len(jax.tree.leaves(mask)) - sum(jax.tree.leaves(mask))
    full, less = (m.compiled(m.grads, m.abstract.params, m.batch) for m in (whole, part))
    pointers = 8 * leaves  # a result of several arrays has a table of their addresses
    assert full.output_size_in_bytes - less.output_size_in_bytes == frozen_bytes(mesh) + pointers
    assert full.temp_size_in_bytes >= less.temp_size_in_bytes


def check_step_bytes(mesh: str) -> None:
    """The compiled step takes less optimizer state."""
    full, less = (m.compiled(m.step, m.abstract, m.batch) for m in (made(mesh), made(mesh, LAYERS)))
    assert full.argument_size_in_bytes - less.argument_size_in_bytes == 2 * frozen_bytes(mesh)


@pytest.mark.drawn(0.3)
def test_bytes_of_gradients_and_optimizer_state_fall_by_formula():
    """Compiled on every mesh, and in the compiled step: `make proof seams ONLY=bytes_of_a_subset`."""
    for mesh in PARTS:
        frozen_bytes(mesh)
    check_gradient_bytes("stage=2,fsdp=2,tensor=2")


def gradient_error(mesh: str) -> float:
    """Error of the subset's gradients; the frozen parameters are bit for bit as they were after training."""
    model = dataclasses.replace(MODEL, dtype="float64", param_dtype="float64")
    subset = QUERIES
    whole, part = (Made(run_of(mesh, names, model=model)) for names in ((), subset))
    mask = trainable_mask(part.model, subset)
    with jax.set_mesh(part.mesh):
        state = init_state(part.model, part.optimizer, part.mesh, 0, part.abstract)
        (sums, want), (same, got) = (jax.jit(m.grads)(state.params, m.batch) for m in (whole, part))
        assert float(sums.loss) == pytest.approx(float(same.loss), rel=1e-14)
        error = tiny.leaf_error(jax.device_get(got), jax.device_get(select(mask, want)))
        before = jax.device_get(state.params)
        for _ in range(3):
            state, metrics = part.step(state, part.batch)
        after = jax.device_get(state.params)
    flat = zip(*map(jax.tree.leaves, (mask, before, after)), strict=True)
    for trained, old, new in flat:
        assert np.array_equal(old, new) != trained
    assert float(metrics["grad_norm"]) > 0
    return error


@pytest.mark.drawn(0.3)
def test_gradients_are_those_of_all_parameters(float64):
    """On a pipeline; on other meshes: `make proof seams ONLY=gradients_of_a_subset`."""
    assert gradient_error("stage=2,data=2,fsdp=2") < 1e-13


def check_state_of_subset(kind: str) -> None:
    """An optimizer updates the subset alone, and has less than half of its state."""
    subset = ("q", "gain")
    config = run_of("fsdp=4,tensor=2", subset, optim=OptimConfig(ScheduleConfig("constant", peak=0.1), kind=kind))
    one = Made(config)
    with jax.set_mesh(one.mesh):
        state = init_state(one.model, one.optimizer, one.mesh, 0, one.abstract)
        before = jax.device_get(state.params)
        state, _ = one.step(state, one.batch)
        after = jax.device_get(state.params)
    mask = trainable_mask(one.model, subset)
    for trained, old, new in zip(*map(jax.tree.leaves, (mask, before, after)), strict=True):
        assert np.array_equal(old, new) != trained
    all_state = Made(dataclasses.replace(config, trainable=())).abstract.opt_state
    assert shard_bytes(one.abstract.opt_state) < shard_bytes(all_state) / 2


@pytest.mark.drawn(0.3)
def test_other_optimizers_keep_state_for_the_subset():
    """Adafactor; Muon: `make proof seams ONLY=optimizers_of_a_subset`."""
    check_state_of_subset("adafactor")


def test_select_and_merge():
    model = functional(MODEL)
    mask = trainable_mask(model, ("attention",))
    tree = model.abstract()
    assert merge(select(mask, tree), tree) == tree
    assert len(jax.tree.leaves(select(mask, tree))) == sum(jax.tree.leaves(mask)) == 4
    assert trainable_mask(model, ()) is None
    assert trainable_mask(model, ("*",)) is None


def test_the_plan_knows_the_subset():
    spec = fitting_mesh(run_of("fsdp=4,tensor=2"), functional(MODEL), 8)
    whole, part = (
        memory_estimate.predict(run_of("fsdp=4,tensor=2", subset, accumulate=1), spec, Topology.parse("h100:1x8"))
        for subset in ((), ("attention",))
    )
    one, other = (made("fsdp=4,tensor=2", subset).abstract for subset in ((), ("attention",)))
    frozen = shard_bytes(one.params) - shard_bytes(
        select(trainable_mask(functional(MODEL), ("attention",)), other.params)
    )
    assert whole.parameters == part.parameters
    assert whole.optimizer - part.optimizer == 2 * frozen == shard_bytes(one.opt_state) - shard_bytes(other.opt_state)
    assert whole.gradients - part.gradients == frozen


def refused(**fields: Any) -> str:
    config = run_of("fsdp=4,tensor=2", ("attention",), accumulate=1)
    config = dataclasses.replace(config, **fields)
    with pytest.raises(ConfigError) as caught:
        fitting_mesh(config, functional(config.model), 8)
    return str(caught.value)


def test_what_cannot_be_is_refused_by_name():
    wrong = refused(trainable=("gain", "atention"))
    assert "trainable: 'atention' matches no parameter. Did you mean 'attention'?" in wrong
    assert "a role (embedding, gain, matrix), a name (attention, " in wrong
    rate = ScheduleConfig("constant")
    assert "the optimizer updates all parameters" in refused(optim=OptimConfig(rate, kind="compact"))
    mezo = OptimConfig(rate, kind="mezo", clip_norm=None)
    assert "updates of the parameters of all layers are streamed" in refused(optim=mezo, host=HostConfig(params=True))
    assert "leave the optimizer state in device memory" in refused(host=HostConfig(optimizer=True))
    moe = tiny.decoder(dtype="float32", kv_heads=4, moe=(4, 2, 8, True))
    block = moe.pattern[0]
    router = dataclasses.replace(block.mlp.router, balance_bias=True)
    biased = dataclasses.replace(block, mlp=dataclasses.replace(block.mlp, router=router))
    moe = dataclasses.replace(moe, pattern=(biased,))
    said = refused(model=moe, routing=RoutingConfig(bias_rate=0.1))
    assert "does not go with trainable = attention" in said
    assert 'move though they are frozen; set routing.bias_rate to 0, or add "balance_bias"' in said
    config = run_of("fsdp=4,tensor=2", ("attention", "balance_bias"), model=moe, routing=RoutingConfig(bias_rate=0.1))
    fitting_mesh(config, functional(config.model), 8)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", ["sophia", "lomo", "adalomo", "schedule_free"])
def test_steps_of_their_own_update_the_subset(kind):
    """The chosen parameters move as they do when all are trained; the others keep every bit, and have no state."""
    optim = OptimConfig(ScheduleConfig("constant"), kind=kind, clip_norm=None, weight_decay=0.1)
    batch = tiny.batch(3, 4, 8, 64, packed=True)
    after, before = {}, None
    for trainable in ((), ("attention", "*norm*")):
        run = RunConfig(
            model=MODEL, optim=optim, trainable=trainable, mesh="dp", data=DataConfig(batch_size=4, seq_len=8), steps=9
        )
        model = functional(run.model)
        mesh = fitting_mesh(run, model, 1).build(jax.devices()[:1])
        optimizer = build_optimizer(run, model)
        with jax.set_mesh(mesh):
            state = init_state(model, optimizer, mesh, 0, abstract_state(model, optimizer, mesh))
            before = jax.device_get(state.params)
            step = build_step(run, model, build_value_and_grad(run, model, mesh), optimizer)
            new, _ = jax.jit(step)(state, batch)
            after[trainable] = jax.device_get(new.params)
            moments = sum(leaf.size for leaf in jax.tree.leaves(new.opt_state))
        mask = trainable_mask(model, trainable or ("*",))
        chosen = sum(leaf.size for leaf in jax.tree.leaves(select(mask, before)))
        assert moments < 2 * chosen + 40
    mask = trainable_mask(functional(MODEL), ("attention", "*norm*"))

    def check(on: bool, alone: Any, whole: Any, start: Any) -> None:
        np.testing.assert_allclose(alone, whole, rtol=1e-5, atol=1e-7) if on else np.testing.assert_array_equal(
            alone, start
        )
        assert on == bool((alone != start).any())

    jax.tree.map(check, mask, after["attention", "*norm*"], after[()], before)
