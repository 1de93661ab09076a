"""Placed layouts: the layout search over places for states and activations too, on the device, its host and disks.

The meshes and micro-batches are those of ``layout_search``, the places those of ``capacity_table``, which training has.
A layout whose state leaves the device moves more than one that keeps it, so it is listed where it is the fastest that
fits of its mesh. Pipelines have no such places.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from jaxllm.config import ConfigError
from jaxllm.plan import layout_search
from jaxllm.plan.capacity_table import (
    PLACEMENTS,
    RunPlacement,
    disk_seconds,
    file_traffic,
    run_kinds,
    summed,
    with_windows,
    without_files,
)
from jaxllm.plan.formulas.calibration import DEFAULT, Calibration
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.memory_estimate import MemoryEstimate
from jaxllm.plan.formulas.step_time import predict_work
from jaxllm.plan.formulas.tier_bytes import TierBytes
from jaxllm.plan.hardware import Cluster, devices_of_host
from jaxllm.plan.layout_search import LayoutSearchResult, ParallelLayout
from jaxllm.plan.tiers.saved_choice import SavedChoice, SavedRoom, recomputed_share, saved_choice, with_remat
from jaxllm.train import RunConfig
from jaxllm.train.disk.streamed_bytes import value_copies
from sharding import MeshSpec


def search_places(
    run: RunConfig, cluster: Cluster, available: TierBytes, directory: str, *, calibration: Calibration = DEFAULT
) -> LayoutSearchResult:
    """Searches layouts and places of a run; those that fit, fastest first, the best one of each mesh.

    Args:
        run, cluster, calibration: as for ``layout_search.search``.
        available: bytes of a device, and its share of its host's memory and disks.
        directory: of the files.

    Raises:
        ConfigError: see ``layout_search.search``, or the run says where its states are.
    """
    if run.disk.directory or run.host.optimizer or run.host.params:
        raise ConfigError(
            f"{run.name} says where its states are (host, disk.directory), which the search decides: leave it out."
        )
    found = layout_search.search(run, cluster, calibration=calibration)
    layouts, tried = list(found.layouts), found.tried
    for mesh in layout_search.meshes(run, cluster):
        if dict(mesh.axes).get("stage", 1) > 1:
            continue
        plain = _families(run, mesh, directory, _process_bytes(cluster, available))
        for runs in itertools.chain(plain, _saving(run, mesh, directory, cluster, available)):
            for laid in runs:
                tried += 1
                kinds = run_kinds(laid, mesh, cluster)
                if not summed(kinds).lacking(available):
                    layouts.append(_predicted(laid, mesh, kinds, cluster, calibration, int(available.device)))
                    break  # the rest of the family computes or communicates more, or has a smaller window
    layouts.sort(key=lambda layout: (round(layout.time.seconds, 9), layout.memory.total, str(layout.mesh)))
    seen = {layout.mesh: layout for layout in reversed(layouts)}
    best = tuple(layout for layout in layouts if seen[layout.mesh] is layout)
    return LayoutSearchResult(best, None if best else found.nearest, tried)


def _families(run: RunConfig, mesh: MeshSpec, directory: str, size: int) -> Iterator[Iterator[RunConfig]]:
    """Candidate runs by place and remat, in groups whose first fitting member is the fastest."""
    plain: dict[tuple[str, int | str], list[RunConfig]] = {}
    for laid in layout_search.legal_layouts(run, mesh):
        plain.setdefault((laid.model.remat, laid.parallel.zero), []).append(laid)
    for place in PLACEMENTS[1:]:
        for (remat, _), group in plain.items():
            streamed = place.placement.parameters == "disk"
            if remat != "full" and (streamed or place.remat != "full"):
                continue
            placed = dataclasses.replace(place, remat=remat if place.remat == "full" else place.remat)
            yield (one for laid in group for one in _placed(laid, placed, mesh, directory, size))


def _saving(
    run: RunConfig, mesh: MeshSpec, directory: str, cluster: Cluster, available: TierBytes
) -> Iterator[Iterator[RunConfig]]:
    """Candidate runs with streamed layers that save the named values with which the step is fastest, as ``_families``.

    Layers that save their inputs alone are in these.
    """
    place = next(place for place in PLACEMENTS if place.placement.parameters == "disk")
    groups: dict[int | str, list[RunConfig]] = {}
    for laid in layout_search.legal_layouts(run, mesh):
        if laid.model.remat == "full":
            groups.setdefault(laid.parallel.zero, []).append(laid)

    def choices(group: list[RunConfig]) -> Iterator[RunConfig]:
        for laid in group:  # of windows any may be the fastest: a smaller one leaves more to values
            streamed = _placed(laid, place, mesh, directory, _process_bytes(cluster, available))
            found = [(one, values_within(one, mesh, cluster, available)) for one in streamed]
            fitting = [(one, choice) for one, choice in found if choice is not None]
            if fitting:
                one, choice = min(fitting, key=lambda pair: pair[1].seconds)
                yield choice.of(one)

    yield from map(choices, groups.values())


def values_within(run: RunConfig, mesh: MeshSpec, cluster: Cluster, available: TierBytes) -> SavedChoice | None:
    """Values that layers of a streamed run save in the least time; None: their inputs alone, or nothing fits.

    Args:
        run: whose layers save their inputs in the host's memory.
        mesh, cluster: of the run.
        available: bytes of a device, and its share of its host's memory and disks.
    """
    kinds = run_kinds(run, mesh, cluster)
    takes, saved = summed(kinds), kinds["activations"].host
    room = SavedRoom(
        available.host - takes.host + saved,
        available.disk - takes.disk,
        (available.device - takes.device) / value_copies(),
    )
    choice = None if room.values <= 0 else saved_choice(run, mesh, cluster, room)
    return None if choice is None or set(choice.policies) == {"full"} else choice


def _process_bytes(cluster: Cluster, available: TierBytes) -> int:
    """Bytes of files of a process, which has the devices of a host."""
    return int(available.disk) * devices_of_host(cluster.topology)


def _placed(laid: RunConfig, place: RunPlacement, mesh: MeshSpec, directory: str, size: int) -> Iterator[RunConfig]:
    """The run in a place, with its window and smaller ones, as far as training supports it."""
    for one in with_windows(place.of(laid)):
        if one.disk.directory:
            one = dataclasses.replace(one, disk=dataclasses.replace(one.disk, directory=directory, bytes=size))
        if (not one.disk.directory or size) and layout_search.is_supported(one, mesh):
            yield one


def _predicted(
    run: RunConfig,
    mesh: MeshSpec,
    kinds: dict[str, TierBytes],
    cluster: Cluster,
    calibration: Calibration,
    limit: int,
) -> ParallelLayout:
    """Layout with bytes by kind, whose step takes what files take too."""
    sizes = {name: round(of.device) for name, of in kinds.items()}
    whole = summed(kinds)
    memory = MemoryEstimate(
        sizes["parameters"],
        sizes["optimizer state"],
        0,
        sizes["gradients"],
        0,
        sizes["activations"],
        sizes["all else"],
        host=round(whole.host),
        disk=round(whole.disk),
    )
    time = predict_work(DeviceWork.of(without_files(run), mesh), cluster, calibration)
    if run.disk.directory:
        passes = time.compute + time.memory + sum(time.near.values()) + sum(time.far.values())
        forward = passes / (4 if run.model.remat == "full" or run.disk.parameters else 3)
        if run.disk.parameters and run.model.remat != "full":
            none = predict_work(DeviceWork.of(with_remat(without_files(run), "none"), mesh), cluster, calibration)
            less = (time.seconds - none.seconds) * (1 - recomputed_share(run))
            time, passes = dataclasses.replace(time, compute=time.compute - less), passes - less
        traffic = file_traffic(run, mesh, cluster)
        time = dataclasses.replace(time, disk=disk_seconds(traffic, cluster.hardware, forward, passes - forward))
    return ParallelLayout(run, mesh, memory, time, limit)
