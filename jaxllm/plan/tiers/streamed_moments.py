"""Live bytes by tier over a step with files, and when its programs compute and its files are read and written.

Bytes are those of the capacity table (``jaxllm.plan.capacity_table``) at each program of the step: the most of them is
what the table says. Times are the planner's, played in the order in which the step issues its programs and copies
(``jaxllm.plan.formulas.update_timeline``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxllm.plan.capacity_table import _layer_bytes, _state_in_files, run_kinds, without_files
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.memory_estimate import predict_work as predict_memory
from jaxllm.plan.formulas.named_values import saved_by_unit
from jaxllm.plan.formulas.step_time import predict_work
from jaxllm.plan.formulas.tier_bytes import TierBytes
from jaxllm.plan.formulas.update_timeline import Task, play
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.tiers.saved_choice import recomputed_share
from jaxllm.train import RunConfig
from jaxllm.train.disk.layer_stream_step import IN_FLIGHT
from jaxllm.train.disk.saved_inputs import layers_in_files
from jaxllm.train.disk.streamed_bytes import LayerBytes
from sharding import MeshSpec

KINDS: tuple[str, ...] = ("parameters", "gradients", "optimizer state", "activations", "all else")


class StepMoment(NamedTuple):
    """Program of a step, with the bytes of a device while it runs.

    Attributes:
        name: of the program.
        kinds: bytes by what they are and by tier, as in ``capacity_table.run_kinds``.
    """

    name: str
    kinds: dict[str, TierBytes]

    def tier(self, tier: str) -> dict[str, float]:
        """Bytes of a tier by what they are."""
        return {kind: getattr(size, tier) for kind, size in self.kinds.items()}


class StreamedSizes(NamedTuple):
    """Bytes of a device that the moments of a step are made of.

    Attributes:
        count: layers.
        ends: parameters and optimizer state outside of layers.
        wide: layer with the most bytes in a program.
        whole: layer with the most bytes of parameters and state.
        running, leaving: layers whose programs run, and whose new contents are on their way to the files.
        ahead: layers that are left when the state of the ends is read.
        saved: bytes that each layer saves of a micro-batch, its input and named values.
        passes, update: bytes by what they are of a step whose state alone is in files: most in its passes, and in its
            updates.
    """

    count: int
    ends: LayerBytes
    wide: LayerBytes
    whole: LayerBytes
    running: int
    leaving: int
    ahead: int
    saved: list[int]
    passes: dict[str, float]
    update: dict[str, float]


def streamed_sizes(run: RunConfig, mesh: MeshSpec, cluster: Cluster) -> StreamedSizes:
    """Sizes of a run with files; see ``step_moments``."""
    work = DeviceWork.of(without_files(run), mesh)
    estimate = predict_memory(work, cluster.topology)
    layers, ends, count = _layer_bytes(work, estimate)
    window, largest = min(run.disk.window, count), max(one.state for one in layers)
    stays = estimate.optimizer - _state_in_files(work, estimate)
    rest = estimate.total - estimate.parameters - estimate.gradients - estimate.optimizer - estimate.activations
    alike = {"parameters": estimate.parameters, "gradients": estimate.gradients}
    return StreamedSizes(
        count,
        ends,
        max(layers, key=lambda one: 2 * one.parameters + one.state),
        max(layers, key=sum),
        min(IN_FLIGHT + 1, count),
        window,
        run.disk.window + math.ceil(ends.state / max(1, largest)),
        saved_by_unit(work, run.model.remat) if run.disk.parameters else [],
        {**alike, "optimizer state": stays, "activations": estimate.activations, "all else": rest},
        {
            **alike,
            "optimizer state": stays + 2 * (window * largest + ends.state),
            "activations": 0.0,
            "all else": 0.0,
        },
    )


def step_moments(run: RunConfig, mesh: MeshSpec, cluster: Cluster) -> list[StepMoment]:
    """Bytes of a device at each program of a step with files, in the order of the step.

    Args:
        run: with files; its mesh is legal.
        mesh, cluster: of the run.

    Raises:
        ConfigError: the planner has no formula for the optimizer.
    """
    whole, sizes = run_kinds(run, mesh, cluster), streamed_sizes(run, mesh, cluster)
    return (_streamed if run.disk.parameters else _updated_after)(run, whole, sizes)


def _streamed(run: RunConfig, whole: dict[str, TierBytes], sizes: StreamedSizes) -> list[StepMoment]:
    """Moments of a step whose parameters are streamed: forward, head, backward with updates, ends."""
    count, micro = sizes.count, run.accumulate
    files, window, saved_of = layers_in_files(run.disk, count), run.disk.window, sizes.saved
    host = whole["activations"].host
    in_memory = [saved_of[n] * _inputs_in_memory(n, files, micro, window) for n in range(count)]
    most = sum(in_memory)
    in_flight = sizes.running * sizes.wide.parameters

    def at(name: str, saved: int, *, ends: int = 0, updates: bool = False, passes: bool = True) -> StepMoment:
        """Bytes while the inputs of the first so many layers are saved.

        Args:
            name, saved: of the moment.
            ends: 0: no gradients of the ends; 1: these; 2: their state too.
            updates: layers are updated.
            passes: layers compute.
        """
        inside = sum(in_memory[:saved]) / max(1, most) * host
        state = whole["optimizer state"].host - sizes.ends.state
        device = {
            "parameters": sizes.ends.parameters + passes * in_flight + updates * sizes.leaving * sizes.whole.parameters,
            "gradients": (ends > 0) * sizes.ends.parameters + updates * in_flight,
            "optimizer state": updates * (sizes.running * sizes.wide.state + sizes.leaving * sizes.whole.state)
            + (ends > 1) * 2 * sizes.ends.state,
            "activations": whole["activations"].device,
            "all else": whole["all else"].device,
        }
        there = {
            "parameters": whole["parameters"].host,
            "optimizer state": state + sizes.ends.state * (updates and saved <= sizes.ahead),
            "activations": inside,
        }
        on_disk = {
            "parameters": whole["parameters"].disk,
            "optimizer state": whole["optimizer state"].disk,
            "activations": micro * sum(saved_of[: min(saved, files)]),
        }
        return StepMoment(
            name, {kind: TierBytes(device[kind], there.get(kind, 0.0), on_disk.get(kind, 0.0)) for kind in KINDS}
        )

    moments = [at("embedding", 0, passes=False)]
    moments += [at(f"forward of layer {n}", n + 1) for n in range(count)]
    moments.append(at("output head and loss", count, ends=1, passes=False))
    backward = list(reversed(range(count)))
    if run.optim.clip_norm is not None:
        moments += [at(f"backward of layer {n}, for the norm", count, ends=1) for n in backward]
    moments += [at(f"backward and update of layer {n}", n + 1, ends=1, updates=True) for n in backward]
    return [*moments, at("update of embedding and head", 0, ends=2, updates=True)]


def _inputs_in_memory(layer: int, files: int, micro: int, window: int) -> float:
    """Inputs of a layer that are in the host's memory when all layers have been through: of those in files, the ones in
    the window, spread over their layers."""
    return min(window, files * micro) / files if layer < files else micro


def _updated_after(run: RunConfig, whole: dict[str, TierBytes], sizes: StreamedSizes) -> list[StepMoment]:
    """Moments of a step whose optimizer state alone is in files: passes, then updates of one unit after the other."""
    count, passes, update = sizes.count, sizes.passes, sizes.update
    on_disk = {"optimizer state": whole["optimizer state"].disk}

    def at(name: str, saved: float, *, gradients: bool, updates: bool = False, ends: bool = False) -> StepMoment:
        device = dict(update if updates else passes)
        device["gradients"] *= gradients
        device["activations"] *= saved
        there = {"optimizer state": whole["optimizer state"].host - sizes.ends.state * (not ends)}
        return StepMoment(
            name, {kind: TierBytes(device[kind], there.get(kind, 0.0), on_disk.get(kind, 0.0)) for kind in KINDS}
        )

    moments = [at(f"forward of layer {n}", (n + 1) / count, gradients=False) for n in range(count)]
    moments += [at(f"backward of layer {n}", (n + 1) / count, gradients=True) for n in reversed(range(count))]
    close = max(0, count - sizes.ahead)
    moments += [
        at(f"update of layer {n}", 0, gradients=True, updates=True, ends=n >= close or count <= sizes.ahead)
        for n in range(count)
    ]
    return [*moments, at("update of embedding and head", 0, gradients=True, updates=True, ends=True)]


def step_tasks(run: RunConfig, mesh: MeshSpec, cluster: Cluster) -> list[Task]:
    """Programs of a step with files, and its reads and writes, in the order in which they are issued.

    What the window has at a turn is not read. A read waits until the window has a place.

    Args:
        run: with files; its mesh is legal.
        mesh, cluster: of the run.
    """
    sizes, window = streamed_sizes(run, mesh, cluster), run.disk.window
    found = predict_work(DeviceWork.of(without_files(run), mesh), cluster)
    seconds = found.compute + found.memory + sum(found.near.values()) + sum(found.far.values())
    parts, count = (4 if run.model.remat == "full" or run.disk.parameters else 3), sizes.count
    forward, backward = seconds / parts / count, seconds * (parts - 1) / parts / count
    if run.disk.parameters:  # a part of the forward pass is computed again
        backward = forward * (2 + recomputed_share(run))
    hardware = cluster.hardware
    read, write = (min(one, hardware.host) for one in (hardware.disk, hardware.disk_write or hardware.disk))
    layer, ends = sizes.whole, sizes.ends.state
    files = layers_in_files(run.disk, count)
    each = [run.accumulate * size for size in sizes.saved]
    tasks: list[Task] = []

    def fetch(name: str, size: float, after: tuple[str, ...]) -> tuple[str, ...]:
        """Issues a read; what waits for it waits for these."""
        known = {task.name for task in tasks}
        tasks.append(Task(name, "disk read", size / read, tuple(one for one in after if one in known)))
        return (name,)

    if run.disk.parameters:
        for n in range(count):
            there = fetch(f"read layer {n}", layer.parameters, (f"forward {n - window}",)) if n >= window else ()
            tasks.append(Task(f"forward {n}", "accelerator", forward, there))
            if n < files:
                tasks.append(Task(f"write input {n}", "disk write", each[n] / write, (f"forward {n}",)))
        passes = ["norm", "update"] if run.optim.clip_norm is not None else ["update"]
    else:
        tasks.append(Task("forward", "accelerator", count * forward))
        tasks.append(Task("backward", "accelerator", count * backward))
        passes = ["update"]
    for turn in passes:
        last = turn == "update"
        for place, n in enumerate(reversed(range(count))):
            room = f"{turn} {n + window}"
            there: tuple[str, ...] = ()
            if run.disk.parameters and place >= window:
                there += fetch(f"read layer {n} for its {turn}", layer.parameters, (room,))
            if n < files and place >= window:
                there += fetch(f"read input {n} for its {turn}", each[n], (room,))
            if last and (run.disk.parameters or place >= window):  # the window ends a step with what begins the next
                there += fetch(f"read state {n}", layer.state, (f"write {n + window}",))
            if last and ends and n == min(count, sizes.ahead) - 1:
                fetch("read state of the ends", ends, ())
            work, waits = (backward, there) if run.disk.parameters else (0.0, (*there, "backward"))
            tasks.append(Task(f"{turn} {n}", "accelerator", work, waits))
            if last:
                size = layer.state + (layer.parameters if run.disk.parameters else 0)
                tasks.append(Task(f"write {n}", "disk write", size / write, (f"update {n}",)))
    if ends:
        tasks.append(Task("update ends", "accelerator", 0.0, ("read state of the ends",)))
        tasks.append(Task("write ends", "disk write", ends / write, ("update ends",)))
    return tasks


def played_lanes(tasks: list[Task]) -> tuple[dict[str, list[tuple[float, float, str]]], float]:
    """Spans (start, end, name) of tasks by lane, and the seconds until the last one ends."""
    found = play(tasks)
    lanes = {"programs": "accelerator", "files read": "disk read", "files written": "disk write"}
    spans = {
        lane: [(*found[task.name], task.name) for task in tasks if task.resource == resource and task.seconds]
        for lane, resource in lanes.items()
    }
    return spans, max((end for _, end in found.values()), default=math.nan)
