"""Named values that streamed layers save, and their place: the policy and tier with which a step takes the least time.

Each value of a layer is kept on the device for the layer's own programs, computed again, in the host's memory, or in a
file, as ``model.remat``, ``disk.activations`` and ``disk.activation_layers`` say. All choices are tried: a set of named
values for all layers, or for the first or the last ones beside layers that save their input alone; and of each the
fewest layers with files whose others fit into the host's memory, because a layer more in files never takes less time.
The time is that of ``limited_step``: FLOPs that are computed again, and what files and the host's link take longer than
the passes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.models.remat import save_policy
from jaxllm.plan.capacity_table import disk_seconds, file_traffic, without_files
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.named_values import saved_of_group, value_bytes
from jaxllm.plan.formulas.step_time import predict_work
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.remat_solver import format_policies
from jaxllm.train import RunConfig
from jaxllm.train.model_flops import (
    hardware_flops_per_token,
    kept_of,
    recomputed_flops,
    train_flops_per_token,
)
from sharding import MeshSpec

Seconds = Callable[[float, float, float], float]
"""``(FLOPs of a token that are computed again, bytes in files, bytes that leave the device) -> seconds of a step``."""


class SavedRoom(NamedTuple):
    """Bytes of a device and its share of its host that streamed layers have for what they save.

    Attributes:
        host: of the host's memory, inputs of layers too.
        disk: of files.
        values: most bytes of the named values of a unit in a micro-batch, so that the device holds those of its
            programs.
    """

    host: float
    disk: float
    values: float


class PolicyCost(NamedTuple):
    """Cost of a policy, by unit: a repeat of a segment's layers.

    Attributes:
        saved: bytes of a device that a unit saves of a micro-batch, its input too.
        again: FLOPs of a token that are computed again.
    """

    saved: tuple[int, ...]
    again: tuple[float, ...]


class SavedChoice(NamedTuple):
    """Named values that streamed layers save, and their place.

    Attributes:
        policies: of each unit.
        files: units, the first ones, that have it in files.
        largest: most bytes that a unit saves of a micro-batch on a device.
        host, disk: bytes of a device's share of the host's memory, and of files.
        seconds: predicted, of a step.
    """

    policies: tuple[str, ...]
    files: int
    largest: int
    host: int
    disk: int
    seconds: float

    def of(self, run: RunConfig) -> RunConfig:
        """The streamed run with this choice."""
        units, files = iter(self.policies), self.files
        counts = [
            [(policy, len([*same])) for policy, same in itertools.groupby(itertools.islice(units, repeats))]
            for _, repeats in run.model.segments
        ]
        layers = 0 if files == len(self.policies) else files
        return dataclasses.replace(
            run,
            model=dataclasses.replace(run.model, remat=format_policies(run.model, counts)),
            disk=dataclasses.replace(run.disk, activations=files > 0, activation_layers=layers),
        )

    def __str__(self) -> str:
        """For people: policies, and places with their bytes."""
        rows = [(policy, len([*same])) for policy, same in itertools.groupby(self.policies)]
        said = ", ".join(f"{count} x {policy}" for policy, count in rows)
        where = f"{self.host / 2**30:.3f} GiB of the host"
        if self.files:
            where += f", and {self.disk / 2**30:.3f} in files, of the first {self.files}"
        return f"layers save {said}: {where}; {1e3 * self.seconds:.1f} ms a step by the plan"


def fastest(
    costs: Mapping[str, PolicyCost], micro_batches: int, window: int, room: SavedRoom, seconds: Seconds
) -> SavedChoice | None:
    """The choice of least time that fits, and of these the one with the fewest bytes; None: none fits.

    Args:
        costs: of each policy; "full" saves the least and is the other one of mixtures.
        micro_batches: of a step.
        window: units in files whose contents are in the host's memory.
        room: bytes that there are; that of the device is not checked here.
        seconds: of a step; no less with more bytes.
    """
    found = []
    for policies in _mixtures(tuple(costs), len(costs["full"].saved)):
        saved = [costs[policy].saved[unit] for unit, policy in enumerate(policies)]
        again = sum(costs[policy].again[unit] for unit, policy in enumerate(policies))
        few, many = 0, len(saved) + 1  # what the host has falls with the layers in files
        while few < many:
            middle = (few + many) // 2
            fits = middle == many or _host(saved, min(middle, len(saved)), micro_batches, window) <= room.host
            few, many = (few, middle) if fits else (middle + 1, many)
        disk = micro_batches * sum(saved[:few])
        if few > len(saved) or disk > room.disk:
            continue
        time = seconds(again, disk, micro_batches * sum(saved))
        host = _host(saved, few, micro_batches, window)
        found.append(SavedChoice(policies, few, max(saved), host, disk, time))
    return min(found, key=lambda one: (one.seconds, one.disk, one.host), default=None)


def _mixtures(policies: Sequence[str], units: int) -> Iterator[tuple[str, ...]]:
    """Policies of units: of all the same, or of the first or the last ones, with "full" for the others."""
    for policy in policies:
        yield (policy,) * units
        for count in range(1, units) if policy != "full" else ():
            yield (policy,) * count + ("full",) * (units - count)
            yield ("full",) * (units - count) + (policy,) * count


def _host(saved: Sequence[int], files: int, micro_batches: int, window: int) -> int:
    """Bytes in the host's memory (``saved_inputs.saved_host_bytes``)."""
    each = sorted((size for size in saved[:files] for _ in range(micro_batches)), reverse=True)
    return micro_batches * sum(saved[files:]) + sum(each[:window])


def policy_costs(work: DeviceWork) -> dict[str, PolicyCost]:
    """Costs of the policies that save named values, without those than which another saves and computes no more."""
    model, length = work.run.model, work.row
    names = sorted({name for block in set(model.blocks) for name in value_bytes(work, block)})
    sets = (kept for count in range(len(names) + 1) for kept in itertools.combinations(names, count))
    texts = [text for text in ("full", "attention", "elementwise") if set(kept_of(text)) <= set(names)]
    texts += map(save_policy, sets)
    points = []
    for text in texts:
        saved = (saved_of_group(work, group, kept_of(text)) for group, _ in model.segments)
        points.append([*saved, *(recomputed_flops(text, model, group, length) for group, _ in model.segments)])
    table, least = np.array(points), list[int]()
    for i in np.lexsort(table.T[::-1]):
        if not least or not np.all(table[least] <= table[i] * (1 + 1e-9), axis=1).any():
            least.append(int(i))

    def by_unit(numbers: Sequence[float]) -> Iterator[float]:
        for (_, repeats), number in zip(model.segments, numbers, strict=True):
            yield from itertools.repeat(number, repeats)

    count = len(model.segments)
    return {
        texts[i]: PolicyCost(tuple(map(int, by_unit(points[i][:count]))), tuple(by_unit(points[i][count:])))
        for i in least
    }


def saved_choice(run: RunConfig, mesh: MeshSpec, cluster: Cluster, room: SavedRoom) -> SavedChoice | None:
    """Fastest choice of what the layers of a streamed run save, and where; None: their inputs alone do not fit.

    Args:
        run: with its parameters in files; what it saves now does not count.
        mesh, cluster: of the run.
        room: bytes that there are.

    Raises:
        ConfigError, NotImplementedError: the planner has no formula for the run.
    """
    disk = dataclasses.replace(run.disk, activations=False, activation_layers=0)
    inputs = with_remat(dataclasses.replace(run, disk=disk), "full")
    work = DeviceWork.of(without_files(run), mesh)
    costs = {
        policy: cost
        for policy, cost in policy_costs(work).items()
        if max(cost.saved) - work.stream_bytes() <= room.values or policy == "full"
    }
    none, full = (
        predict_work(DeviceWork.of(with_remat(without_files(run), one), mesh), cluster).seconds
        for one in ("none", "full")
    )
    traffic, most = file_traffic(inputs, mesh, cluster), sum(costs["full"].again)

    def seconds(again: float, disk: float, away: float) -> float:
        own = none + (full - none) * again / most
        moved = traffic._replace(saved=disk, again=traffic.again and traffic.again + disk, away=away)
        return own + disk_seconds(moved, cluster.hardware, full / 4, own - full / 4)

    return fastest(costs, run.accumulate, run.disk.window, room, seconds)


def recomputed_share(run: RunConfig) -> float:
    """FLOPs that a run computes again over those that it does with layers that save their inputs alone."""
    length = run.data.seq_len
    least = train_flops_per_token(run.model, length)
    own, most = (hardware_flops_per_token(with_remat(run, one).model, length) for one in (run.model.remat, "full"))
    return (own - least) / (most - least)


def with_remat(run: RunConfig, remat: str) -> RunConfig:
    """The run with another ``model.remat``."""
    return dataclasses.replace(run, model=dataclasses.replace(run.model, remat=remat))
