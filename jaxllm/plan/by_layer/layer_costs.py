"""Costs of layers by their layout and remat policy: seconds and saved bytes that each adds to a step.

A step's time is the sum of ``base`` over layers, changes between layouts and what is outside layers, and the excess of
weight gathers and of ring transfers over the compute that they overlap with: ``base + max(0, gathers) + max(0, ring)``
of the sums. Its memory is fixed but for the saved activations, ``kept``, and the working memory of the layouts used.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxllm.models import Functional
from jaxllm.parallel.collective_traffic import change_collectives, end_collectives, group_collectives
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.parallel.sharding_table import ExpectedCollective
from jaxllm.plan.formulas import memory_estimate as memory
from jaxllm.plan.formulas import step_time as time
from jaxllm.plan.formulas.calibration import Calibration
from jaxllm.plan.formulas.device_work import DeviceWork, architecture, cached_model, rules_of
from jaxllm.plan.formulas.layer_parts import end_part, full_or_none, layer_part
from jaxllm.plan.hardware import Cluster
from jaxllm.train import RunConfig
from sharding import MeshSpec
from sharding.layer_layouts import AXIS


class LayerChoice(NamedTuple):
    """Layout (``sharding.layer_layouts``) and remat policy of layers."""

    layout: str
    remat: str


class ChoiceCost(NamedTuple):
    """Cost of layers: what they add to a step on one device.

    Attributes:
        base: seconds that count in full.
        gathers: seconds of all-gathers of weights, less those of compute that they overlap with.
        ring: seconds of ring transfers, less those of attention that they overlap with.
        kept: bytes of saved activations of a micro-batch; stacks of experts' weights (``memory_estimate.stack_bytes``)
            are among them, over ``LayerCosts.turns``.
    """

    base: float
    gathers: float
    ring: float
    kept: float


def seconds_of(costs: Iterable[ChoiceCost]) -> float:
    """Seconds of a step with these costs, but for the part that all choices share."""
    base, gathers, ring, _ = (sum(column) for column in zip(*costs, strict=True))
    return base + max(0.0, gathers) + max(0.0, ring)


@dataclass(frozen=True)
class LayerCosts:
    """Costs of the layers of a run on a mesh, by the formulas of the planner.

    Attributes:
        run: with the micro-batches and all other settings of the plan; its remat and layouts are not read.
        mesh: mesh without stages.
        cluster: devices.
        calibration: achieved shares of their rates.
    """

    run: RunConfig
    mesh: MeshSpec
    cluster: Cluster
    calibration: Calibration

    def group(self, segment: int, choice: LayerChoice) -> ChoiceCost:
        """Cost of one repeat of a segment's group of blocks."""
        run, mesh = self.run, self.mesh
        repeats = tuple(int(s == segment) for s in range(len(run.model.segments)))
        part = layer_part(run, mesh, choice.layout, choice.remat, repeats)
        return self._cost(part, self._sent(segment, choice.layout, full_or_none(choice.remat)))

    def ends(self, first: str) -> ChoiceCost:
        """Cost of embedding, head and loss, before a first layer of the layout ``first``."""
        return self._cost(end_part(self.run, self.mesh), self._sent(None, first))

    def change(self, before: str, later: str) -> ChoiceCost:
        """Cost of moving activations between layers of two layouts; "" is the embedding before, the head later."""
        data = self.run.data
        model, plan, mesh = self._model
        sent = change_collectives(
            model, mesh.abstract(), plan, before=before, later=later, rows=data.batch_size, seq_len=data.seq_len
        )
        return self._cost(None, sent)

    def working(self, used: Sequence[frozenset[str]]) -> float:
        """Working memory of a layer's backward pass, bytes, with the layouts that each segment uses."""
        found = []
        for layout in sorted(frozenset().union(*used)):
            repeats = tuple(int(layout in own) for own in used)
            part = layer_part(self.run, self.mesh, layout, "full", repeats)
            found.append(memory.layer_working(part, self.cluster.topology))
        return max(found)

    @functools.cached_property
    def turns(self) -> int:
        """Micro-batches whose saved activations are on the device at once."""
        return memory.live_micro_batches(end_part(self.run, self.mesh), self.cluster.topology)

    @functools.cached_property
    def shared(self) -> tuple[float, float]:
        """(seconds, bytes) of a step that no choice of layers changes."""
        model = replace(self.run.model, remat="full")
        run = replace(self.run, model=model, parallel=replace(self.run.parallel, layers=AXIS))
        work = DeviceWork.of(run, self.mesh)
        taken = memory.predict_work(work, self.cluster.topology)
        took = time.predict_work(work, self.cluster, self.calibration)
        plain = LayerChoice(AXIS, "full")
        costs = [self.ends(AXIS)]
        for segment, (_, repeats) in enumerate(run.model.segments):
            costs += [self.group(segment, plain)] * repeats
        kept = self.turns * sum(cost.kept for cost in costs)
        working = self.working([frozenset({AXIS})] * len(run.model.segments))
        return took.seconds - seconds_of(costs), taken.total - kept - working

    def _cost(self, part: DeviceWork | None, sent: Iterable[ExpectedCollective]) -> ChoiceCost:
        run, micro, calibration = self.run, self.run.accumulate, self.calibration
        kept = took = 0.0
        layers = time.LayerSeconds(0.0, 0.0, 0.0, 0.0)
        work = end_part(run, self.mesh) if part is None else part
        if part is not None:
            precision = run.model.matmul_precision
            platform = self.cluster.topology.platform
            rates = time.DeviceRates(self.cluster.hardware, platform, calibration, part.width, precision)
            layers, kept = time.layer_seconds(part, rates), memory.kept_bytes(part)
            took = 2 * micro * rates.stream(kept)
            kept += memory.stack_bytes(part, self.cluster.topology) / self.turns
        all_sent = [time.in_micro_batches(one, micro, run.parallel.zero) for one in sent]
        rooms = {"weights": 0.0, "ring": 0.0, "none": 0.0}
        for (key, _), seconds in time.sent_seconds(all_sent, work, self.cluster, calibration).items():
            rooms[key.split("/")[0]] += seconds
        return ChoiceCost(
            layers.compute + layers.memory + took + rooms["none"],
            rooms["weights"] - calibration.weight_overlap * layers.compute,
            rooms["ring"] - calibration.ring_overlap * layers.attention,
            kept,
        )

    def _sent(self, segment: int | None, layout: str, policy: str = "full") -> tuple[ExpectedCollective, ...]:
        return _collectives(*self._model, self.run.data.batch_size, self.run.data.seq_len, segment, layout, policy)

    @functools.cached_property
    def _model(self) -> tuple[Functional, ParallelConfig, MeshSpec]:
        plan = replace(self.run.parallel, layers=AXIS)
        return cached_model(architecture(self.run.model), rules_of(plan)), plan, self.mesh


@functools.lru_cache(maxsize=4096)
def _collectives(
    model: Functional,
    plan: ParallelConfig,
    mesh: MeshSpec,
    rows: int,
    seq_len: int,
    segment: int | None,
    layout: str,
    policy: str,
) -> tuple[ExpectedCollective, ...]:
    """Collectives of a group of layers, or with the segment None of what is outside, for all rows at once."""
    shape = {"rows": rows, "seq_len": seq_len}
    if segment is None:
        return end_collectives(model, mesh.abstract(), plan, layout, **shape)
    return group_collectives(model, mesh.abstract(), plan, segment, layout, policy, **shape)
