"""Capacity table of a run: each place that training has for parameters, optimizer state and activations, and what fits.

    capacity_table(run, Cluster.parse("h100:1x8"), TierBytes(memory_limit(cluster), 128 * 2**30, 2**40))

Bytes of a device are those of the planner (``memory_estimate``), and with files of the formulas of the disk tier
(``jaxllm.train.disk.streamed_bytes``), whose temporaries are the planner's working memory.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from jaxllm.config import ConfigError
from jaxllm.models import functional
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.memory_estimate import MemoryEstimate, predict_work
from jaxllm.plan.formulas.optimizer_memory import COUNTER, average_bytes
from jaxllm.plan.formulas.tier_bytes import TierBytes, TierPlacement
from jaxllm.plan.hardware import Cluster
from jaxllm.train import RunConfig
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.saved_inputs import host_inputs, layers_in_files
from jaxllm.train.disk.streamed_bytes import LayerBytes, peak_of_layers
from jaxllm.train.host_offload import HostConfig
from jaxllm.train.run import fitting_mesh
from sharding import MeshSpec

DIRECTORY = "DIR"
"""Directory of a planned run, which no file is made in."""


@dataclass(frozen=True)
class RunPlacement:
    """TierPlacement that `jaxllm train` can do, with the settings that ask for it.

    Attributes:
        placement: tier of each kind of bytes. With parameters on disk, gradients are those of single layers.
        options: settings on the command line, besides ``--model.remat full``.
        remat: remat of the run.
    """

    placement: TierPlacement
    options: str
    remat: str = "full"

    def of(self, run: RunConfig) -> RunConfig:
        """The run with this placement."""
        place, on_disk = self.placement, self.placement.optimizer == "disk"
        disk = dataclasses.replace(
            run.disk,
            directory=DIRECTORY if on_disk else "",
            parameters=place.parameters == "disk",
            activations=place.activations == "disk",
            activation_layers=0,
        )
        return dataclasses.replace(
            run,
            model=dataclasses.replace(run.model, remat=self.remat),
            host=HostConfig(optimizer=place.optimizer == "host"),
            disk=disk,
        )


PLACEMENTS = (
    RunPlacement(TierPlacement(), ""),
    RunPlacement(TierPlacement(optimizer="host"), "--host.optimizer"),
    RunPlacement(
        TierPlacement(optimizer="host", activations="host"), "--host.optimizer --model.remat offload:0", "offload:0"
    ),
    RunPlacement(TierPlacement(optimizer="disk"), "--disk DIR:SIZE"),
    RunPlacement(TierPlacement("disk", "device", "disk", "host"), "--disk DIR:SIZE --disk.parameters"),
    RunPlacement(
        TierPlacement("disk", "device", "disk", "disk"), "--disk DIR:SIZE --disk.parameters --disk.activations"
    ),
)
"""Placements in the order in which ``--within`` tries them: each is slower than the one before."""


class CapacityRow(NamedTuple):
    """Row of a capacity table.

    Attributes:
        place: the placement.
        bytes: of a device by tier; None: the run's settings do not go with the placement.
        lacking: bytes that are missing, by tier; empty: it fits.
        refusal: why the settings do not go with it; empty: they do.
    """

    place: RunPlacement
    bytes: TierBytes | None
    lacking: dict[str, float]
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether the run can be trained so."""
        return self.bytes is not None and not self.lacking


def capacity_table(run: RunConfig, cluster: Cluster, available: TierBytes) -> list[CapacityRow]:
    """Bytes of a run by tier in each placement, and whether they fit.

    Args:
        run: its mesh, batch and ``disk.window`` count; where its states are and its remat are replaced.
        cluster: devices.
        available: bytes of a device, and its share of the host's memory and disks.

    Raises:
        ShardingError: the run does not fit a mesh of these devices.
    """
    rows = []
    for place in PLACEMENTS:
        placed = place.of(run)
        try:
            model = functional(placed.model, placed.parallel.rules())
            mesh = fitting_mesh(placed, model, cluster.devices, cluster.topology.platform)
            found = run_bytes(placed, mesh, cluster)
        except (ConfigError, NotImplementedError) as error:
            rows.append(CapacityRow(place, None, {}, str(error)))
            continue
        rows.append(CapacityRow(place, found, found.lacking(available)))
    return rows


def run_bytes(run: RunConfig, mesh: MeshSpec, cluster: Cluster) -> TierBytes:
    """Bytes of a device by tier of a run whose mesh is legal.

    Files count twice, as they do while a checkpoint is written from them; saved activations in files count once. What
    several devices of a host have alike is counted for each, although it is in a file once.

    Raises:
        ConfigError: the planner has no formula for the optimizer.
    """
    in_memory = dataclasses.replace(run, disk=DiskConfig())
    work = DeviceWork.of(in_memory, mesh)
    estimate = predict_work(work, cluster.topology)
    if not run.disk.directory:
        return TierBytes(estimate.total, estimate.host)
    layers, ends, count = _layer_bytes(work, estimate)
    state = _state_in_files(work, estimate)
    window, largest = run.disk.window, max(one.state for one in layers)
    if not run.disk.parameters:
        kept = min(window, count)
        update = estimate.parameters + estimate.gradients + estimate.optimizer - state
        device = max(estimate.total - state, update + 2 * (kept * largest + ends.state))
        return TierBytes(device, kept * largest + ends.state, 2 * state)
    hidden = work.stream_bytes()
    peak = peak_of_layers(layers, count, window, ends, hidden, estimate.working)
    buffers = window * max(one.parameters + one.state for one in layers) + ends.state
    files = 2 * (estimate.parameters - ends.parameters + state)
    host = host_inputs(run.disk, count, work.micro_batches) * hidden
    away = layers_in_files(run.disk, count) * work.micro_batches * hidden
    return TierBytes(sum(peak) + estimate.batch, buffers + host, files + away)


def _state_in_files(work: DeviceWork, estimate: MemoryEstimate) -> int:
    """Bytes of a device's optimizer state without the average of its parameters and step counters."""
    return estimate.optimizer - average_bytes(work.run, estimate.parameters) - work.run.optim.spec.counters * COUNTER


def _layer_bytes(work: DeviceWork, estimate: MemoryEstimate) -> tuple[list[LayerBytes], LayerBytes, int]:
    """Bytes of a layer of each segment on a device, of what is outside of layers, and the number of layers.

    The optimizer state is divided as the trained parameters are.
    """
    wide, trained = jnp.dtype(work.run.model.param_dtype).itemsize, {w.name for w in work.trained}
    elements = sum(w.stored * w.layers for w in work.trained)
    state = _state_in_files(work, estimate) / elements
    parameters: dict[str, float] = defaultdict(float)
    states: dict[str, float] = defaultdict(float)
    rows: dict[str, int] = {}
    for weight in work.weights:
        top, segment, *_ = (*weight.name.split("/"), "")
        name, layers = (segment, 1) if top == "segments" else ("", weight.layers)
        parameters[name] += weight.stored * layers * (weight.bytes or wide)
        states[name] += weight.stored * layers * state * (weight.name in trained)
        if name:
            rows[name] = weight.layers
    of = {name: LayerBytes(round(parameters[name]), round(states[name])) for name in parameters}
    ends = of.pop("", LayerBytes(0, 0))
    return list(of.values()), ends, sum(rows.values())
