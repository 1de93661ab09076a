"""The step as a chain: links from outside, in order, with states of their own; checkpoints of before the chain load."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.checkpoint import Checkpointer, state_providers
from jaxllm.checkpoint.storage import leaf_paths
from jaxllm.data import DataConfig
from jaxllm.models import functional
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.train import RunConfig, SpikeConfig, TrainState, init_state, train_step
from jaxllm.train.precision import with_precision
from jaxllm.train.step.loss import LossSums
from jaxllm.train.step.param_average import EmaConfig
from jaxllm.train.step.step_builder import build_optimizer, run_state, step_links
from jaxllm.train.step.step_chain import Gradients, InnerStep, StepLink, StepResult, link_state, link_states
from jaxllm.train.step.step_links import mixed_precision, spike_detection
from jaxllm.train.step.training_step import layerwise_step
from sharding import MeshSpec
from tests import quick, tiny

RUN = RunConfig(
    model=tiny.decoder(dtype="float32"),
    optim=OptimConfig(ScheduleConfig("constant", peak=1e-2)),
    spikes=SpikeConfig("skip", window=4),
    ema=EmaConfig(0.9),
    data=DataConfig(batch_size=8, seq_len=8),
)


def sums(loss: float) -> LossSums:
    return LossSums(jnp.float32(loss), jnp.float32(loss), jnp.float32(0), jnp.float32(1))


def plus(name: str, amount: float) -> StepLink:
    """A link that adds to gradients and updates, and counts its steps."""

    def gradients(take: Gradients) -> Gradients:
        def run(state: TrainState, batch: Any) -> tuple[Any, ...]:
            found, grads = take(state, batch)
            return found, jax.tree.map(lambda g: 2 * g + amount, grads)

        return run

    def wrap(step: InnerStep) -> InnerStep:
        def run(state: TrainState, batch: Any) -> StepResult:
            result = step(state, batch)
            params = jax.tree.map(lambda p: 2 * p + amount, result.state.params)
            result = result._replace(state=dataclasses.replace(result.state, params=params))
            return result.with_extra(name, link_state(state, name) + 1).with_metrics(**{name: jnp.float32(amount)})

        return run

    return StepLink(name, lambda params: jnp.zeros((), jnp.int32), gradients, wrap)


def test_links_are_applied_in_order_the_first_one_innermost():
    links = [plus("one", 1.0), plus("two", 10.0)]
    rule = optax.sgd(1.0)
    params = {"w": jnp.array([1.0, 2.0])}
    extras = {name: init(params) for name, init in link_states(links).items()}
    state = TrainState(params, rule.init(params), jnp.int32(0), jax.random.key(0), extras)
    grads = {"w": jnp.array([0.5, -0.25])}
    step = quick.jit(train_step(lambda params, batch: (sums(3.0), grads), rule, lambda step: jnp.float32(1), links))
    after, metrics = step(state, None)
    taken = 2 * (2 * grads["w"] + 1) + 10
    np.testing.assert_allclose(after.params["w"], 2 * (2 * (params["w"] - taken) + 1) + 10)
    assert (int(after.extras["one"]), int(after.extras["two"]), int(after.step)) == (1, 1, 1)
    assert (float(metrics["one"]), float(metrics["two"]), float(metrics["loss"])) == (1, 10, 3)
    assert float(metrics["grad_norm"]) == pytest.approx(float(jnp.linalg.norm(taken)))


def test_names_of_states_are_unique():
    for links in ([plus("one", 1.0), plus("one", 2.0)], [plus("params", 1.0)], [plus("also", 1.0)]):
        with pytest.raises(ValueError, match="is taken; give the link another name"):
            link_states(links)


def test_a_step_without_gradients_refuses_links_that_change_them():
    with pytest.raises(ValueError, match="links one change gradients"):
        layerwise_step(lambda state, batch: None, lambda step: jnp.float32(1), [plus("one", 1.0)])  # type: ignore[arg-type]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateOfBefore:
    """Train state of before the chain, by whose fields checkpoints named their leaves."""

    params: Any
    opt_state: Any
    step: Any
    rng: Any
    numerics: Any = None
    spikes: Any = None


def states(run: RunConfig) -> tuple[TrainState, TrainState]:
    """State of a run, and its abstract one."""
    model, mesh = functional(run.model), MeshSpec.parse("fsdp=2").build(jax.devices()[:2])
    transform = build_optimizer(run, model)
    abstract = run_state(run, model, transform, mesh)
    with jax.set_mesh(mesh):
        start = jax.device_put(quick.params(run.model), jax.tree.map(lambda leaf: leaf.sharding, abstract.params))
        state = init_state(model, transform, mesh, 3, abstract, start, link_states(step_links(run)))
    return state, abstract


@pytest.mark.parametrize("precision", ["fp16", "fp8_delayed", "float32"])
def test_checkpoints_of_before_the_chain_load_and_new_ones_have_the_same_leaves(precision, tmp_path):
    run = dataclasses.replace(with_precision(RUN, precision), ema=EmaConfig())
    state, abstract = states(run)
    old = StateOfBefore(state.params, state.opt_state, state.step, state.rng, **state.extras)
    assert set(state.extras) == ({"spikes"} if precision == "float32" else {"numerics", "spikes"})
    assert list(leaf_paths.leaf_paths(state)) == list(leaf_paths.leaf_paths(old))
    with Checkpointer(tmp_path) as saver:
        saver.save(1, old, {})
        saver.wait()
        found, _ = saver.restore(abstract)
    assert isinstance(found, TrainState)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert got.sharding == want.sharding
        if got.dtype == want.dtype == jax.random.key(0).dtype:
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        np.testing.assert_array_equal(got, want)


class Beside:
    """A state provider."""

    name = "beside"

    def __init__(self) -> None:
        self.taken: Any = None

    def arrays(self) -> Any:
        return jnp.arange(3)

    def facts(self) -> Any:
        return {"of": "it"}

    def restore(self, arrays: Any, facts: Any) -> None:
        self.taken = arrays, facts


def test_states_of_links_are_saved_beside_those_of_other_parts_of_a_program(tmp_path):
    state, abstract = states(RUN)
    provider = Beside()
    facts = state_providers.collect_facts([provider])
    with Checkpointer(tmp_path) as saver:
        saver.save(1, state_providers.with_provider_arrays(state, [provider]), facts)
        saver.wait()
        found, meta = saver.restore(state_providers.with_provider_arrays(abstract, [provider]))
        assert {path.split("/")[0] for path in saver.manifest().leaves} == {
            "params", "opt_state", "step", "rng", "spikes", "ema", "also",
        }  # fmt: skip
    back = state_providers.restore_providers(abstract, found, meta, [provider])
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back.extras), jax.device_get(state.extras))
    np.testing.assert_array_equal(provider.taken[0], np.arange(3))
    assert provider.taken[1] == {"of": "it"}


def judged(action: str, batches: list[tuple[float, int]], rate: Any, dtype: str = "float32") -> list[dict[str, float]]:
    """Metrics of steps with the spike detector, of batches (mean loss, target tokens), under gradient descent.

    The gradient of each of four parameters is one; a loss that is not finite makes it infinite.
    """
    config = dataclasses.replace(tiny.decoder(vocab_size=16, layers=1), dtype=dtype)
    links = mixed_precision(config, rate), spike_detection(SpikeConfig(action, window=4), rate)
    links = tuple(link for link in links if link is not None)

    def value_and_grad(params: Any, batch: Any, *numerics: Any) -> tuple[Any, ...]:
        mean, count = batch
        gradient = {"w": jnp.where(jnp.isfinite(mean), 1.0, jnp.inf) * jnp.ones(4)}
        return LossSums(mean * count, mean * count, jnp.zeros(()), count), gradient, *(n.seen for n in numerics)

    params = {"w": jnp.zeros(4)}
    optimizer = optax.chain(optax.scale_by_learning_rate(rate))
    extras = {name: init(params) for name, init in link_states(links).items()}
    state = TrainState(params, optimizer.init(params), jnp.int32(0), jax.random.key(0), extras)
    step = quick.jit(train_step(value_and_grad, optimizer, rate, links))
    found = []
    for mean, count in batches:
        state, metrics = step(state, (jnp.float32(mean), jnp.float32(count)))
        found.append({name: float(value) for name, value in metrics.items()})
    return found


def test_spikes_are_of_the_mean_loss():
    """Batches with uneven numbers of targets: equal means are no spike, and a higher mean of fewer targets is one."""
    flat = [(2.0, count) for count in (100, 90, 110, 100, 95, 100, 3000, 100)]
    found = judged("skip", [*flat, (4.0, 10), (2.0, 100)], optax.constant_schedule(0.1))
    assert [one["spike"] for one in found] == [0] * 8 + [1, 0]
    assert [one["spike_score"] for one in found[4:8]] == [0] * 4
    assert found[8]["loss"] == 4.0


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_reported_rate_is_the_rate_of_the_update(dtype):
    """Update over gradient, at every step, those after skipped spikes and float16 overflows too."""
    rate = optax.linear_schedule(1.0, 0.0, 64)
    batches = [(2.0, 10)] * 5 + [(math.inf, 10), (9.0, 10), (2.0, 10), (9.0, 10), (2.0, 10)]
    found = judged("skip", batches, rate, dtype)
    assert [one["skipped"] for one in found] == [0] * 5 + [1, 1, 0, 1, 0]
    assert [one["spike"] for one in found[5:]] == [dtype == "float32", 1, 0, 1, 0]
    updates = 0
    for one in found:
        assert one["learning_rate"] == pytest.approx(1 - updates / 64, rel=1e-6)
        if not one["skipped"]:
            assert one["update_norm"] / one["grad_norm"] == pytest.approx(one["learning_rate"], rel=1e-6)
            updates += 1


def test_a_skipped_step_leaves_everything():
    """The parameters' norm stays where a step is skipped, and nothing is added to them."""
    batches = [(2.0, 10)] * 5 + [(9.0, 10), (math.nan, 10), (2.0, 10)]
    found = judged("skip", batches, optax.constant_schedule(0.5))
    norms = [one["param_norm"] for one in found]
    assert [one["skipped"] for one in found] == [0] * 5 + [1, 1, 0]
    assert norms == [1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, 6.0]
    assert [one["update_norm"] for one in found] == [1] * 5 + [0, 0, 1]


def test_an_overflow_halves_the_loss_scale():
    found = judged(
        "skip", [(2.0, 10), (math.inf, 10), (math.inf, 10), (2.0, 10)], optax.constant_schedule(0.5), "float16"
    )
    first = found[0]["loss_scale"]
    assert [one["loss_scale"] / first for one in found] == [1, 1, 0.5, 0.25]
