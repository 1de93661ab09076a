"""Operator benchmark: measures operators of a step on the devices that are here, all processes at the same time.

Each process runs passes and updates on its first device while the others do the same, so that shared processors and
memory are as busy as in a step. Collectives run over all devices, in as many groups as there are.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import mean, median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.data import Batch
from jaxllm.models import functional
from jaxllm.parallel.distributed import ProcessGroup
from jaxllm.parallel.pipeline.pipeline_step import Pipeline, PipelineStep
from jaxllm.parallel.pipeline.schedule import Kind, PipelineOp, Schedule
from jaxllm.parallel.pipeline.stage_layout import STAGE, assign_units
from jaxllm.plan.profile.operator_profile import OperatorProfile, ProfileDevices
from jaxllm.plan.profile.operators import (
    REPEATS,
    CollectiveOperator,
    GradientSum,
    ModelPass,
    Operator,
    ParameterUpdate,
    PipelineTick,
)
from jaxllm.train import RunConfig
from jaxllm.train.objectives.objective_base import CrossEntropyObjective, LossSums
from jaxllm.train.step.step_builder import build_optimizer, build_step
from jaxllm.train.step.train_state import TrainState

TURNS = 8
"""Collectives one after the other in a program."""
MICRO_BATCHES = 8
"""Micro-batches that go through the measured stage of a pipeline."""
LEAST, MOST = 5, 50
"""Runs of an operator in a round: as many as ``SPAN`` seconds hold, within these."""
SPAN = 0.2
"""Seconds of runs in a round, at least."""
ROUNDS = 3
"""Rounds of an operator of a profile."""

Runner = Callable[[], float]
"""Runs an operator once and returns its seconds."""


def devices_here(group: ProcessGroup) -> ProfileDevices:
    """Devices of all processes; processors by the cores that the operating system allows each process."""
    own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cores = own[0] if len(own) == 1 and jax.default_backend() == "cpu" else -1
    said = group.gather("cores of operators", json.dumps([cores] * jax.local_device_count()))
    said = json.loads(group.broadcast("cores of all", json.dumps(said) if group.is_leader else ""))
    found = tuple(core for text in said for core in json.loads(text))
    device = jax.devices()[0]
    return ProfileDevices(device.platform, device.device_kind, jax.__version__, found)


def prepared(operator: Operator) -> Runner:
    """Compiles an operator and makes its inputs; the first run is slower than others."""
    if isinstance(operator, CollectiveOperator):
        return _timed(*_collective(operator), TURNS)
    if isinstance(operator, ModelPass):
        return _timed(*_model_pass(operator), REPEATS if operator.of_layers else 1)
    if isinstance(operator, PipelineTick):
        return _timed(*_pipeline_ticks(operator), MICRO_BATCHES * (3 if operator.split else 2))
    if isinstance(operator, GradientSum):
        one, other = (jnp.ones(operator.elements, operator.dtype) for _ in range(2))
        return _timed(jax.jit(jnp.add), (one, other), 1)
    return _update(operator)


def measured(runners: Sequence[Runner], group: ProcessGroup, rounds: int = 1) -> list[float]:
    """Seconds of operators: the median over rounds of the mean of a round's runs, and the mean of all processes.

    Not the median of single runs: processes on one processor take turns of milliseconds, so that most runs of a short
    operator are not interrupted, and others wait for several.

    Args:
        runners: the operators.
        group: processes, which all call it with the same operators.
        rounds: turns of all operators one after the other.
    """
    means_of: list[list[float]] = [[] for _ in runners]
    for _ in range(rounds):
        for runner, times in zip(runners, means_of, strict=True):
            group.barrier("operator")  # compiled in all processes: collectives wait for each other half a minute
            runner()
            took = runner()
            count = str(min(MOST, max(LEAST, math.ceil(SPAN / max(took, 1e-9)))))
            runs_now = int(group.broadcast("runs of an operator", count))
            times.append(mean(runner() for _ in range(runs_now)))
    own = json.dumps([median(times) for times in means_of])
    said = [json.loads(text) for text in group.gather("operators", own)]
    means = json.dumps(np.mean(said, 0).tolist()) if group.is_leader else ""
    return json.loads(group.broadcast("times of operators", means))


def measure_profile(
    profile: OperatorProfile,
    operators: Iterable[Operator],
    group: ProcessGroup,
    tell: Callable[[str], None] = lambda _: None,
    keep: Callable[[OperatorProfile], None] = lambda _: None,
) -> OperatorProfile:
    """Profile with the times of operators that it has none of.

    Args:
        profile: what is there; its devices are those here.
        operators: which a step needs; collectives are measured on the rungs of their ladder.
        group: processes, which all call it with the same arguments.
        tell: takes a line before each operator.
        keep: called with the profile after each.
    """
    missing = profile.missing(operators)
    for number, operator in enumerate(missing, 1):
        tell(f"{number} of {len(missing)}: {operator.key}")
        (seconds,) = measured([prepared(operator)], group, ROUNDS)
        profile = profile.with_times({operator.key: seconds}, datetime.date.today().isoformat())
        keep(profile)
    return profile


def _timed(function: Callable[..., Any], arguments: tuple[Any, ...], turns: int) -> Runner:
    """Runner of a jitted function, which runs the operator ``turns`` times."""
    compiled = function.lower(*arguments).compile()  # type: ignore[attr-defined]

    def run() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        return (time.perf_counter() - begin) / turns

    return run


def _model_pass(one: ModelPass) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    model = functional(one.model)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = jnp.zeros((one.rows, one.seq_len), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(one.seq_len, dtype=jnp.int32), tokens.shape)
    ids = jnp.ones_like(tokens)
    shape = (one.rows, one.seq_len, one.model.embed_dim)
    x = jax.random.normal(jax.random.key(1), shape).astype(one.model.dtype)
    arrays: list[Any] = [tokens, tokens, ids, positions]
    batch: Any = Batch(*arrays)
    head = CrossEntropyObjective(one.z_loss)
    context = model.training_context(ids, "contiguous")

    def embed(params: Any) -> Any:
        return model.embed(params, tokens, positions)

    def loss(params: Any, x: Any) -> Any:
        return head.from_hidden(model, params, x, batch).loss

    def layers(params: Any, x: Any) -> Any:
        return model.blocks(params, x, positions, context)[0]

    if one.kind == "embedding":
        return jax.jit(embed), (params,)
    if one.kind == "embedding gradients":
        return jax.jit(lambda params, dx: jax.vjp(embed, params)[1](dx)), (params, x)
    if one.kind == "loss":
        return jax.jit(jax.value_and_grad(loss, (0, 1))), (params, x)
    forward = jax.jit(lambda params, x: jax.vjp(layers, params, x))
    if one.kind == "forward":
        return forward, (params, x)
    if one.kind == "backward":
        _, pull = forward(params, x)
        return jax.jit(lambda pull, dy: pull(dy)), (pull, x)
    _, pull = jax.jit(lambda params, x: jax.vjp(functools.partial(layers, params), x))(params, x)
    return jax.jit(lambda pull, dy: pull(dy)), (pull, x)


def _pipeline_ticks(one: PipelineTick) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Step of a pipeline of one stage, by its executor, with inputs."""
    model = functional(one.model)
    kinds: tuple[Kind, ...] = ("F", "B", "W") if one.split else ("F", "B")
    order = tuple(PipelineOp(kind, micro, 0) for micro in range(MICRO_BATCHES) for kind in kinds)
    schedule = Schedule("one stage", 1, MICRO_BATCHES, 1, one.split, False, (order,))
    depths = assign_units([repeats for _, repeats in one.model.segments], 1)
    pipeline = Pipeline(model, schedule, depths)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = jnp.zeros((MICRO_BATCHES, one.rows, one.seq_len), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(one.seq_len, dtype=jnp.int32), tokens.shape)
    arrays: list[Any] = [tokens, tokens, jnp.ones_like(tokens), positions]
    mesh = Mesh(np.array(jax.local_devices()[:1]), (STAGE,), axis_types=(AxisType.Explicit,))
    stored = jax.tree.map(lambda x: PartitionSpec(*(None,) * x.ndim), params)
    objective = CrossEntropyObjective()

    def head(ends: Any, hidden: jax.Array, batch: Any) -> LossSums:
        return objective.from_hidden(model, ends, hidden, batch)

    def run(params: Any, batch: Any) -> Any:
        total = jnp.asarray(tokens.size, jnp.promote_types(one.model.dtype, jnp.float32))
        here = jax.sharding.get_abstract_mesh()
        return PipelineStep(pipeline, here, (STAGE,), stored, head, params, batch, total).run()

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), axis_names={STAGE}, check_vma=False
    )
    return jax.jit(mapped), jax.device_put((params, Batch(*arrays)), NamedSharding(mesh, PartitionSpec()))


def _update(one: ParameterUpdate) -> Runner:
    model = functional(one.model)
    run = RunConfig(model=one.model, optim=one.optim, steps=one.steps)
    tree = jax.tree.structure(model.abstract())
    params = tree.unflatten([jnp.full(shape, 0.01, one.model.param_dtype) for shape in one.shapes])
    gradients = jax.tree.map(lambda x: 0.1 * x, params)
    transform = build_optimizer(run, model)
    number = jnp.ones((), jnp.float32)
    sums = LossSums(number, number, number, number)
    step = jax.jit(build_step(run, model, lambda params, batch: (sums, batch), transform), donate_argnums=0)
    state = TrainState(params, jax.jit(transform.init)(params), jnp.int32(0), jax.random.key(0))
    compiled = step.lower(state, gradients).compile()
    kept = [state]

    def run_once() -> float:
        begin = time.perf_counter()
        kept[0] = jax.block_until_ready(compiled(kept[0], gradients))[0]
        return time.perf_counter() - begin

    return run_once


def _collective(one: CollectiveOperator) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Program of ``TURNS`` collectives one after the other; each device has an array of the full size.

    Raises:
        ValueError: there are not enough devices for one group.
    """
    devices = jax.devices()
    if len(devices) % one.devices:
        raise ValueError(f"{one.key}: it needs a multiple of {one.devices} devices, and {len(devices)} are here.")
    sizes, names = [len(devices) // one.devices], ["other0"]
    for place, (size, stride) in enumerate(one.group):
        inner = math.prod(one.group[place + 1]) if place + 1 < len(one.group) else 1
        sizes += [size, stride // inner]
        names += [f"own{place}", f"other{place + 1}"]
    own = tuple(name for name in names if name.startswith("own"))
    many = math.prod(size for size, _ in one.group)
    mesh = Mesh(np.array(devices).reshape(sizes), names)
    length = -(-max(1, one.bytes // jnp.dtype(one.dtype).itemsize) // many) * many

    def turn(_: Any, x: jax.Array) -> jax.Array:
        if one.kind == "all-reduce":
            return jax.lax.psum(x, own) * (1 / many)
        if one.kind == "all-gather":
            return jax.lax.all_gather(x[: length // many], own, tiled=True)
        if one.kind == "reduce-scatter":
            part = jax.lax.psum_scatter(x, own, scatter_dimension=0, tiled=True)
            return jax.lax.dynamic_update_slice(x, part * (1 / many), (0,))
        if one.kind == "all-to-all":
            return jax.lax.all_to_all(x, own, 0, 0, tiled=True)
        return jax.lax.ppermute(x, own, [(n, n + 1) for n in range(many - 1)])

    spec = PartitionSpec(tuple(names))
    run = jax.shard_map(
        lambda x: jax.lax.fori_loop(0, TURNS, turn, x), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    made = jax.jit(lambda: jnp.ones(length * len(devices), one.dtype), out_shardings=NamedSharding(mesh, spec))()
    return jax.jit(run), (made,)
