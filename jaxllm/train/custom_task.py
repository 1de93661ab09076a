"""Training of any model by three functions: what a batch is, its loss, and what to predict.

    task = CustomTask(collate, loss, predict)
    params = train_task(task, params, examples, optax.adamw(1e-3), mesh="data=2,tensor=4", batch_size=8)
    answers = predict_task(task, params, examples, mesh="data=2,tensor=4", batch_size=8)

For models of other libraries, which declare no logical axes: parameters are split over ``tensor`` as ``sharding.infer``
finds, rows of a batch over ``data``, and XLA propagates both (after Redco, arXiv:2310.16355). What recipes have,
checkpoints, logs, accumulation, pipelines, is not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.config import ConfigError
from sharding import MeshSpec
from sharding.infer import infer_specs

DATA, TENSOR = "data", "tensor"


@dataclass(frozen=True)
class CustomTask:
    """A task, as three pure functions.

    Attributes:
        collate: examples -> batch: a tree of arrays with a row for each.
        loss: (params, batch) -> mean loss of the rows.
        predict: (params, batch) -> tree of arrays with a row for each.
    """

    collate: Callable[[Sequence[Any]], Any]
    loss: Callable[[Any, Any], Any]
    predict: Callable[[Any, Any], Any]


def train_task(
    task: CustomTask,
    params: Any,
    examples: Sequence[Any],
    optimizer: optax.GradientTransformation,
    *,
    mesh: str = "data=-1",
    batch_size: int = 8,
    epochs: int = 1,
    seed: int = 0,
    report: Callable[[int, float], None] | None = None,
) -> Any:
    """Trained parameters, on the mesh.

    Args:
        task: the task.
        params: its first parameters.
        examples: what to train on; each epoch has them in another order. A last batch that is not full is left out.
        optimizer: any of optax.
        mesh: axes ``data`` and ``tensor`` with their sizes; -1: all devices that are left. Fewer devices than there are
            may be asked for.
        batch_size: rows of a batch.
        epochs: times that each example is seen.
        seed: of the order.
        report: is called after each step with its number, from 1, and its loss.

    Raises:
        ConfigError: the mesh has other axes, or the batch does not divide over ``data``, or there are too few examples.
        ShardingError: the loss cannot be traced with these parameters and examples.
    """
    there = _mesh(mesh, batch_size)
    if len(examples) < batch_size:
        raise ConfigError(
            f"{len(examples)} examples do not fill a batch of batch_size = {batch_size}; give fewer rows."
        )
    shardings = _shardings(task.loss, params, task.collate(examples[:batch_size]), there)
    params = jax.tree.map(jax.device_put, params, shardings)
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
        loss, gradients = jax.value_and_grad(task.loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        params = jax.lax.with_sharding_constraint(optax.apply_updates(params, updates), shardings)
        return params, state, loss

    number = 0
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(examples))
        for begin in range(0, len(order) - batch_size + 1, batch_size):
            rows = [examples[place] for place in order[begin : begin + batch_size]]
            params, state, loss = step(params, state, _placed(task.collate(rows), there))
            number += 1
            if report is not None:
                report(number, float(loss))
    return params


def predict_task(
    task: CustomTask, params: Any, examples: Sequence[Any], *, mesh: str = "data=-1", batch_size: int = 8
) -> Any:
    """Predictions as host arrays, a row for each example, in their order.

    Raises:
        ConfigError, ShardingError: as for ``train_task``; there are no examples.
    """
    there = _mesh(mesh, batch_size)
    if not examples:
        raise ConfigError("there are no examples to predict; give one or more.")
    full = [*examples, *[examples[-1]] * (-len(examples) % batch_size)]  # the last batch is filled up
    shardings = _shardings(task.predict, params, task.collate(full[:batch_size]), there)
    params, run = jax.tree.map(jax.device_put, params, shardings), jax.jit(task.predict)
    found = [
        jax.device_get(run(params, _placed(task.collate(full[begin : begin + batch_size]), there)))
        for begin in range(0, len(full), batch_size)
    ]
    return jax.tree.map(lambda *parts: np.concatenate(parts)[: len(examples)], *found)


def _mesh(text: str, rows: int) -> Mesh:
    """Mesh whose shardings XLA propagates."""
    spec = MeshSpec.parse(text)
    needed = math.prod(size for _, size in spec.axes)  # negative: the rest of the devices is asked for
    built = spec.build(jax.devices()[:needed] if 0 < needed < jax.device_count() else None)
    if not set(built.axis_names) <= {DATA, TENSOR}:
        raise ConfigError(f"mesh {text!r}: a task of one's own has the axes {DATA} and {TENSOR}; name only these.")
    if rows % built.shape.get(DATA, 1):
        raise ConfigError(
            f"batch_size = {rows} does not divide over {DATA} = {built.shape[DATA]}; give a multiple of it."
        )
    return Mesh(built.devices, built.axis_names, axis_types=(AxisType.Auto,) * len(built.axis_names))


def _shardings(function: Callable[..., Any], params: Any, batch: Any, mesh: Mesh) -> Any:
    """Shardings of the parameters, by their use in a function of them and a batch."""
    size = mesh.shape.get(TENSOR, 1)
    if size == 1:
        return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), params)
    specs = infer_specs(function, params, jax.tree.map(np.asarray, batch), axis=TENSOR, size=size)
    return jax.tree.map(lambda x, spec: NamedSharding(mesh, spec), params, specs)


def _placed(batch: Any, mesh: Mesh) -> Any:
    """A batch on the devices, its rows over ``data``."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(DATA if DATA in mesh.axis_names else None)))
