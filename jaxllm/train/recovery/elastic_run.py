"""Elastic runs: what a run does differently where an elastic supervisor has started it.

The mesh is made for the devices that are there: its axes ``data`` and ``fsdp`` shrink, and others keep their sizes if
they can. The global batch stays the same, with rows of padding if it does not divide (``jaxllm.train.run_rows``).

    ElasWave (arXiv:2510.00606): global batch and gradient scale are kept on the devices left, from in-memory snapshots.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable

from jax.sharding import AbstractMesh

from jaxllm.checkpoint import CheckpointConfig, MemoryConfig
from jaxllm.config import ConfigError
from jaxllm.observe.event_log import FAILURES
from jaxllm.parallel.elastic.run_generation import RunGeneration, detect_generation
from jaxllm.parallel.mesh_search import factorings, nearest
from jaxllm.train.config import RunConfig
from sharding import MeshSpec, ShardingError

SHRINK = ("data", "fsdp")
"""Mesh axes over which a run may be split into fewer parts without another layout of its computation."""


def elastic_generation(config: RunConfig) -> RunGeneration | None:
    """Generation of this process; None for runs that are not elastic.

    Raises:
        ConfigError: the run is elastic, and no elastic supervisor has started this process.
    """
    if not config.elastic.enabled:
        return None
    found = detect_generation(os.environ)
    if found is None:
        raise ConfigError(
            "--elastic: nothing would start the processes that are left again. Start the run by a supervisor: "
            "`jaxllm launch local -n PROCESSES -- train RECIPE --elastic`, or leave --elastic out."
        )
    return found


def elastic_checkpoint(config: RunConfig) -> CheckpointConfig:
    """Checkpoint settings of a run: with snapshots in memory if it is elastic."""
    if not config.elastic.enabled or config.checkpoint.memory is not None:
        return config.checkpoint
    return dataclasses.replace(config.checkpoint, memory=MemoryConfig(every=config.elastic.every))


def failed_at(generation: RunGeneration | None) -> float | None:
    """Time of the first failure before a generation, in seconds since 1970; None if there was none."""
    events = generation.events if generation is not None else ()
    return min((event["time"] for event in events if event["event"] in FAILURES), default=None)


def mesh_for_devices_left(wanted: MeshSpec, devices: int, total: int, fits: Callable[[AbstractMesh], None]) -> MeshSpec:
    """Mesh of a run for the devices left: that of all devices with less of ``data`` and ``fsdp``.

    Args:
        wanted: mesh of the run.
        devices: devices that are left.
        total: devices of the whole run, for which ``wanted`` is meant.
        fits: raises ValueError for a mesh that the model or the batch does not fit.

    Raises:
        ShardingError: there is no mesh of so many devices.
    """
    full = dict(wanted.resolve(total).axes)
    if devices == total:
        return wanted
    others = {name: size for name, size in full.items() if name not in SHRINK}
    parts, rest = divmod(devices, math.prod(others.values()))

    def distance(sizes: tuple[int, ...]) -> float:
        pairs = zip(SHRINK, sizes, strict=True)
        return sum(abs(math.log2(size / full.get(name, 1))) for name, size in pairs)

    for sizes in sorted(factorings(parts, len(SHRINK)), key=distance) if not rest else ():
        shrunk = {**others, **dict(zip(SHRINK, sizes, strict=True))}
        order = [*full, *(name for name in SHRINK if name not in full)]
        spec = MeshSpec(tuple((name, shrunk[name]) for name in order if shrunk[name] > 1 or name in full))
        try:
            fits(spec.abstract())
        except ValueError:
            continue
        return spec
    near = nearest(wanted.resolve(total), devices, fits, 1, ("tensor",))
    if not near:
        raise ShardingError(
            f"{devices} of {total} devices are left, and no mesh of so many fits this model and batch. Wait until more "
            "return (elastic.least of `jaxllm launch`), or use another batch size."
        )
    return near[0]
