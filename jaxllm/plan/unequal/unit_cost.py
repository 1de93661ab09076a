"""Costs of one unit of devices under a layout, by the planner's formulas (``jaxllm.plan.formulas``).

A group is predicted as though all units were of its kind and the network between them cost nothing. What is sent
between units is counted in bytes, for the links that an order of the units gives it. Two depths give the costs of a
layer and of what is beside layers, and two numbers of micro-batches those of a micro-batch and of what a step has once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp

from jaxllm.plan.formulas import memory_estimate, step_time
from jaxllm.plan.formulas.calibration import DEFAULT, Calibration
from jaxllm.plan.formulas.collective_time import Network
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.memory_estimate import MemoryEstimate
from jaxllm.plan.unequal.unequal_cluster import UnequalCluster
from jaxllm.train import RunConfig
from sharding import MeshSpec


@dataclass(frozen=True)
class StageUnitCost:
    """Costs of a unit that is a replica of a pipeline stage. Seconds are of a micro-batch, forward and backward.

    Attributes:
        layer: seconds of a layer.
        head: seconds of embedding and head.
        message: bytes that a device sends to the next stage for a micro-batch, there and back.
        sums: bytes that a device sends to other replicas in a step.
        ends: bytes of embedding and head that a device gathers from all stages in a step, and of gradients summed.
        moved: the same of each layer, where stages are not equally deep.
        shallow: bytes of a device whose stage has one layer.
        deeper: bytes of each further layer.
        limit: bytes that may be filled.
    """

    layer: float
    head: float
    message: float
    sums: float
    ends: float
    moved: float
    shallow: int
    deeper: int
    limit: int

    def memory(self, depth: int) -> int:
        """Bytes of a device in a pipeline whose deepest stage has so many layers."""
        return self.shallow + (depth - 1) * self.deeper

    @property
    def deepest(self) -> int:
        """Most layers of a stage that fit."""
        room = self.limit - self.shallow
        return 0 if room < 0 else 1 + room // self.deeper


@dataclass(frozen=True)
class ReplicaUnitCost:
    """Costs of a unit that is a replica of the whole model.

    Attributes:
        micro_batch: seconds of a micro-batch of its rows.
        fixed: seconds of what a step has once.
        sums: bytes that a device sends to other replicas in a step.
        sums_once: the same where gradients are summed over replicas once a step, as with uneven rows.
        memory: of a device, with all of its optimizer state.
    """

    micro_batch: float
    fixed: float
    sums: float
    sums_once: float
    memory: MemoryEstimate


def stage_unit_cost(
    run: RunConfig, mesh: MeshSpec, cluster: UnequalCluster, group: int, calibration: Calibration = DEFAULT
) -> StageUnitCost:
    """Costs of a unit of a group as a replica of a stage.

    Args:
        run: laid out, on a mesh with stages; of one kind of layer.
        mesh: of the run: ``stage`` and ``data`` are over units, all other axes inside.
        cluster, group: the unit's.
        calibration: attained shares of the data sheet's rates.
    """
    sizes, as_if = dict(mesh.axes), cluster.as_if_equal(group)
    stages, replicas, speed = sizes["stage"], sizes.get("data", 1), cluster.groups[group].speed
    works = [DeviceWork.of(_of_depth(run, stages, depth), mesh) for depth in (1, 2)]
    times = [step_time.predict_work(work, as_if, calibration) for work in works]
    one, two = ((time.seconds - time.bubble) / speed / run.accumulate for time in times)
    shallow, two_layers = (memory_estimate.predict_work(work, as_if.topology).total for work in works)
    work, wide = works[0], jnp.dtype(run.model.param_dtype).itemsize
    layers = sum(w.stored * w.layers for w in work.weights if w.name.startswith("segments/"))  # of one unit of layers
    ends = sum(w.stored * w.layers for w in work.weights) - layers
    units = sum(repeats for _, repeats in run.model.segments)
    return StageUnitCost(
        two - one,
        max(0.0, 2 * one - two),
        2.0 * work.stream_bytes(),
        2 * (replicas - 1) / replicas * (layers * units / stages + ends) * wide,
        ends * stages * (work.width + wide),
        layers * (work.width + wide),
        shallow,
        two_layers - shallow,
        cluster.groups[group].limit,
    )


def replica_unit_cost(
    run: RunConfig, mesh: MeshSpec, cluster: UnequalCluster, group: int, calibration: Calibration = DEFAULT
) -> ReplicaUnitCost:
    """Costs of a unit of a group as a replica of the whole model.

    Args:
        run: laid out, on a mesh without stages.
        mesh, cluster, group, calibration: see ``stage_unit_cost``.
    """
    as_if, speed = cluster.as_if_equal(group), cluster.groups[group].speed
    twice = dataclasses.replace(
        run, accumulate=2 * run.accumulate, data=dataclasses.replace(run.data, batch_size=2 * run.data.batch_size)
    )
    works = [DeviceWork.of(laid, mesh) for laid in (run, twice)]
    once, again = (step_time.predict_work(work, as_if, calibration).seconds / speed for work in works)
    each = (again - once) / run.accumulate
    network = Network(as_if, mesh)

    def sums(run: RunConfig) -> float:
        sent = step_time.collectives(run, mesh)
        return sum(one.count * network.sent(one.kind, one.axes, one.bytes)[1] for one in sent)

    # ZeRO-1 sums shards of the gradients over replicas once a step.
    once_a_step = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, zero=1))
    memory = memory_estimate.predict_work(works[0], as_if.topology)
    return ReplicaUnitCost(each, max(0.0, once - run.accumulate * each), sums(run), sums(once_a_step), memory)


def _of_depth(run: RunConfig, stages: int, depth: int) -> RunConfig:
    """The run with so many layers on each stage (or groups, where a pattern repeats), stored as of uneven stages."""
    layers = run.model.layers // sum(repeats for _, repeats in run.model.segments)
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, layers=layers * depth * stages),
        parallel=dataclasses.replace(run.parallel, depths=(depth,) * stages),
    )
