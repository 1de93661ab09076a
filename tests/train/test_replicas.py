"""Replicas over a mesh axis: each trains by itself, and outer steps bring them together every H steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpointer
from jaxllm.compiler.replica_groups import Placement
from jaxllm.models import DecoderConfig, Functional, functional
from jaxllm.optim import OptimConfig, ScheduleConfig, optimizer, schedule
from jaxllm.train import abstract_state, init_state, train_step, value_and_grad
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.outer.outer_step import averaging_step
from jaxllm.train.outer.replicas import (
    REPLICA,
    REPLICA_PARAMS,
    copy_to_replicas,
    over_replicas,
    replica_means,
    replica_states,
    with_outer_step,
)
from jaxllm.train.step.param_average import EmaConfig, parameter_average
from jaxllm.train.step.step_chain import Step, link_states
from jaxllm.train.step.train_state import TrainState
from jaxllm.train.step.training_step import jit_step
from sharding import MeshSpec, ShardingError, shardings_of
from tests import environment, quick, tiny
from tests.train.replica_traffic import traffic_between

STEPS, EVERY, REPLICAS, ROWS = 5, 2, 2, 8
CONFIG, CONFIG32 = (tiny.decoder(kv_heads=4, dtype=dtype) for dtype in ("float64", "float32"))
OPTIM = OptimConfig(ScheduleConfig("cosine", peak=3e-2, warmup=0.3), eps=1e-3)
LINK = parameter_average(EmaConfig(0.5))
assert LINK is not None
LINKS = [LINK]
AVERAGE = OuterConfig("diloco", EVERY, rate=1.0, momentum=0.0)


def batch_at(step: int) -> Any:
    return tiny.batch(step, ROWS, 8, CONFIG.vocab_size, packed=True)


class Made(NamedTuple):
    """Step of all replicas on a mesh, with shapes and shardings of one replica's state and of all."""

    mesh: Any
    model: Functional
    transform: Any
    one: TrainState
    abstract: TrainState
    step: Step


def step_of(mesh: str, config: DecoderConfig, *, averages: bool) -> Made:
    model, there = functional(config), MeshSpec.parse(mesh).build()
    transform = optimizer(OPTIM, STEPS, model.logical_axes())
    one = abstract_state(model, transform, there, extras=link_states(LINKS))
    step = over_replicas(train_step(value_and_grad(model), transform, schedule(OPTIM.schedule, STEPS), LINKS))
    if averages:
        step = with_outer_step(step, EVERY, averaging_step(AVERAGE))
    return Made(there, model, transform, one, replica_states(one), step)


def trained(mesh: str, *, averages: bool) -> tuple[Made, TrainState, list[dict[str, Any]]]:
    """States and metrics of a run of replicas."""
    made = step_of(mesh, CONFIG, averages=averages)
    run = quick.jit(made.step, donate_argnums=0, out_shardings=(shardings_of(made.abstract), None))
    seen = []
    with jax.set_mesh(made.mesh):
        start = jax.device_put(quick.params(CONFIG), shardings_of(made.one.params))
        first = init_state(made.model, made.transform, made.mesh, 0, made.one, start, link_states(LINKS))
        state = copy_to_replicas(first, made.abstract)
        there = jax.NamedSharding(made.mesh, made.model.rules.spec(("batch", "seq"), made.mesh))
        for number in range(STEPS):
            state, metrics = run(state, jax.device_put(batch_at(number), there))
            seen.append(replica_means(metrics))
    return made, state, seen


def reference(*, averages: bool) -> tuple[list[list[float]], list[Any], list[Any]]:
    """Losses by step and replica, parameters and their averages by replica: of separate runs on one device."""
    model = functional(CONFIG)
    transform = optimizer(OPTIM, STEPS, model.logical_axes())
    step = quick.jit(train_step(value_and_grad(model), transform, schedule(OPTIM.schedule, STEPS)))
    mesh = MeshSpec.parse("dp").build(jax.devices()[:1])
    abstract = abstract_state(model, transform, mesh)
    params = jax.tree.map(jnp.asarray, quick.params(CONFIG))
    first = init_state(model, transform, mesh, 0, abstract, params)
    states = [jax.tree.map(jnp.asarray, jax.device_get(first))] * REPLICAS  # off the mesh
    kept = [jax.device_get(params) for _ in range(REPLICAS)]
    losses = []
    for number in range(STEPS):
        parts = [jax.tree.map(lambda x, r=r: np.split(x, REPLICAS)[r], batch_at(number)) for r in range(REPLICAS)]
        done = [step(state, part) for state, part in zip(states, parts, strict=True)]
        states = [state for state, _ in done]
        losses.append([float(metrics["loss"]) for _, metrics in done])
        decay = min(0.5, (2 + number) / (11 + number))
        kept = [
            jax.tree.map(lambda e, p, d=decay: d * e + (1 - d) * np.asarray(p), e, s.params)
            for e, s in zip(kept, states, strict=True)
        ]
        if averages and (number + 1) % EVERY == 0:
            mean = jax.tree.map(lambda *p: jnp.mean(jnp.stack(p), axis=0), *(state.params for state in states))
            states = [replace(state, params=mean) for state in states]
    return losses, [jax.device_get(state.params) for state in states], kept


def replica_error(averages: bool) -> tuple[float, Made, TrainState]:
    """Error of replicas against separate runs; with the step and the state in the end.

    The last step is no outer step, so the replicas have gone apart again in both cases.
    """
    made, state, seen = trained("replica=2,fsdp=2,tensor=2", averages=averages)
    losses, params, kept = reference(averages=averages)
    found = jax.device_get((state.extras[REPLICA_PARAMS], state.extras["ema"]))
    worst = 0.0
    for r in range(REPLICAS):
        mine = jax.tree.map(lambda x, r=r: x[r], found)
        worst = max(worst, tiny.leaf_error(mine[0], params[r]), tiny.leaf_error(mine[1], kept[r]))
    assert tiny.leaf_error(params[0], params[1]) > 1e-4
    means = np.mean(losses, axis=1)
    worst = max(worst, float(np.abs(np.array([metrics["loss"] for metrics in seen]) / means - 1).max()))
    assert [int(m["tokens"]) for m in seen] == [(batch_at(n).targets >= 0).sum() for n in range(STEPS)]
    return worst, made, state


@pytest.mark.drawn(0.3)
def test_replicas_are_separate_runs_whose_parameters_are_averaged(float64, tmp_path):
    """And saved, and restored. Never averaged: `make proof seams ONLY=replicas_are_separate_runs`."""
    worst, made, state = replica_error(averages=True)
    assert worst < 1e-10
    with Checkpointer(tmp_path) as saver:
        saver.save(STEPS, state, {})
        saver.wait()
        back, _ = saver.restore(made.abstract)
    pairs = zip(jax.tree.leaves(back.params), jax.tree.leaves(state.params), strict=True)
    assert all(np.array_equal(a, b) and a.sharding == b.sharding for a, b in pairs)


def check_traffic(averages: bool) -> None:
    """Over ``replica`` go the parameters where the outer step averages them, once a round, and nothing else."""
    made = step_of("replica=2,fsdp=4", CONFIG32, averages=averages)
    spec = made.model.rules.spec(("batch", "seq"), made.mesh)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(made.mesh, spec)), batch_at(0)
    )
    with jax.set_mesh(made.mesh):
        text = jit_step(made.step, made.abstract).lower(made.abstract, batch).compile(environment.AS_EVER).as_text()
    local, inside, outer = traffic_between(text, Placement.of(made.mesh), REPLICA)
    params = sum(4 * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(made.one.params))
    assert local > 4 * params, "gradients are summed inside a replica"
    assert (inside, outer) == (0, params if averages else 0)


@pytest.mark.drawn(0.3)
def test_nothing_goes_between_replicas_inside_a_round():
    """With an outer step; without one: `make proof seams ONLY=traffic_of_replicas`."""
    check_traffic(averages=True)


def test_what_has_no_replicas_is_refused():
    model = functional(tiny.decoder(dtype="float32"))
    transform = optimizer(OPTIM, STEPS, model.logical_axes())
    abstract = abstract_state(model, transform, MeshSpec.parse("fsdp=2,tensor=4").abstract())
    mesh = MeshSpec.parse("replica=2").abstract()
    with pytest.raises(ShardingError, match="no axis 'replica'; it has fsdp, tensor"):
        replica_states(abstract)
    split = replace(
        abstract, params=jax.ShapeDtypeStruct((2,), "float32", sharding=jax.NamedSharding(mesh, jax.P("replica")))
    )
    with pytest.raises(ShardingError, match="split over the mesh axis 'replica'"):
        replica_states(split)
    with pytest.raises(ValueError, match="every = 0"):
        with_outer_step(lambda state, batch: (state, {}), 0, lambda state: state)
