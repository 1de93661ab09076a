"""Replica groups of a collective: its devices, and the mesh axes or network that it uses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from jaxllm.compiler.hlo import HloError

_PAIRS = re.compile(r"source_target_pairs=\{(.*?\})\}")
_MESH = re.compile(
    r"replica_groups=\{?mesh\[(?P<sizes>.*?)\](?:, device_ids=\((?P<inside>.*?)\)\)|, device_ids=\((?P<ids>.*?)\))?"
    r" ?\{(?P<used>.*?)\}"
)
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\)?)?")


@dataclass(frozen=True)
class Placement:
    """Placement of a program's devices by number: a jitted program numbers the devices of its mesh in order.

    Attributes:
        axes: name and size of the mesh's axes.
        islands: slice (TPU) or node (GPU) of each device; a group that spans two of them leaves the fast network.
    """

    axes: tuple[tuple[str, int], ...]
    islands: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> Placement:
        """Placement on a mesh of real or described devices."""
        sizes = tuple((name, size) for name, size in mesh.shape.items())
        return cls(sizes, tuple(island_of(device) for device in mesh.devices.flat))

    def joins(self, groups: Iterable[Iterable[int]]) -> tuple[tuple[str, ...], int]:
        """Axes along which the devices of a group differ, and the most islands that a group spans."""
        varies, spans = set(), 1
        shape = [size for _, size in self.axes]
        for group in groups:
            members = np.array(sorted(group))
            places = np.unravel_index(members, shape)
            varies |= {name for (name, _), place in zip(self.axes, places, strict=True) if len(set(place)) > 1}
            spans = max(spans, len({self.islands[member] for member in members}))
        return tuple(name for name, _ in self.axes if name in varies), spans


def island_of(device: object) -> int:
    """Slice of a TPU, or node of a GPU, which jax runs as one process."""
    return int(getattr(device, "slice_index", None) or 0) if _is_tpu(device) else int(device.process_index)  # type: ignore[attr-defined]


def _is_tpu(device: object) -> bool:
    return getattr(device, "platform", "") == "tpu"


def groups(attributes: str, num_devices: int) -> list[list[int]]:
    """Replica groups of a collective from its attributes; for a collective-permute, pairs of source and target.

    Raises:
        HloError: the attributes name no groups in a known format.
    """
    if pairs := _PAIRS.search(attributes):
        return [[int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs[1])]
    if mesh := _MESH.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh["sizes"])}
        ids = _devices(mesh["inside"] or mesh["ids"], math.prod(sizes.values()))
        parts, chosen = [], []
        used = {name: (before, part) for name, before, part in _parts(mesh["used"])}
        for name, size in sizes.items():
            before, part = used.get(name, (1, 1))
            part = size if name in used and part == 0 else part
            chosen.append(len(parts) + 1)  # the middle of (before, part, after)
            parts += [before, part, size // (before * part)]
        rest = [i for i in range(len(parts)) if i not in chosen]
        width = math.prod(parts[i] for i in chosen)
        return ids.reshape(parts).transpose(rest + chosen).reshape(-1, width).tolist()
    if iota := _IOTA.search(attributes):
        shape = [int(n) for n in iota[1].split(",")]
        return _devices(iota[2], math.prod(shape)).reshape(shape).tolist()
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", attributes):
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    if "replica_groups={}" in attributes:
        return [list(range(num_devices))]
    raise HloError(f"cannot read the groups of a collective: {attributes[:200]}")


def _parts(used: str) -> list[tuple[str, int, int]]:
    """(axis, size before, size) of the axes that a group goes along; size 0 is the whole axis."""
    found = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", used)
    return [(name, int(before or 1), int(part or 0)) for name, before, part in found]


def _devices(order: str | None, count: int) -> np.ndarray:
    """Devices in the order of ``[4,8]T(1,0)`` or of a plain list; in their own order without either."""
    if order is None:
        return np.arange(count)
    if found := _ORDER.match(order):
        shape = [int(n) for n in found[1].split(",")]
        devices = np.arange(math.prod(shape)).reshape(shape)
        return (devices.transpose([int(n) for n in found[2].split(",")]) if found[2] else devices).reshape(-1)
    return np.array([int(n) for n in re.findall(r"\d+", order)])


def group_size(attributes: str, num_devices: int) -> int:
    """Number of devices that a collective joins, from its attributes; the largest group where they differ.

    For a collective-permute: the devices among which an array can travel, such as a ring.

    Raises:
        HloError: the attributes name no groups in a known format.
    """
    found = groups(attributes, num_devices)
    return _largestisland_of(found) if _PAIRS.search(attributes) else max(map(len, found))


def _largestisland_of(pairs: list[list[int]]) -> int:
    """Size of the largest set of devices joined by pairs of source and target."""
    island: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = island.get(source, {source}) | island.get(target, {target})
        for device in joined:
            island[device] = joined
    return max(map(len, island.values()), default=1)
