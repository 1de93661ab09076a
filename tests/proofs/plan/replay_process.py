"""One of several pinned processes that measure operators and steps of layouts in turn, for ``replayed_steps``.

    python -m tests.proofs.plan.replay_process CORE FILE     with JAXLLM_COORDINATOR and so on in the environment

The file is a JSON: ``run``, the run; ``meshes``; ``rounds``; ``out``, where process 0 writes the profile and the
seconds of steps.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and hasattr(os, "sched_setaffinity"):  # before JAX counts cores for its threads
    os.sched_setaffinity(0, {int(sys.argv[1])})

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from jaxllm.cli.runtime import processes
from jaxllm.config import from_dict
from jaxllm.data import Batch
from jaxllm.parallel.distributed import ProcessGroup
from jaxllm.plan.profile.operator_benchmark import devices_here, measured, prepared
from jaxllm.plan.profile.operator_profile import OperatorProfile, measured_for
from jaxllm.plan.profile.step_graph import step_graph
from jaxllm.train import RunConfig
from jaxllm.train.run import build_value_and_grad, run_mesh
from jaxllm.train.run_model import run_model
from jaxllm.train.run_processes import put_batch
from jaxllm.train.run_sharding import described_mesh
from jaxllm.train.step.step_builder import build_optimizer, build_step, init_run_state, run_state
from jaxllm.train.step.training_step import jit_step

STEPS = 3
"""Steps of a layout in a round."""


def prepared_step(run: RunConfig, group: ProcessGroup) -> Callable[[], float]:
    """Compiles the step of a run; what is returned runs it once and returns its seconds."""
    model = run_model(run)
    mesh = run_mesh(run, model, jax.devices())
    optimizer = build_optimizer(run, model)
    abstract = run_state(run, model, optimizer, mesh)
    shape = (run.data.batch_size, run.data.seq_len)
    tokens = np.random.default_rng(0).integers(0, run.model.vocab_size, shape).astype(np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    where = jax.NamedSharding(mesh, model.rules.spec(("batch", "seq"), mesh, shape, what="batch"))
    batch = put_batch(Batch(tokens, tokens, np.ones_like(tokens), positions), where, shape[0])
    step = build_step(run, model, build_value_and_grad(run, model, mesh), optimizer)
    with jax.set_mesh(mesh):
        compiled: Any = jit_step(step, abstract).lower(abstract, batch).compile()  # type: ignore[attr-defined]
    group.barrier("compiled")  # collectives wait for each other half a minute
    kept = [init_run_state(run, model, optimizer, mesh, abstract)]
    kept[0] = jax.block_until_ready(compiled(kept[0], batch))[0]

    def once() -> float:
        begin = time.perf_counter()
        kept[0] = jax.block_until_ready(compiled(kept[0], batch))[0]
        return time.perf_counter() - begin

    return once


def measure(group: ProcessGroup, told: dict[str, Any]) -> None:
    """Measures operators and steps, a round of each in turn; process 0 writes them."""
    runs = [dataclasses.replace(from_dict(RunConfig, told["run"]), mesh=mesh) for mesh in told["meshes"]]
    devices = devices_here(group)
    graphs = [step_graph(run, described_mesh(run, jax.device_count()), devices.platform) for run in runs]
    operators = measured_for(operator for graph in graphs for operator in graph.operators)
    say = lambda text: print(text, flush=True) if group.is_leader else None  # noqa: E731
    runners, begin = [], time.monotonic()
    for operator in operators:
        runners.append(prepared(operator))
    say(f"{len(operators)} operators compiled in {time.monotonic() - begin:.0f} s")
    steps = []
    for run in runs:
        begin = time.monotonic()
        steps.append(prepared_step(run, group))
        say(f"{run.mesh} compiled in {time.monotonic() - begin:.0f} s")
    seconds: list[list[float]] = [[] for _ in operators]
    took: list[list[float]] = [[] for _ in runs]
    by_mesh = lambda: zip(told["meshes"], took, strict=True)  # noqa: E731
    for number in range(told["rounds"]):
        for times, found in zip(seconds, measured(runners, group), strict=True):
            times.append(found)
        for times, step in zip(took, steps, strict=True):
            group.barrier("step")
            times.extend(step() for _ in range(STEPS))
        say(f"round {number + 1}: " + ", ".join(f"{mesh} {median(times):.3f}" for mesh, times in by_mesh()))
    if group.is_leader:
        names = [operator.key for operator in operators]
        profile = OperatorProfile(devices).with_times(dict(zip(names, map(median, seconds), strict=True)), "today")
        profile.write(Path(told["out"]) / "profile.json")
        (Path(told["out"]) / "steps.json").write_text(json.dumps(dict(by_mesh())))


def main(file: str) -> None:
    """Joins the other processes and measures."""
    with processes(advice="Start the measurement again.") as group:
        measure(group, json.loads(Path(file).read_text()))


if __name__ == "__main__":
    main(sys.argv[2])
