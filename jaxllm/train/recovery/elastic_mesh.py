"""Elastic meshes: the mesh of a run for the devices left, and the layers of its pipeline stages.

``data`` and ``fsdp`` shrink, and other axes keep their sizes. Where the devices left do not divide so, there are fewer
pipeline stages, over which the layers are split anew.

    ElasWave (arXiv:2510.00606): layers are moved between pipeline stages so that the slowest has the least to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from jax.sharding import AbstractMesh

from jaxllm.parallel.mesh_search import factorings, nearest
from jaxllm.parallel.pipeline.schedule_generators import default_chunks
from jaxllm.parallel.pipeline.stage_layout import assign_units, split_units
from jaxllm.train.config import RunConfig
from jaxllm.train.run_rows import rows_on_mesh
from jaxllm.train.step.pipelined_loss import pipeline_plan
from sharding import MeshSpec, ShardingError

SHRINK = ("data", "fsdp")
"""Mesh axes over which a run may be split into fewer parts without another layout of its computation."""

Check = Callable[[RunConfig, AbstractMesh], None]
"""Check of a run's settings on a mesh: raises ValueError if the model, the batch or the settings do not fit it."""


def config_for_devices_left(config: RunConfig, devices: int, total: int, check: Check) -> RunConfig:
    """Settings of a run for the devices left: its mesh, and the layers of its pipeline stages.

    All devices left are used. The first of these that fits:

    1. The mesh of all devices with less of ``data`` and ``fsdp``: the one nearest to it.
    2. The same with fewer stages, as ``_preference`` ranks them.
    3. The nearest mesh with other sizes of any of its axes.

    Args:
        config: of the run, whose mesh is meant for all devices.
        devices: devices that are left.
        total: devices of the whole run.
        check: of settings on a mesh.

    Raises:
        ShardingError: there is no mesh of so many devices.
    """
    wanted = MeshSpec.parse(config.mesh)
    if devices == total:
        return config
    resolved = wanted.resolve(total)
    full = dict(resolved.axes)
    stages = full.get("stage", 1)

    def settings(spec: MeshSpec) -> RunConfig:
        made = with_stages(replace(config, mesh=str(spec)), dict(spec.axes).get("stage", 1))
        check(made, spec.abstract())
        return made

    def fitting(sizes: dict[str, int]) -> Iterator[tuple[MeshSpec, RunConfig]]:
        for spec in _meshes(sizes, devices):
            try:
                yield spec, settings(spec)
            except ValueError:
                continue

    for _, made in fitting(full):
        return made
    fewer = [one for count in range(stages - 1, 0, -1) for one in fitting({**full, "stage": count})]
    if fewer:
        return min(fewer, key=lambda one: _preference(one[1], dict(one[0].axes), full, devices / total))[1]

    def fits(mesh: AbstractMesh) -> None:
        check(with_stages(config, mesh.shape.get("stage", 1)), mesh)

    near = nearest(resolved, devices, fits, 1, ("tensor",))
    if not near:
        raise ShardingError(
            f"{devices} of {total} devices are left, and no mesh of so many fits this model and batch. Wait until more "
            "return (elastic.least of `jaxllm launch`), or use another batch size."
        )
    return settings(near[0])


def with_stages(config: RunConfig, stages: int) -> RunConfig:
    """Settings of a run with another number of pipeline stages: layers are split over them as over its own.

    Raises:
        ScheduleError: the model has fewer layers than virtual stages.
    """
    parallel = config.parallel
    if stages == 1:
        return replace(config, parallel=replace(parallel, depths=(), chunks=0))
    virtual = stages * (parallel.chunks or default_chunks(parallel.schedule))
    repeats = [repeats for _, repeats in config.model.segments]
    even = assign_units(repeats, virtual).even
    if len(parallel.depths) == virtual:
        return config
    plain = replace(parallel, depths=())
    depths = split_units(sum(repeats), virtual, parallel.depths)
    if len(set(depths)) == 1 and (even or not plain.in_place):
        return replace(config, parallel=plain)
    return replace(config, parallel=replace(parallel, depths=depths))


def _meshes(sizes: dict[str, int], devices: int) -> list[MeshSpec]:
    """Meshes of so many devices that have other sizes of data and fsdp, the nearest first."""
    others = {name: size for name, size in sizes.items() if name not in SHRINK}
    parts, rest = divmod(devices, math.prod(others.values()))
    if rest or not parts:
        return []

    def distance(split: tuple[int, ...]) -> float:
        return sum(abs(math.log2(size / sizes.get(name, 1))) for name, size in zip(SHRINK, split, strict=True))

    out = []
    for split in sorted(factorings(parts, len(SHRINK)), key=distance):
        found = {**sizes, **dict(zip(SHRINK, split, strict=True))}
        out.append(MeshSpec(tuple((name, size) for name, size in found.items() if size > 1 or name in sizes)))
    return out


def _preference(config: RunConfig, sizes: dict[str, int], full: dict[str, int], left: float) -> tuple[float, ...]:
    """Rank of a mesh with fewer stages; the least is best.

    First the state of a device: it is held in at least as many parts as before, times the share of the devices that is
    left, or else in as many as can be. Then the work of the busiest device: layers of its stage times rows of a
    micro-batch, with those of padding. Then more stages.

    Args:
        config: for the mesh.
        sizes, full: axes of the mesh, and of the run's on all devices.
        left: share of the devices that is left.
    """

    def parts(axes: dict[str, int]) -> int:
        return axes.get("stage", 1) * axes.get("fsdp", 1)

    mesh, rules, stages = MeshSpec(tuple(sizes.items())).abstract(), config.parallel.rules(), sizes.get("stage", 1)
    held = min(1.0, parts(sizes) / (parts(full) * left))
    split = config.accumulate * math.prod(mesh.shape.get(axis, 1) for axis in rules.mesh_axes("batch"))
    rows = rows_on_mesh(config.data.batch_size, mesh, rules, config.accumulate) // split
    return -held, layers_of_stages(config, stages)[0] * rows, -stages


def layers_of_stages(config: RunConfig, stages: int) -> list[int]:
    """Layers (or groups, where a pattern repeats) of each pipeline stage, most first."""
    if stages == 1:
        return [sum(repeats for _, repeats in config.model.segments)]
    schedule, depths = pipeline_plan(config, stages)
    counts = depths.counts.sum(1)
    each = [sum(int(counts[schedule.virtual(s, c)]) for c in range(schedule.chunks)) for s in range(stages)]
    return sorted(each, reverse=True)
