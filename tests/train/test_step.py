"""Training step: its metrics, in-place updates, a single compilation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import functional
from jaxllm.optim import OptimConfig, ScheduleConfig, optimizer, schedule
from jaxllm.train import abstract_state, init_state, train_step, value_and_grad
from jaxllm.train.step.loss import LossSums
from jaxllm.train.step.training_step import jit_step
from sharding import MeshSpec
from tests import environment, quick, tiny

CONFIG = tiny.decoder(dtype="float32", vocab_size=16, layers=1, tied=False)
OPTIM = OptimConfig(ScheduleConfig("constant", peak=0.1, warmup=0.5), weight_decay=0.0, clip_norm=0.5)
TOTAL = 8


class Ready:
    """A compiled step on a mesh, its state and its batches."""

    def __init__(self, preset: str) -> None:
        self.mesh = MeshSpec.parse(preset).build()
        self.model = functional(CONFIG)
        self.transform = optimizer(OPTIM, TOTAL, self.model.logical_axes())
        self.abstract = abstract_state(self.model, self.transform, self.mesh)
        step = train_step(value_and_grad(self.model), self.transform, schedule(OPTIM.schedule, TOTAL))
        self.step = jit_step(step, self.abstract)

    def state(self) -> Any:
        return init_state(self.model, self.transform, self.mesh, 0, self.abstract)

    def batch(self, seed: int) -> Any:
        batch = tiny.batch(seed, 8, 4, 16, packed=False)
        spec = self.model.rules.spec(("batch", "seq"), self.mesh)
        return jax.device_put(batch, jax.NamedSharding(self.mesh, spec))


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the programs that XLA is asked for in the block, whether or not a cache has them."""
    found: list[str] = []

    def listen(event: str, seconds: float, **more: Any) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(str(more.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_the_count_of_compilations_counts():
    with compilations() as compiled:
        jax.jit(lambda x: x + 1)(jnp.zeros(3))
    assert compiled


@functools.cache
def ready(preset: str) -> Ready:
    return Ready(preset)


@pytest.mark.drawn(0.3)
def test_metrics_say_what_happened():
    on = ready("fsdp_tp")
    with jax.set_mesh(on.mesh):
        state = on.state()
        before, batch = jax.device_get(state.params), on.batch(0)
        _, grads = quick.jit(value_and_grad(on.model))(state.params, batch)
        grads = jax.device_get(grads)
        state, metrics = on.step(state, batch)
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in jax.tree.leaves(grads)))
    assert norm > 0.5, "above the clipping norm, so that the one before clipping is told from the one after"
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert float(metrics["learning_rate"]) == pytest.approx(0.1 / 4)
    assert float(metrics["tokens"]) == (np.asarray(batch.targets) >= 0).sum()
    assert float(metrics["loss"]) == float(metrics["nll"])
    assert int(state.step) == 1
    # Adam's first step has the size of the learning rate, whatever the gradient's, so the clipping does not show here.
    moved = np.abs(jax.device_get(state.params["head"]["weight"]) - before["head"]["weight"])
    assert np.median(moved[np.abs(grads["head"]["weight"]) > 1e-4]) == pytest.approx(0.1 / 4, rel=1e-3)


@pytest.mark.drawn(1)
def test_the_state_keeps_its_shardings_and_the_program_compiles_once():
    on = ready("fsdp_tp")
    with jax.set_mesh(on.mesh):
        state = on.state()
        batches = [on.batch(seed) for seed in range(3)]
        for batch in batches:
            with compilations() as compiled:
                state, _ = on.step(state, batch)
            assert len(compiled) == 0 or batch is batches[0], "no program after the first step's"
            same = jax.tree.map(lambda a, b: a.sharding == b.sharding, state, on.abstract)
            assert all(jax.tree.leaves(same))
    assert int(state.step) == 3
    assert [int(leaf) for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim == 0] == [3, 3]


@pytest.mark.drawn(0.3)
def test_the_state_is_donated_and_updated_in_place():
    on = ready("fsdp_tp")
    with jax.set_mesh(on.mesh):
        state = on.state()
        old = jax.tree.leaves((state.params, state.opt_state))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "Some donated buffers were not usable"
            on.step(state, on.batch(0))
        assert all(leaf.is_deleted() for leaf in old)
        memory = on.step.lower(on.abstract, on.batch(0)).compile(environment.AS_EVER).memory_analysis()
    per_device = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(on.state().params))
    assert memory.alias_size_in_bytes >= 3 * per_device, "parameters and both moments"


def test_the_state_is_a_function_of_the_seed():
    on = ready("fsdp_tp")
    first, again = on.state(), on.state()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(first.params), jax.device_get(again.params))
    other = init_state(on.model, on.transform, on.mesh, 1, on.abstract)
    assert jax.random.key_data(first.rng).tolist() != jax.random.key_data(other.rng).tolist()
    assert not np.array_equal(first.params["head"]["weight"], other.params["head"]["weight"])


def test_value_and_grad_comes_from_outside():
    """A pipeline schedule that owns the backward pass needs no other seam: its gradients are used as they are."""
    model = functional(dataclasses.replace(CONFIG, layers=1))
    transform = optimizer(
        OptimConfig(ScheduleConfig("constant", peak=1.0, warmup=0.0), clip_norm=None), 1, {"w": ("a",)}
    )

    def mine(params: Any, batch: Any) -> Any:
        return LossSums(jnp.float32(12), jnp.float32(10), jnp.float32(0), jnp.float32(4)), {"w": jnp.array([3.0, -4.0])}

    state = type(ready("fsdp_tp").abstract)(
        params={"w": jnp.zeros(2)}, opt_state=transform.init({"w": jnp.zeros(2)}), step=jnp.int32(0), rng=None
    )
    after, metrics = quick.jit(train_step(mine, transform, lambda step: jnp.float32(1)))(state, None)
    assert model.config.layers == 1
    assert {name: float(value) for name, value in metrics.items()} == {
        "loss": 3.0, "nll": 2.5, "grad_norm": 5.0, "learning_rate": 1.0, "tokens": 4.0,
        "param_norm": pytest.approx(2**0.5), "update_norm": pytest.approx(2**0.5),
    }  # fmt: skip
    np.testing.assert_allclose(after.params["w"], [-1, 1], rtol=1e-6)
