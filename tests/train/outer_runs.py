"""Steps of tiny runs with outer steps, by the configuration that a user writes."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxllm.compiler.replica_groups import Placement
from jaxllm.data import DataConfig
from jaxllm.models import DecoderConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.train import RunConfig
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.outer.replicas import REPLICA, replica_means
from jaxllm.train.run import build_value_and_grad, fitting_mesh
from jaxllm.train.run_model import run_model
from jaxllm.train.step.step_builder import build_optimizer, build_step, init_run_state, run_state
from jaxllm.train.step.train_state import TrainState
from jaxllm.train.step.training_step import jit_step
from sharding import MeshSpec, shardings_of
from tests import environment, quick, tiny
from tests.train.replica_traffic import traffic_between

CONFIG = tiny.decoder(kv_heads=4, layers=1)
ADAMW = OptimConfig(ScheduleConfig("constant", peak=1e-2), eps=1e-3)
LINEAR = OptimConfig(ScheduleConfig("cosine", peak=0.3, warmup=0.3), kind="sgd", clip_norm=None)
"""The update of momentum SGD with weight decay is linear in gradients and parameters: its mean is that of the mean."""
ROWS, LENGTH = 8, 8


class Trained(NamedTuple):
    """State after a run's steps, and the metrics of each."""

    state: TrainState
    metrics: list[dict[str, Any]]


def batch_at(step: int) -> Any:
    """Random batch in which every row has equally many targets."""
    batch = tiny.batch(step, ROWS, LENGTH, CONFIG.vocab_size, packed=True)
    return batch._replace(targets=np.abs(batch.targets))


def run_of(mesh: str, outer: OuterConfig, optim: OptimConfig = ADAMW, steps: int = 6, **fields: Any) -> RunConfig:
    """Configuration of a run of a tiny model."""
    data = DataConfig(batch_size=ROWS, seq_len=LENGTH)
    model = fields.pop("model", CONFIG)
    return RunConfig(model=model, data=data, optim=optim, steps=steps, mesh=mesh, outer=outer, **fields)


def parts_of(run: RunConfig) -> tuple[Any, Any, Any, TrainState, Any]:
    """Model, optimizer, mesh, abstract state and step of a run, over as many devices as its mesh names."""
    model = run_model(run)
    devices = int(np.prod([size for _, size in MeshSpec.parse(run.mesh).axes]))
    mesh = fitting_mesh(run, model, devices, "cpu").build(jax.devices()[:devices])
    transform = build_optimizer(run, model)
    abstract = run_state(run, model, transform, mesh)
    return model, transform, mesh, abstract, build_step(run, model, build_value_and_grad(run, model, mesh), transform)


def trained(run: RunConfig, steps: int | None = None) -> Trained:
    """Trains a run on ``batch_at`` from the parameters of ``quick.params``."""
    model, transform, mesh, abstract, step = parts_of(run)
    jitted = quick.jit(step, donate_argnums=0, out_shardings=(shardings_of(abstract), None))
    seen = []
    with jax.set_mesh(mesh):
        params = jax.device_put(quick.params(run.model), shardings_of(abstract.params))
        state = init_run_state(run, model, transform, mesh, abstract, params)
        there = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh))
        for number in range(run.steps if steps is None else steps):
            state, metrics = jitted(state, jax.device_put(batch_at(number), there))
            seen.append(metrics if run.outer.kind == "none" else replica_means(metrics))
    return Trained(state, [jax.device_get(one) for one in seen])


def parallel_error(
    outer: OuterConfig, rest: str = "fsdp=2,tensor=2", steps: int = 4, model: DecoderConfig = CONFIG
) -> float:
    """Error of replicas with an outer step after every step, against data parallelism; losses and parameters."""
    apart = trained(run_of(f"replica=2,{rest}", outer, LINEAR, steps, model=model))
    sizes = dict(MeshSpec.parse(rest).axes)
    sizes["data"] = 2 * sizes.get("data", 1)
    mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    together = trained(run_of(mesh, OuterConfig(), LINEAR, steps, model=model))
    losses = [np.array([float(one["loss"]) for one in run.metrics]) for run in (apart, together)]
    start = quick.params(model)
    assert tiny.leaf_error(jax.device_get(together.state.params), start) > 1e-2, "the parameters have moved"
    return max(
        tiny.leaf_error(jax.device_get(apart.state.params), jax.device_get(together.state.params)),
        float(np.abs(losses[0] / losses[1] - 1).max()),
    )


def compiled_traffic(run: RunConfig, axis: str = REPLICA) -> tuple[int, int, int]:
    """Bytes of the compiled step's collectives not over an axis, over it, and over it in conditionals (outer steps)."""
    model, _, mesh, abstract, step = parts_of(run)
    spec = model.rules.spec(("batch", "seq"), mesh)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec)), batch_at(0)
    )
    with jax.set_mesh(mesh):
        text = jit_step(step, abstract).lower(abstract, batch).compile(environment.AS_EVER).as_text()
    return traffic_between(text, Placement.of(mesh), axis)


def float32(run: RunConfig) -> RunConfig:
    """The run in float32."""
    return dataclasses.replace(run, model=dataclasses.replace(run.model, dtype="float32", param_dtype="float32"))
