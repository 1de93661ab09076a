"""Capacity table of a run: each place that training has for parameters, optimizer state and activations, and what fits.

    capacity_table(run, Cluster.parse("h100:1x8"), TierBytes(memory_limit(cluster), 128 * 2**30, 2**40))

Bytes of a device are those of the planner (``memory_estimate``), and with files of the formulas of the disk tier
(``jaxllm.train.disk.streamed_bytes``), whose temporaries are the planner's working memory.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from jaxllm.config import ConfigError
from jaxllm.models import functional
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.memory_estimate import MemoryEstimate, predict_work
from jaxllm.plan.formulas.named_values import saved_by_unit
from jaxllm.plan.formulas.optimizer_memory import COUNTER, average_bytes
from jaxllm.plan.formulas.tier_bytes import TierBytes, TierPlacement
from jaxllm.plan.hardware import Cluster, Hardware
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import StepMemory, step_memory_for
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.disk.layer_stream_step import IN_FLIGHT
from jaxllm.train.disk.saved_inputs import layers_in_files, saved_host_bytes
from jaxllm.train.disk.streamed_bytes import LayerBytes, peak_of_layers
from jaxllm.train.host_offload import HostConfig
from jaxllm.train.run import fitting_mesh
from sharding import MeshSpec
from sharding.isolate import Progress

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
        run: the run with it.
        kinds: bytes of a device by what they are and by tier; None: the run's settings do not go with the placement.
        lacking: bytes that are missing, by tier; empty: it fits.
        refusal: why the settings do not go with it; empty: they do.
    """

    place: RunPlacement
    run: RunConfig
    kinds: dict[str, TierBytes] | None
    lacking: dict[str, float]
    refusal: str = ""

    @property
    def bytes(self) -> TierBytes | None:
        """Bytes of a device by tier."""
        return None if self.kinds is None else summed(self.kinds)

    @property
    def fits(self) -> bool:
        """Whether the run can be trained so."""
        return self.kinds is not None and not self.lacking


def capacity_table(run: RunConfig, cluster: Cluster, available: TierBytes) -> list[CapacityRow]:
    """Bytes of a run by tier in each placement, and whether they fit.

    Args:
        run: its mesh, batch and ``disk.window`` count; where its states are and its remat are replaced. A window with
            which a place does not fit is replaced by the largest one with which it does.
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
            tried = [_row(place, one, mesh, cluster, available) for one in with_windows(placed)]
        except (ConfigError, NotImplementedError) as error:
            rows.append(CapacityRow(place, placed, None, {}, str(error)))
            continue
        rows.append(next((row for row in tried if row.fits), tried[0]))
    return rows


def with_windows(run: RunConfig) -> list[RunConfig]:
    """The run with ``disk.window`` as it is, and with all smaller ones, where it has files; else the run alone."""
    windows = range(run.disk.window, 1, -1) if run.disk.directory else [run.disk.window]
    return [dataclasses.replace(run, disk=dataclasses.replace(run.disk, window=window)) for window in windows]


def _row(place: RunPlacement, run: RunConfig, mesh: MeshSpec, cluster: Cluster, available: TierBytes) -> CapacityRow:
    kinds = run_kinds(run, mesh, cluster)
    return CapacityRow(place, run, kinds, summed(kinds).lacking(available))


def summed(kinds: Mapping[str, TierBytes]) -> TierBytes:
    """Bytes of all kinds by tier."""
    return TierBytes(*map(sum, zip(*kinds.values(), strict=True)))


def run_bytes(run: RunConfig, mesh: MeshSpec, cluster: Cluster) -> TierBytes:
    """Bytes of a device by tier of a run whose mesh is legal; see ``run_kinds``."""
    return summed(run_kinds(run, mesh, cluster))


def run_kinds(run: RunConfig, mesh: MeshSpec, cluster: Cluster) -> dict[str, TierBytes]:
    """Bytes of a device by what they are and by tier, of a run whose mesh is legal.

    Those of a device are at the moment of the most. Files count twice, as they do while a checkpoint is written from
    them; saved activations in files count once. What several devices of a host have alike is counted for each,
    although it is in a file once.

    Returns:
        bytes of parameters, gradients, optimizer state, activations, and of everything else of a device.

    Raises:
        ConfigError: the planner has no formula for the optimizer.
    """
    in_memory = without_files(run)
    work = DeviceWork.of(in_memory, mesh)
    estimate = predict_work(work, cluster.topology)
    if not run.disk.directory:
        return _kinds_in_memory(in_memory, mesh, cluster, estimate)
    layers, ends, count = _layer_bytes(work, estimate)
    state = _state_in_files(work, estimate)
    window, largest = run.disk.window, max(one.state for one in layers)
    stays = estimate.optimizer - state
    if not run.disk.parameters:
        kept = min(window, count)
        two = 2 * (kept * largest + ends.state)
        before = estimate.total - estimate.parameters - estimate.gradients - estimate.optimizer
        updates = two > before  # the update takes more than the passes
        return _kinds(
            TierBytes(estimate.parameters),
            TierBytes(estimate.gradients),
            TierBytes(stays + two * updates, kept * largest + ends.state, 2 * state),
            TierBytes(0 if updates else estimate.activations),
            TierBytes(0 if updates else before - estimate.activations),
        )
    hidden, saved = work.stream_bytes(), saved_by_unit(work, run.model.remat)
    peak = peak_of_layers(layers, count, window, ends, hidden, estimate.working, max(saved) - hidden)
    running, leaving = min(IN_FLIGHT + 1, count), min(window, count)
    wide = max(layers, key=lambda one: 2 * one.parameters + one.state)
    whole = max(layers, key=sum)
    files, inputs = estimate.parameters - ends.parameters, saved_host_bytes(run.disk, saved, work.micro_batches)
    gradients = ends.parameters + running * wide.parameters
    states = peak.ends_state + running * wide.state + leaving * whole.state
    return _kinds(
        TierBytes(gradients + leaving * whole.parameters, window * whole.parameters, 2 * files),
        TierBytes(gradients),
        TierBytes(states, window * whole.state + ends.state, 2 * state),
        TierBytes(peak.hidden + peak.values, inputs, _saved_in_files(run, work)),
        TierBytes(peak.temporaries + estimate.batch),
    )


def _kinds_in_memory(run: RunConfig, mesh: MeshSpec, cluster: Cluster, found: MemoryEstimate) -> dict[str, TierBytes]:
    """Bytes by kind and tier of a run without files, whose estimate is ``found``."""
    near = predict_work(DeviceWork.of(dataclasses.replace(run, host=HostConfig()), mesh), cluster.topology)
    parameters, optimizer = near.parameters - found.parameters, near.optimizer - found.optimizer
    return _kinds(
        TierBytes(found.parameters, parameters),
        TierBytes(found.gradients),
        TierBytes(found.optimizer, optimizer),
        TierBytes(found.activations, found.host - parameters - optimizer),
        TierBytes(found.batch + found.weights + found.working + found.engine),
    )


def _kinds(*each: TierBytes) -> dict[str, TierBytes]:
    return dict(zip(("parameters", "gradients", "optimizer state", "activations", "all else"), each, strict=True))


class FileTraffic(NamedTuple):
    """Bytes of a device that a step moves from and to files, after the first one.

    Attributes:
        forward, backward: read for the forward pass, and for the backward pass and the updates.
        saved: inputs of layers and their named values, written in the forward pass and read in the backward pass.
        written: parameters and optimizer state.
        again: read for the backward pass that finds the norm by which gradients are clipped.
        away: inputs and values of layers that the device moves to its host in the forward pass and back in each
            backward pass, those in files too.
    """

    forward: float
    backward: float
    saved: float
    written: float
    again: float
    away: float = 0.0


def file_traffic(run: RunConfig, mesh: MeshSpec, cluster: Cluster) -> FileTraffic:
    """Bytes that a step of a run with files moves: what the window has at a turn is not read (``step_traffic``)."""
    work = DeviceWork.of(without_files(run), mesh)
    estimate = predict_work(work, cluster.topology)
    layers, ends, count = _layer_bytes(work, estimate)
    state, kept = _state_in_files(work, estimate), min(run.disk.window, count)
    if not run.disk.parameters:
        return FileTraffic(0, state - kept * max(one.state for one in layers), 0, state, 0)
    parameters = estimate.parameters - ends.parameters
    reads = parameters - kept * max(one.parameters for one in layers)
    saved = _saved_in_files(run, work)
    again = reads + saved if run.optim.clip_norm is not None else 0
    away = work.micro_batches * sum(saved_by_unit(work, run.model.remat))
    return FileTraffic(reads, reads + state, saved, parameters + state, again, away)


def disk_seconds(traffic: FileTraffic, hardware: Hardware, forward: float, backward: float) -> float:
    """Seconds of a step that files take beside its passes: what these do not hide, and passes that are made again.

    Reads and writes go on at the same time, each at its rate of the disk, or the link's if that is slower. Layers are
    read and written beside the passes; the optimizer state alone is after them. What layers save goes over the link
    too, wherever it is; back with what is read from files.

    Args:
        traffic: bytes of the step.
        hardware: of a device.
        forward, backward: seconds of the passes, recomputation included.
    """
    read, write = (min(one, hardware.host) for one in (hardware.disk, hardware.disk_write or hardware.disk))
    back = max((traffic.backward + traffic.saved) / read, traffic.written / write)
    if not traffic.forward:
        return back
    away, link = traffic.away, hardware.host
    out = max(traffic.forward / read, traffic.saved / write, away / link)
    back = max(back, (traffic.backward + away) / link) if away else back
    repeated = max(backward, traffic.again / read, away / link) if traffic.again else 0.0
    return max(0.0, out - forward) + max(0.0, back - backward) + repeated


def without_files(run: RunConfig) -> RunConfig:
    """The run with its states in memory, for the formulas of the planner; layers that were streamed keep their inputs
    alone, and what they save besides is counted apart (``saved_by_unit``)."""
    remat = "full" if run.disk.parameters else run.model.remat
    return dataclasses.replace(run, disk=DiskConfig(), model=dataclasses.replace(run.model, remat=remat))


def _saved_in_files(run: RunConfig, work: DeviceWork) -> int:
    """Bytes of a device that streamed layers save in files."""
    saved = saved_by_unit(work, run.model.remat)
    return work.micro_batches * sum(saved[: layers_in_files(run.disk, len(saved))])


def check_compiles(row: CapacityRow, cluster: Cluster) -> None:
    """Checks that a compiler takes the step of a row without its devices.

    Raises:
        ConfigError: the GPU compiler takes no arguments in the host's memory without a GPU.
    """
    if cluster.topology.platform == "gpu" and row.place.placement.optimizer == "host":
        raise ConfigError(
            "the optimizer state is an argument in the host's memory, which the GPU compiler takes only where there is "
            "a GPU; there `jaxllm train --within SIZE --host SIZE` compiles the step before it trains."
        )


def compiled_bytes(
    row: CapacityRow, cluster: Cluster, progress: Progress | None = None
) -> tuple[TierBytes, StepMemory]:
    """Bytes of a device by tier with those of the compiled step in place of predicted ones, and what was compiled.

    Arrays of the state in the host's memory, buffers of files and the files are as predicted: no program has them.

    Args:
        row: legal place.
        cluster: devices; where they have no compiler, those of its topology are compiled for.
        progress: called about once a second.

    Raises:
        ConfigError: see ``check_compiles``.
        OutOfDeviceMemory: the compiler says that a program exceeds device memory.
        CompilerMissing: the compiler is not installed; names the extra to install.
    """
    assert row.kinds is not None
    check_compiles(row, cluster)
    memory = step_memory_for(row.run, cluster.topology.name, progress)
    state = row.kinds["parameters"].host + row.kinds["optimizer state"].host
    return TierBytes(memory.device, memory.host + state, summed(row.kinds).disk), memory


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
