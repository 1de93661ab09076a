"""Elastic runs with pipeline stages: layers are split anew over the stages left, and only what is missing moves."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import jax
from jax.sharding import NamedSharding

from jaxllm.checkpoint.memory.peer_storage import BytesRead
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.train import RunConfig
from jaxllm.train.run import run_mesh
from jaxllm.train.run_model import run_model
from jaxllm.train.step.step_builder import build_optimizer, run_state
from jaxllm.train.step.step_chain import saved_state
from tests.proofs.harness import proof
from tests.proofs.launch.elastic import ElasticRun, Plan, differences, harm, named
from tests.proofs.parallelism.processes import PROCESSES
from tests.recipes.elastic_run import elastic_run

PER_PROCESS = 2
Shard = tuple[tuple[int, int], ...]
"""First and last index, exclusive, of each dimension."""


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """Plan with pipeline stages for eight devices, and what becomes of it with fewer.

    Attributes:
        mesh: for all devices.
        layers, width: of the model.
        parallel: schedule, and layers of the stages.
        left: mesh and layers of the virtual stages for each number of devices left; no layers: as many each.
    """

    mesh: str
    layers: int
    parallel: ParallelConfig
    left: dict[int, tuple[str, tuple[int, ...]]]
    width: int = 24

    @property
    def plan(self) -> Plan:
        """The same for ``ElasticRun``."""
        depths = self.parallel.depths
        more = ("--parallel.depths", *map(str, depths)) if depths else ()
        return Plan(self.mesh, self.layers, self.width, ("--parallel.schedule", self.parallel.schedule, *more))

    def config(self, devices: int) -> RunConfig:
        """Settings of the run for so many devices."""
        with mock.patch.dict("os.environ", {"ELASTIC": json.dumps(self.plan.told)}):
            config = elastic_run()
        mesh, depths = self.left.get(devices, (self.mesh, self.parallel.depths))
        elastic = dataclasses.replace(config.elastic, enabled=True)
        parallel = dataclasses.replace(self.parallel, depths=depths)
        return dataclasses.replace(config, mesh=mesh, parallel=parallel, elastic=elastic)


PLANS = (
    StagePlan(
        "stage=4,data=2",
        8,
        ParallelConfig(),
        {6: ("stage=3,data=2", (2, 3, 3)), 4: ("stage=4,data=1", ()), 2: ("stage=2,data=1", ())},
    ),
    StagePlan(
        "stage=4,data=2",
        6,
        ParallelConfig(depths=(1, 2, 2, 1)),
        {6: ("stage=3,data=2", (1, 3, 2)), 4: ("stage=4,data=1", (1, 2, 2, 1)), 2: ("stage=2,data=1", ())},
    ),
    StagePlan(  # three stages do not divide four micro-batches
        "stage=4,data=2",
        8,
        ParallelConfig(schedule="interleaved"),
        {6: ("stage=2,data=1,fsdp=3", ()), 4: ("stage=4,data=1", ()), 2: ("stage=2,data=1", ())},
    ),
    StagePlan(
        "stage=4,data=2",
        8,
        ParallelConfig(schedule="v_half"),
        {6: ("stage=3,data=2", (1, 2, 2, 1, 1, 1)), 4: ("stage=4,data=1", ()), 2: ("stage=2,data=1", ())},
    ),
    StagePlan(  # three stages do not divide the width: embedding and head are on each
        "stage=4,data=2",
        12,
        ParallelConfig(),
        {6: ("stage=3,data=2", ()), 4: ("stage=4,data=1", ()), 2: ("stage=2,data=1", ())},
        width=16,
    ),
)
HISTORIES = ("kill", "host, kill", "two, kill")
CASES = [
    *((number, history) for history in HISTORIES for number in range(4)),
    *((4, history) for history in HISTORIES),
]
"""Numbers of the plans, and what is done to their processes, one after another."""


def shards_of(config: RunConfig, devices: int) -> dict[str, tuple[int, list[Shard]]]:
    """Bytes of an element, and the shard on each device, of each array of a run's state."""
    model = run_model(config)
    mesh = run_mesh(config, model, jax.devices()[:devices])
    state = saved_state(run_state(config, model, build_optimizer(config, model), mesh), ())
    found = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        indices = NamedSharding(mesh, leaf.sharding.spec).devices_indices_map(leaf.shape)
        spans = {
            device.id: tuple(part.indices(n)[:2] for part, n in zip(indices[device], leaf.shape, strict=True))
            for device in mesh.devices.flat
        }
        found[jax.tree_util.keystr(path)] = leaf.dtype.itemsize, [spans[device] for device in range(devices)]
    return found


def read_by_formula(plan: StagePlan, before: Sequence[int], after: Sequence[int], lost: Sequence[int]) -> BytesRead:
    """Bytes that the processes of one generation read of the snapshot of the one before: what each holds, once.

    A shard of the old mesh is on the host whose device is the first that held it, or on the first host left if that is
    lost with its memory; what all devices held is on the host of process 0.

    Args:
        plan: of the run.
        before, after: slots of both generations.
        lost: slots that were lost with their memory.
    """
    own = peers = 0
    sizes = [PER_PROCESS * len(slots) for slots in (before, after)]
    old, new = (shards_of(plan.config(size), size) for size in sizes)
    left = next(slot for slot in before if slot not in lost)
    for path, (width, shards) in old.items():
        holders: dict[Shard, int] = {}
        for device, shard in enumerate(shards):
            holders.setdefault(shard, before[device // PER_PROCESS])
        for rank, slot in enumerate(after):
            wanted = set(new[path][1][PER_PROCESS * rank : PER_PROCESS * (rank + 1)])
            for (shard, holder), one in itertools.product(holders.items(), wanted):
                common = [min(b, d) - max(a, c) for (a, b), (c, d) in zip(shard, one, strict=True)]
                size = width * math.prod(max(0, length) for length in common)
                if (left if holder in lost else holder) == slot:
                    own += size
                else:
                    peers += size
    return BytesRead(own, peers)


def meshes(run: ElasticRun) -> Iterator[tuple[int, str]]:
    """Number of devices and mesh of each generation, as process 0 says."""
    for devices, mesh in re.findall(r" parameters on (\d+) x \S+ \((.*)\)", run.said):
        yield int(devices), mesh.replace(", ", ",")


@proof(
    "launch",
    cases=CASES,
    quick=CASES[:1],
    sample=1,
    float64=True,
    parallel=False,
    bound={"curve": 1e-8, "parameters": 1e-8, "bytes": 0.0, "seconds": 120.0},
)
def elastic_stages(case: tuple[int, str]) -> dict[str, float]:
    """Runs of pipeline stages lose one process, one with its memory and then another, or two at once and then another:
    each generation has the mesh and the layers that are written down for its devices, reads from memory as many bytes
    of its own hosts and of others as the formula says, and the curve is that of one process that nothing happened to.
    """
    plan, kinds = PLANS[case[0]], case[1].split(", ")
    rng, steps = random.Random(f"{case}"), 12 + 8 * len(kinds)
    with tempfile.TemporaryDirectory() as folder, ElasticRun(Path(folder), steps, 600.0, plan.plan) as run:
        want = []
        run.until_generation(1, PROCESSES)
        for kind in kinds:
            run.until_step(run.step + rng.randint(3, 5))
            failures = harm(run, rng, kind)
            want.append((kind, failures))
        run.finish()
        assert sorted(named(run)) == sorted(itertools.chain.from_iterable(failures for _, failures in want))
        slots = [sorted(run.pids(generation)) for generation in range(1, len(kinds) + 2)]
        there = [PER_PROCESS * len(one) for one in slots]
        assert list(meshes(run)) == [(n, plan.left[n][0] if n in plan.left else plan.mesh) for n in there], run.said[
            -3000:
        ]
        layers = re.findall(r"^layers of the pipeline stages: (.*)$", run.said, re.MULTILINE)
        said = [", ".join(map(str, plan.left[n][1])) or "as many each" for n in there[1:]]
        changed = [text for n, text in zip(there[1:], said, strict=True) if plan.left[n][1] != plan.parallel.depths]
        assert layers == changed, run.said[-3000:]
        read = [BytesRead(one["own_bytes"], one["peer_bytes"]) for one in run.events("restored")]
        wanted = [
            read_by_formula(
                plan, before, after, [slot for _, slot in failures] if kind in ("host", "two hosts") else []
            )
            for before, after, (kind, failures) in zip(slots, slots[1:], want, strict=False)
        ]
        assert len(read) == len(wanted), (read, wanted)
        wrong = max(
            abs(a - b) for one, other in zip(read, wanted, strict=True) for a, b in zip(one, other, strict=True)
        )
        seconds = max(one["seconds"] for one in run.events("recovered"))
        return {**differences(run, steps, plan.plan), "bytes": float(wrong), "seconds": seconds}
