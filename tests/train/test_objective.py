"""Objectives: token weights, a policy gradient on every path that takes one, own forward passes, and refusals."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.data import Batch, DataConfig
from jaxllm.models import Segments, functional
from jaxllm.optim import OptimConfig, ScheduleConfig, optimizer
from jaxllm.optim.build import layerwise_parts
from jaxllm.train import RunConfig, loss_sums, value_and_grad
from jaxllm.train.run import build_value_and_grad, fitting_mesh
from jaxllm.train.step.lomo import lomo_update
from jaxllm.train.step.loss import token_logprobs
from jaxllm.train.step.objective import (
    OBJECTIVES,
    CrossEntropyObjective,
    HeadObjective,
    LossSums,
    Objective,
    ObjectiveConfig,
    sharded_token_logprobs,
)
from jaxllm.train.step.objective_support import check_batch_fields
from jaxllm.train.step.train_state import TrainState
from sharding import abstract_params, shardings_of
from tests import quick, tiny

MODEL = tiny.decoder(vocab_size=16, embed_dim=8, heads=2, kv_heads=2, head_dim=4, mlp=8, layers=2, remat="full")
ROWS, LENGTH, CLIP = 8, 8, 0.2


@dataclass(frozen=True)
class ClippedPolicyObjective(HeadObjective):
    """Clipped policy gradient with an entropy bonus (arXiv:1707.06347, equations 7 and 9)."""

    required = ("advantages", "old_logprobs")
    metrics = ("entropy",)

    clip: float = CLIP
    bonus: float = 0.01

    def sums(self, model: Any, hidden: Any, head: Any, batch: Any) -> LossSums:
        logprobs, entropy = sharded_token_logprobs(hidden, head, batch.targets, model.config.logit_softcap)
        real = batch.targets >= 0
        ratio = jnp.exp(logprobs - batch.old_logprobs)
        gain = jnp.minimum(ratio * batch.advantages, jnp.clip(ratio, 1 - self.clip, 1 + self.clip) * batch.advantages)
        spread = jnp.sum(jnp.where(real, entropy, 0.0))
        loss = -jnp.sum(jnp.where(real, gain, 0.0)) - self.bonus * spread
        count = jnp.sum(real).astype(loss.dtype)
        return LossSums(loss, -jnp.sum(logprobs), jnp.zeros_like(loss), count, metrics={"entropy": spread})


@dataclass(frozen=True)
class ConsistencyObjective(Objective):
    """Cross-entropy plus the distance of two forward passes: of the rows, and of the rows in reverse order."""

    def __call__(self, model: Any, params: Any, batch: Any) -> LossSums:
        sums = CrossEntropyObjective()(model, params, batch)
        hidden, _ = model.forward(params, batch.tokens, batch.positions, Segments(batch.segment_ids))
        more = jnp.sum(jnp.where((batch.targets >= 0)[..., None], hidden, 0.0) ** 2)
        return sums._replace(loss=sums.loss + more)


def drawn(rng: np.random.Generator) -> Batch:
    """A batch with every optional value."""
    batch = tiny.batch(3, ROWS, LENGTH, 16, packed=True)
    old = -3 + 0.3 * rng.normal(size=batch.tokens.shape)
    return batch._replace(advantages=rng.normal(size=old.shape), old_logprobs=old)


def plain_loss(params: Any, batch: Batch) -> Any:
    """The policy objective's mean over targets, from all logits at once."""
    model = functional(MODEL)
    arrays = (jnp.asarray(x) for x in (batch.tokens, batch.positions))
    hidden, _ = model.forward(params, *arrays, Segments(jnp.asarray(batch.segment_ids)))
    logprobs = jax.nn.log_softmax(model.head(params, hidden))
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    own = jnp.take_along_axis(logprobs, jnp.maximum(batch.targets, 0)[..., None], -1)[..., 0]
    ratio = jnp.exp(own - batch.old_logprobs)
    gain = jnp.minimum(ratio * batch.advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * batch.advantages)
    return -jnp.sum((gain + 0.01 * entropy) * (batch.targets >= 0)) / (batch.targets >= 0).sum()


@pytest.fixture
def row(monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "clipped_policy", ClippedPolicyObjective)
    monkeypatch.setitem(OBJECTIVES, "consistency", ConsistencyObjective)


def run_config(mesh: str = "dp", name: str = "clipped_policy", **fields: Any) -> RunConfig:
    shared: dict[str, Any] = {
        "model": MODEL,
        "mesh": mesh,
        "data": DataConfig(batch_size=ROWS, seq_len=LENGTH),
        "objective": ObjectiveConfig(name),
    }
    return RunConfig(**(shared | fields))


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(
    ("mesh", "accumulate"),
    [("data=2,fsdp=2,tensor=2", 2), ("stage=2,fsdp=2,tensor=2", 2), ("fsdp=2,tensor=2,context=2", 1)],
)
def test_a_policy_gradient_on_meshes_and_in_a_pipeline(mesh, accumulate, rng, float64, row):
    params, batch = quick.params(MODEL), drawn(rng)
    want, want_grads = jax.jit(jax.value_and_grad(plain_loss))(params, batch)
    config = run_config(mesh, accumulate=accumulate)
    model = functional(MODEL, config.parallel.rules())
    built = fitting_mesh(config, model, 8).build()
    with jax.set_mesh(built):
        there = shardings_of(abstract_params(model.abstract(), model.logical_axes(), built, model.rules))
        rows = jax.NamedSharding(built, model.rules.spec(("batch", "seq"), built))
        run = jax.jit(build_value_and_grad(config, model, built))
        sums, grads = run(jax.tree.map(jax.device_put, params, there), jax.device_put(batch, rows))
    assert float(sums.means()["loss"]) == pytest.approx(float(want), rel=1e-12)
    assert 0 < float(sums.means()["entropy"]) < np.log(16)
    assert tiny.leaf_error(jax.device_get(grads), want_grads) < 1e-10


@pytest.mark.drawn(3)
def test_token_weights(float64, rng):
    """Weights multiply losses; the mean stays one over target tokens. Weights of one change nothing."""
    params, batch = quick.params(MODEL), tiny.batch(3, ROWS, LENGTH, 16, packed=True)
    model = functional(MODEL)
    weights = rng.uniform(size=batch.tokens.shape)
    run = quick.jit(value_and_grad(model, accumulate=2))
    sums, grads = run(params, batch._replace(weights=weights))
    logprobs, _ = quick.jit(lambda p, b: token_logprobs(model, p, b, accumulate=2))(params, batch)
    assert float(sums.nll) == pytest.approx(-float(np.sum(weights * np.asarray(logprobs))), rel=1e-12)
    assert float(sums.count) == (batch.targets >= 0).sum()
    ones, plain = run(params, batch._replace(weights=np.ones_like(weights))), run(params, batch)
    assert tiny.leaf_error(ones[1], plain[1]) < 1e-13 < tiny.leaf_error(grads, plain[1])


@pytest.mark.drawn(3)
def test_an_objective_may_run_its_own_forward_passes(float64):
    params, batch = quick.params(MODEL), tiny.batch(3, ROWS, LENGTH, 16, packed=True)
    model, objective = functional(MODEL), ConsistencyObjective()
    one, two = (quick.jit(value_and_grad(model, objective=objective, accumulate=n))(params, batch) for n in (1, 2))
    assert tiny.leaf_error(two[1], one[1]) < 1e-12
    assert float(one[0].loss) > float(quick.jit(lambda p, b: loss_sums(model, p, b))(params, batch).loss)
    with pytest.raises(ValueError, match=r"z_loss = 0\.1 is that of the cross-entropy"):
        loss_sums(model, params, batch, objective=objective, z_loss=0.1)


def test_what_cannot_be_is_refused_by_name(rng, row):
    def refusal(config: RunConfig) -> str:
        with pytest.raises(ConfigError) as caught:
            fitting_mesh(config, functional(config.model), 8)
        return str(caught.value)

    rate = ScheduleConfig("constant")
    lomo = OptimConfig(rate, kind="lomo", clip_norm=None)
    model = dataclasses.replace(MODEL, dtype="float32", param_dtype="float32")
    own = "the objective would have to run layer by layer"
    assert own in refusal(run_config(name="consistency", optim=lomo, model=model))
    assert "a device of a pipeline sees only" in refusal(run_config("stage=2,data=4", "consistency", accumulate=2))
    sophia = run_config(optim=OptimConfig(rate, kind="sophia"), model=model)
    assert "estimates the Hessian of next-token cross-entropy" in refusal(sophia)
    assert "reads no reference_logprobs: leave reference empty" in refusal(run_config(reference="start"))
    assert "clipped_policy, consistency. Did you mean 'clipped_policy'?" in refusal(run_config(name="clipped_polcy"))

    batch = drawn(rng)
    check_batch_fields(run_config(), batch)
    with pytest.raises(ConfigError, match="reads advantages, which the data source's batches do not have"):
        check_batch_fields(run_config(), batch._replace(advantages=None))
    with pytest.raises(ConfigError, match=r"batches have advantages, which .*cross_entropy.* does not read"):
        check_batch_fields(run_config(name="cross_entropy"), batch)
    with pytest.raises(ConfigError, match=r"tokens of shape \[4, 8\]; the run's settings say \[8, 8\]"):
        check_batch_fields(run_config(), Batch(*(x if x is None else x[:4] for x in batch)))


@pytest.mark.drawn(3)
def test_a_layerwise_optimizer_takes_a_policy_gradient(rng, float64):
    """LOMO is gradient descent: its update is the learning rate times the gradients of the plain step."""
    objective, batch, model = ClippedPolicyObjective(), drawn(rng), functional(MODEL)
    params = jax.tree.map(jnp.asarray, quick.params(MODEL))
    optim = OptimConfig(ScheduleConfig("constant", peak=0.5, warmup=0.0), kind="lomo", clip_norm=None, weight_decay=0.0)
    state = TrainState(params, optimizer(optim, 4, model.logical_axes()).init(params), jnp.int32(0), jax.random.key(0))
    update = lomo_update(model, layerwise_parts(optim, 4, model.logical_axes()), objective=objective)
    result = quick.jit(update)(state, batch)
    sums, grads = quick.jit(value_and_grad(model, objective=objective))(params, batch)
    assert float(result.sums.loss) == pytest.approx(float(sums.loss), rel=1e-12)
    assert tiny.leaf_error(result.params, jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)) < 1e-12
