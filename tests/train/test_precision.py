"""Precisions: their bytes by formula, and skipped steps."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.config import ConfigError
from jaxllm.data import DataConfig
from jaxllm.models import functional
from jaxllm.optim import optimizer
from jaxllm.train import RunConfig, train, train_step, value_and_grad
from jaxllm.train.combinations import check_combinations
from jaxllm.train.precision import PRECISIONS, Precision, precision_cost, tree_bytes, with_precision
from jaxllm.train.run import build_value_and_grad
from jaxllm.train.step.numerics import FIRST_SCALE, GROWTH_EVERY, LossScale, init_numerics
from jaxllm.train.step.step_builder import run_state, step_links
from jaxllm.train.step.train_state import TrainState
from sharding import MeshSpec
from tests import quick, tiny
from tests.models.jaxprs import equations
from tests.train.runs import losses, run_config, signal_at

pytestmark = pytest.mark.usefixtures("shared_programs")

LENGTH = 32
RUN = RunConfig(
    model=tiny.decoder(dtype="float32", vocab_size=48, layers=3, tied=False, remat="none"),
    data=DataConfig(seq_len=LENGTH, batch_size=2),
)


def batch(rows: int = 2) -> Any:
    return jax.tree.map(jnp.asarray, tiny.batch(0, rows, LENGTH, RUN.model.vocab_size, packed=False))


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("name", PRECISIONS)
def test_bytes_are_those_of_the_state(name):
    run = with_precision(RUN, name)
    model = functional(run.model)
    mesh = MeshSpec.parse("data=1").build(jax.devices()[:1])
    state = run_state(run, model, optimizer(run.optim, run.steps, model.logical_axes()), mesh)
    said, count = precision_cost(run), sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert tree_bytes(state.params) == said.parameters * count
    assert tree_bytes([x for x in jax.tree.leaves(state.opt_state) if x.ndim]) == said.optimizer * count
    assert tree_bytes(state.extras) == said.numerics
    _, grads, *_ = jax.eval_shape(value_and_grad(model), *_given(run, state.params))
    assert tree_bytes(grads) == said.gradients * count
    table = {"float32": 16, "bf16": 16, "fp16": 16, "bf16_collage": 12, "bf16_stochastic": 8}
    assert said.parameters + said.optimizer + said.gradients == table.get(name, 16)


def _given(run: RunConfig, params: Any) -> tuple[Any, ...]:
    kept = init_numerics(run.model)
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    return (plain, batch()) if kept is None else (plain, batch(), kept)


@pytest.mark.parametrize("name", ["fp16", "int8", "fp8_delayed", "fp8_block"])
def test_flops_are_those_of_the_program(name):
    """Every matmul of the traced step, by its operand dtypes. Attention is traced as whole blocks of scores."""
    run = with_precision(RUN, name)
    program = jax.make_jaxpr(value_and_grad(functional(run.model)))(*_given(run, functional(run.model).abstract()))
    found: Counter[str] = Counter()
    for equation in equations(program.jaxpr):
        if equation.primitive.name == "dot_general":
            (over, _), _ = equation.params["dimension_numbers"]
            left, right = (v.aval for v in equation.invars)
            kinds = sorted({left.dtype.name, right.dtype.name})
            repeats = RUN.model.layers if _within_layers(left, right) else 1
            found["*".join(kinds)] += (
                repeats * 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left.shape[i] for i in over)
            )
    said = precision_cost(run).flops
    eight = {kind: flops for kind, flops in said.items() if "8" in kind.replace("bfloat16", "")}
    assert set(eight) == {kind for kind in found if "8" in kind.replace("bfloat16", "")}
    for kind, flops in eight.items():
        assert found[kind] == 2 * LENGTH * flops


def _within_layers(left: Any, right: Any) -> bool:
    """A block's weights have none of the vocabulary."""
    return RUN.model.vocab_size not in (*left.shape, *right.shape)


@pytest.mark.drawn(0.3)
def test_a_step_that_overflows_is_skipped_and_recorded():
    run = with_precision(RUN, "fp16")
    model, rule = functional(run.model), optax.sgd(0.1)
    params = jax.tree.map(jnp.asarray, quick.params(run.model, scale=0.1))
    step = quick.jit(train_step(value_and_grad(model), rule, lambda _: jnp.float32(0.1), step_links(run)))
    kept = init_numerics(run.model)
    assert kept is not None
    large = kept._replace(loss_scale=LossScale(jnp.float32(2.0**24), jnp.int32(7)))
    state = TrainState(params, rule.init(params), jnp.int32(0), jax.random.key(0), {"numerics": large})
    after, metrics = step(state, batch())
    assert (float(metrics["skipped"]), float(metrics["loss_scale"])) == (1, 2.0**24)
    assert float(metrics["grad_norm"]) == float(metrics["update_norm"]) == 0
    assert jax.tree.all(jax.tree.map(np.array_equal, after.params, params))
    halved = after.extras["numerics"].loss_scale
    assert (float(halved.scale), int(halved.steps)) == (2.0**23, 0)
    fine, metrics = step(dataclasses.replace(state, extras={"numerics": kept}), batch())
    assert (float(metrics["skipped"]), float(metrics["loss_scale"])) == (0, FIRST_SCALE)
    assert not jax.tree.all(jax.tree.map(np.array_equal, fine.params, params))
    # Gradients are scaled back: their norm is that of float32 but for rounding.
    single = functional(RUN.model)
    _, grads = quick.jit(value_and_grad(single))(params, batch())
    assert abs(float(metrics["grad_norm"]) / float(optax.tree.norm(grads)) - 1) < 5e-3
    # At the least scale nothing is skipped: the run's own check stops it.
    small = large._replace(loss_scale=LossScale(jnp.float32(1.0), jnp.int32(0)))
    assert not small.should_skip(jnp.asarray(False))


def test_the_scale_grows_after_as_many_steps_without_overflow():
    scale = LossScale(jnp.float32(8), jnp.int32(GROWTH_EVERY - 2))
    scale = scale.updated(jnp.asarray(True))
    assert (float(scale.scale), int(scale.steps)) == (8, GROWTH_EVERY - 1)
    scale = scale.updated(jnp.asarray(True))
    assert (float(scale.scale), int(scale.steps)) == (16, 0)


@pytest.mark.drawn(0.3)
def test_delayed_scaling_remembers_every_product_of_every_layer_whatever_accumulate_is():
    run = with_precision(RUN, "fp8_delayed")
    model = functional(dataclasses.replace(run.model, dtype="float32"))
    params, kept = jax.tree.map(jnp.asarray, quick.params(run.model, scale=0.1)), init_numerics(run.model)
    seen = [quick.jit(value_and_grad(model, accumulate=n))(params, batch(4), kept)[2]["0"]["0"] for n in (1, 2)]
    layers, products = RUN.model.layers, 7  # q, k, v, o, gate, up, down
    assert seen[0].shape[:3] == (layers, products, 3)
    assert np.all(np.asarray(seen[0][..., 0]) > 0)
    np.testing.assert_allclose(seen[0][:, :, 1, 0], seen[1][:, :, 1, 0], rtol=1e-6)  # of weights: the same
    # Of micro-batches the largest; gradients are of a mean over the whole batch in both, activations are the same.
    np.testing.assert_allclose(seen[0], seen[1], rtol=0.2)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("name", ["fp16", "fp8_delayed", "bf16_stochastic"])
def test_a_stopped_run_goes_on_bit_for_bit(name, tmp_path):
    """The state of numbers, and the seed of rounding, are in checkpoints."""
    whole, parts = (
        dataclasses.replace(with_precision(run_config(tmp_path), name), name=at) for at in ("whole", "parts")
    )
    directory = train(whole).directory
    with pytest.MonkeyPatch.context() as patch:
        signal_at(patch, 7)
        assert train(parts).steps == 8
    resumed = train(parts).directory
    assert losses(resumed) == losses(directory)
    if name == "fp16":
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        assert {row["loss_scale"] for row in rows if "loss_scale" in row} == {FIRST_SCALE}
        assert {row["skipped"] for row in rows if "skipped" in row} == {0.0}


def test_a_name_sets_all_axes_and_is_read_back():
    for name, precision in PRECISIONS.items():
        assert Precision.of(with_precision(RUN, name)) == precision
    with pytest.raises(ConfigError, match="none of these: float32, bf16"):
        with_precision(RUN, "fp4")


def test_refusals():
    rounded = dataclasses.replace(RUN, optim=dataclasses.replace(RUN.optim, rounding="stochastic"))
    with pytest.raises(ConfigError, match="requires parameters stored in bfloat16"):
        check_combinations(rounded, {})
    run = with_precision(RUN, "fp16")
    mesh = MeshSpec.parse("stage=2").build(jax.devices()[:2])
    with pytest.raises(
        ConfigError, match='dtype = "float16": loss scaling keeps state between steps, which pipelines do not'
    ):
        build_value_and_grad(run, functional(run.model), mesh)
