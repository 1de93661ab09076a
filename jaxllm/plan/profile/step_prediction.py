"""Prediction of a step by replay: the task graph of a layout with times of an operator profile; layouts in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.parallel.mesh_search import factorings
from jaxllm.plan.profile.operator_profile import MissingOperators, OperatorProfile
from jaxllm.plan.profile.step_graph import AXES, StepGraph, step_graph
from jaxllm.plan.profile.task_replay import Replay, TimedTask, replay
from jaxllm.train import RunConfig
from jaxllm.train.run_sharding import described_mesh
from sharding import AXES as ORDER
from sharding import MeshSpec


@dataclass(frozen=True)
class ProfiledLayout:
    """Layout of a run with its predicted step.

    Attributes:
        run: the run with the layout's mesh.
        mesh: the mesh, all sizes known.
        replay: the predicted step; None where it cannot be predicted.
        refusal: why it cannot.
    """

    run: RunConfig
    mesh: MeshSpec
    replay: Replay | None
    refusal: str = ""


def legal_layouts(run: RunConfig, devices: int) -> list[tuple[RunConfig, MeshSpec]]:
    """All meshes of so many devices over ``AXES`` that a run fits, with its other settings."""
    out = []
    names = [name for name in ORDER if name in AXES]
    for sizes in factorings(devices, len(names)):
        axes = tuple((name, size) for name, size in zip(names, sizes, strict=True) if size > 1)
        own = dataclasses.replace(run, mesh=str(MeshSpec(axes or (("data", 1),))))
        try:
            out.append((own, described_mesh(own, devices)))
        except ValueError:
            continue
    return out


def predict_step(graph: StepGraph, profile: OperatorProfile) -> Replay:
    """Replays a step's task graph with the times of a profile.

    Raises:
        MissingOperators: the profile lacks some; names them.
    """
    if missing := profile.missing(graph.operators):
        raise MissingOperators(missing, profile.name)
    times = {operator: profile.time(operator) for operator in graph.operators}
    tasks = [
        TimedTask(
            max(0.0, sum(times[operator] * count for operator, count in task.operators)),
            task.lane,
            task.needs,
            task.stream,
            task.sends,
            task.label,
        )
        for task in graph.tasks
    ]
    return replay(tasks, beside(graph.stages, profile.devices.processors))


def beside(stages: Sequence[int], processors: Sequence[int]) -> list[list[int]]:
    """Lanes of the other devices on the processor of each lane's first device, see ``task_replay.replay``.

    Args:
        stages: lane of each device.
        processors: processor of each device, -1 for one of its own. Where they are of another number of devices, all
            are taken to be as busy as they were when operators were measured.
    """
    if len(stages) != len(processors):
        return []
    out = []
    for lane in range(1 + max(stages)):
        first = stages.index(lane)
        own = processors[first]
        shared = [n for n, processor in enumerate(processors) if processor == own != -1 and n != first]
        out.append([stages[n] for n in shared])
    return out


def ranked_layouts(layouts: Sequence[tuple[RunConfig, MeshSpec]], profile: OperatorProfile) -> list[ProfiledLayout]:
    """Layouts by their predicted step, the fastest first; those that cannot be predicted last."""
    found = []
    for run, mesh in layouts:
        try:
            made = predict_step(step_graph(run, mesh, profile.devices.platform), profile)
            found.append(ProfiledLayout(run, mesh, made))
        except (NotImplementedError, MissingOperators) as error:
            found.append(ProfiledLayout(run, mesh, None, str(error)))
    return sorted(found, key=lambda one: float("inf") if one.replay is None else one.replay.seconds)
