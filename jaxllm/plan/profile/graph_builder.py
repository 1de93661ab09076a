"""Builder of task graphs: tasks of lanes with the operators of a run on a mesh, see ``step_graph``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.profile.cpu_messages import CpuMessages, last_messages, loss_messages, softmax_messages
from jaxllm.plan.profile.operators import (
    CollectiveOperator,
    ModelPass,
    Operator,
    ParameterUpdate,
    Pass,
    device_model,
    ends_alone,
    group_of,
    layers_alone,
)
from jaxllm.plan.profile.task_replay import Stream
from jaxllm.train import RunConfig
from sharding import MeshSpec

SCALARS = 2
"""All-reduces of single numbers in a step: the sums of the loss, and the squares of the gradients' norm."""

Counts = dict[Operator, float]
"""Operators one after the other, each with its count; a share of one where collectives are spread over layers."""


class StepTask(NamedTuple):
    """Task of a step: operators one after the other, see ``task_replay.TimedTask``."""

    operators: tuple[tuple[Operator, float], ...]
    lane: int
    needs: tuple[int, ...]
    stream: Stream
    sends: bool
    label: str


@dataclass(frozen=True)
class StepGraph:
    """Task graph of a step.

    Attributes:
        tasks: in an order in which each comes after those that it needs.
        stages: lane of each device, in the order of the mesh.
    """

    tasks: tuple[StepTask, ...]
    stages: tuple[int, ...]

    @property
    def operators(self) -> tuple[Operator, ...]:
        """Distinct operators, in the order of the step."""
        return tuple(dict.fromkeys(operator for task in self.tasks for operator, _ in task.operators))


class GraphBuilder:
    """Tasks of a run on a mesh, and its operators.

    Args:
        run: the run.
        mesh: legal for it, all sizes known.
        platform: of the devices.

    Attributes:
        sizes: mesh axes of more than one device.
        work: of a device.
        sends_each: whether each array of a collective is a message of its own, see ``cpu_messages``.
        tasks: so far.
        last: last task of each stream of a lane.
    """

    def __init__(self, run: RunConfig, mesh: MeshSpec, platform: str):
        self.run, self.mesh, self.platform = run, mesh, platform
        self.sizes = {name: size for name, size in mesh.axes if size > 1}
        self.work = DeviceWork.of(run, mesh)
        self.sends_each = platform == "cpu"
        self.local = device_model(run.model, self.sizes.get("tensor", 1))
        self.rows = self.work.tokens // self.work.row
        self.segments = [group for group, _ in self.local.segments]
        self.tasks: list[StepTask] = []
        self.last: dict[tuple[int, Stream], int] = {}

    def built(self) -> StepGraph:
        """The graph."""
        stages, inner = self.sizes.get("stage", 1), 1
        for name, size in reversed(self.mesh.axes):
            if name == "stage":
                break
            inner *= size
        devices = math.prod(size for _, size in self.mesh.axes)
        return StepGraph(tuple(self.tasks), tuple(n // inner % stages for n in range(devices)))

    def add(
        self,
        label: str,
        operators: Counts,
        lane: int = 0,
        needs: Iterable[int] = (),
        stream: Stream = "compute",
    ) -> int:
        """Adds a task and returns its number; of operators that compute and send, one task of each."""
        before = tuple(needs)
        for sends in (False, True):
            own = tuple((op, n) for op, n in operators.items() if n and isinstance(op, CollectiveOperator) == sends)
            if own:
                self.tasks.append(StepTask(own, lane, before, stream, sends, label))
                self.last[lane, stream] = len(self.tasks) - 1
                before = ()
        return self.last.get((lane, stream), -1)

    def layers(self, kind: Pass, segment: int, count: float = 1.0) -> Counts:
        """A pass over groups of layers of a segment."""
        model = layers_alone(self.local, self.segments[segment])
        return {ModelPass(kind, model, self.rows, self.work.row): count}

    def ends(self, kind: Pass) -> Counts:
        """A pass of the embedding or the loss."""
        return {ModelPass(kind, ends_alone(self.local), self.rows, self.work.row, self.run.z_loss): 1.0}

    def sent(self, kind: str, axes: Sequence[str], size: float, count: float = 1.0, dtype: str = "") -> Counts:
        """Collectives over mesh axes; none where these have one device, or nothing is sent."""
        group = group_of(self.mesh, axes)
        if not group or not size:
            return {}
        return {CollectiveOperator(kind, group, round(size), dtype or self.run.model.dtype): count}

    def update(self) -> Counts:
        """The optimizer's update."""
        shapes = tuple(weight.shape for weight in self.work.weights)
        return {ParameterUpdate(self.run.model, self.run.optim, self.run.steps, shapes): 1.0}

    def combined(self, counts: Counts) -> Counts:
        """Sums of gradients: those of one kind over the same devices are one where the network sends them as one."""
        return counts if self.sends_each else combined(counts)

    def loss_sums(self) -> Counts:
        """Sums of a loss; accelerators send them with other sums."""
        return self._messages([loss_messages(self.mesh)]) if self.sends_each else {}

    def softmax(self) -> Counts:
        """Sums of the softmax over a vocabulary that ``tensor`` splits."""
        if self.sends_each:
            return self._messages([softmax_messages(self.work)])
        return self.sent("all-reduce", ("tensor",), 3 * 4 * self.work.tokens, dtype="float32")

    def scalars(self) -> Counts:
        """All-reduces of single numbers at the end of a step."""
        if self.sends_each:
            return self._messages(last_messages(self.run, self.mesh))
        return self.sent("all-reduce", list(self.sizes), 4, SCALARS, "float32")

    def _messages(self, messages: Iterable[CpuMessages]) -> Counts:
        return joined(*(self.sent("all-reduce", one.axes, one.bytes, one.count, "float32") for one in messages))


def times(counts: Counts, factor: float) -> Counts:
    """Operators, each so many times as often."""
    return {operator: count * factor for operator, count in counts.items()}


def joined(*parts: Counts) -> Counts:
    """Operators of all parts."""
    out: Counts = {}
    for part in parts:
        for operator, count in part.items():
            out[operator] = out.get(operator, 0.0) + count
    return out


def combined(counts: Counts) -> Counts:
    """Collectives of one kind over the same devices as one of all their bytes, as XLA combines sums of gradients."""
    out: Counts = {}
    sizes: dict[CollectiveOperator, float] = {}
    for operator, count in counts.items():
        if isinstance(operator, CollectiveOperator):
            any_size = replace(operator, bytes=0)
            sizes[any_size] = sizes.get(any_size, 0.0) + operator.bytes * count
        else:
            out[operator] = count
    return out | {replace(operator, bytes=round(size)): 1.0 for operator, size in sizes.items() if size}
