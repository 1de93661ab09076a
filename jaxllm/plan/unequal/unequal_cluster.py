"""Unequal cluster: groups of equal devices, and the bandwidths between them, from a TOML file.

    [[group]]
    name = "new"
    devices = "h100:2x8"
    network = "infiniband"

    [[group]]
    name = "old"
    devices = "a100:2x8"
    network = "roce"
    speed = 0.9              # share of the predicted rate that these devices attain; 1 where it is left out
    memory = 40              # GiB of a device, where it has less than its kind

    [network]                # NIC classes: bytes/s each way of a device to other nodes of its group
    infiniband = 50e9
    roce = 12.5e9

    [between]                # bytes/s each way of a device between two groups, or between two nodes
    default = 1.25e9
    "new old" = 3e9
    "old.0 old.1" = 6e9      # measured: nodes are counted from 0

Devices are planned for in units: a TPU slice, or a node of GPUs. Nodes of different sizes are cut into units of their
largest common size.

Legend: U units.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.config import closest
from jaxllm.plan.hardware import TABLE, Cluster, Hardware, HardwareError
from jaxllm.plan.layout_search import memory_limit
from sharding.topology import GIB

FIELDS = ("name", "devices", "network", "speed", "memory")
TABLES = ("group", "network", "between")


@dataclass(frozen=True)
class DeviceGroup:
    """Equal devices on one network.

    Attributes:
        name: of the group.
        cluster: its devices, with the bandwidth of their network and the memory that they have.
        speed: share of the predicted rate that they attain.
    """

    name: str
    cluster: Cluster
    speed: float = 1.0

    @property
    def nodes(self) -> int:
        """Number of TPU slices, or of nodes of GPUs."""
        topology = self.cluster.topology
        return topology.slices if topology.platform == "tpu" else topology.shape[0]

    @property
    def limit(self) -> int:
        """Bytes of a device that a layout may fill."""
        return memory_limit(self.cluster)


@dataclass(frozen=True)
class DeviceUnit:
    """Neighbouring devices of one node or slice.

    Attributes:
        group: index of its group.
        node: place of its node in the group.
        part: place in the node.
    """

    group: int
    node: int
    part: int


@dataclass(frozen=True)
class UnequalCluster:
    """Groups of devices in units of equal size, and the links between them.

    Attributes:
        name: of the file.
        groups: of devices.
        units: of the groups in order, node by node: devices are numbered unit by unit.
        each: devices of a unit.
        links: bytes/s each way of a device of one unit to one of another; infinite on the diagonal. [U U]
    """

    name: str
    groups: tuple[DeviceGroup, ...]
    units: tuple[DeviceUnit, ...]
    each: int
    links: tuple[tuple[float, ...], ...]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.units) * self.each

    @property
    def platform(self) -> str:
        """Platform of all devices, "gpu" or "tpu"."""
        return self.groups[0].cluster.topology.platform

    def as_if_equal(self, group: int) -> Cluster:
        """Cluster of as many units, all of a group's kind, whose network costs nothing."""
        return _as_if_equal(self.groups[group].cluster, len(self.units), self.each)

    def describe(self, unit: int) -> str:
        """Name of a unit: GROUP.NODE, and the part of a node that is cut."""
        at = self.units[unit]
        cut = sum(other.group == at.group and other.node == at.node for other in self.units) > 1
        return f"{self.groups[at.group].name}.{at.node}" + (f"/{at.part}" if cut else "")


@functools.lru_cache(maxsize=64)
def _as_if_equal(own: Cluster, units: int, each: int) -> Cluster:
    hardware = dataclasses.replace(own.hardware, network=1e30)
    kind, sides = own.name.rpartition("*")[2].split(":")
    shape = f"{units}*{kind}:{sides}" if own.topology.platform == "tpu" else f"{kind}:{units}x{each}"
    return dataclasses.replace(Cluster.parse(shape, {kind: hardware}), hardware=hardware)


def read_cluster(path: Path, table: Mapping[str, Hardware] = TABLE) -> UnequalCluster:
    """Unequal cluster of a TOML file.

    Raises:
        HardwareError: the file is illegal or contradicts itself; says where, and what is legal.
        ShardingError: there is no such topology; lists the nearest ones.
    """
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise HardwareError(f"cluster: cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise HardwareError(f"cluster: {path} is not valid TOML: {error}") from error
    for name in found:
        if name not in TABLES:
            raise HardwareError(
                f"cluster: {path} has {name!r}.{closest(name, TABLES)} Legal: [[group]], [network], [between]."
            )
    listed, classes, between = found.get("group", []), found.get("network", {}), found.get("between", {})
    if not isinstance(listed, list) or not listed or not all(isinstance(one, Mapping) for one in listed):
        raise HardwareError(f"cluster: {path} has no [[group]]; give one for each kind of devices.")
    for name, given in (("network", classes), ("between", between)):
        if not isinstance(given, Mapping):
            raise HardwareError(f"cluster: {path}: {name} = {given!r}; write [{name}] with names and bytes/s below it.")
    networks = {name: _positive(path, f"network.{name}", rate) for name, rate in classes.items()}
    groups = tuple(_group(path, one, networks, table) for one in listed)
    _check_groups(path, groups, networks, [one.get("network") for one in listed])
    units, each = _units(path, groups)
    return UnequalCluster(path.name, groups, units, each, _links(path, between, groups, units))


def _group(path: Path, fields: Mapping[str, Any], networks: Mapping[str, float], table: Any) -> DeviceGroup:
    for field in fields:
        if field not in FIELDS:
            raise HardwareError(
                f"cluster: {path}: a group has {field!r}.{closest(field, FIELDS)} Legal: {', '.join(FIELDS)}."
            )
    for field in ("name", "devices"):
        if not isinstance(fields.get(field), str):
            raise HardwareError(f"cluster: {path}: a group has no {field}; give name and devices as text.")
    name = fields["name"]
    if not re.fullmatch(r"[\w-]+", name) or name == "default":
        raise HardwareError(
            f"cluster: {path}: a group is named {name!r}; give letters, digits, _ and - alone, and not default."
        )
    cluster = Cluster.parse(fields["devices"], table)
    hardware = cluster.hardware
    if "network" in fields:
        if (network := fields["network"]) not in networks:
            raise HardwareError(
                f"cluster: {path}: group {name!r} is on network {network!r}, of which [network] has no bandwidth."
                f"{closest(str(network), tuple(networks))} It has {', '.join(networks) or 'none'}."
            )
        hardware = dataclasses.replace(hardware, network=networks[network])
    if "memory" in fields:
        memory = round(_positive(path, f"memory of group {name!r}", fields["memory"]) * GIB)
        if memory > hardware.hbm_bytes:
            raise HardwareError(
                f"cluster: {path}: a device of group {name!r} has memory = {fields['memory']} GiB, but {hardware.name} "
                f"has {hardware.hbm_bytes / GIB:.2f}; give that or less, or change the kind by --hardware."
            )
        hardware = dataclasses.replace(hardware, hbm_bytes=memory)
    speed = _positive(path, f"speed of group {name!r}", fields.get("speed", 1.0))
    if speed > 1:
        raise HardwareError(
            f"cluster: {path}: speed of group {name!r} = {speed:g} is a share of the predicted rate: give 1 or less, "
            "or change the rates of the kind by --hardware."
        )
    return DeviceGroup(name, dataclasses.replace(cluster, hardware=hardware), speed)


def _check_groups(
    path: Path, groups: Sequence[DeviceGroup], networks: Mapping[str, float], used: Sequence[str | None]
) -> None:
    names = [group.name for group in groups]
    if twice := [name for name in names if names.count(name) > 1]:
        raise HardwareError(f"cluster: {path} has two groups named {twice[0]!r}; give each a name of its own.")
    if idle := sorted(set(networks) - set(used)):
        raise HardwareError(f"cluster: {path}: no group is on network.{idle[0]}; leave it out, or name it in a group.")
    platforms = {group.name: group.cluster.topology.platform for group in groups}
    if len(set(platforms.values())) > 1:
        said = ", ".join(f"{name} of {platform.upper()}s" for name, platform in platforms.items())
        raise HardwareError(
            f"cluster: {path} has {said}: one program is compiled for one platform; plan each with a file of its own."
        )


def _units(path: Path, groups: Sequence[DeviceGroup]) -> tuple[tuple[DeviceUnit, ...], int]:
    sizes = [group.cluster.devices // group.nodes for group in groups]
    each = math.gcd(*sizes)
    if groups[0].cluster.topology.platform == "tpu" and len(set(sizes)) > 1:
        said = ", ".join(f"{group.name} of {size}" for group, size in zip(groups, sizes, strict=True))
        raise HardwareError(
            f"cluster: {path}: slices of different sizes ({said} devices): a mesh has equal parts, and a slice is not "
            f"cut. The nearest: slices of {min(sizes)} devices in all groups."
        )
    units = tuple(
        DeviceUnit(g, node, part)
        for g, (group, size) in enumerate(zip(groups, sizes, strict=True))
        for node in range(group.nodes)
        for part in range(size // each)
    )
    if len(units) < 2:
        raise HardwareError(
            f"cluster: {path} has one slice or node alone, which is --on {groups[0].cluster.name}; give another group."
        )
    return units, each


def _links(
    path: Path, fields: Mapping[str, Any], groups: Sequence[DeviceGroup], units: Sequence[DeviceUnit]
) -> tuple[tuple[float, ...], ...]:
    given = _given(path, fields, groups)
    default = None if "default" not in fields else _positive(path, "between.default", fields["default"])
    if default is not None and len(groups) == 1:
        raise HardwareError(f"cluster: {path}: between.default is for several groups, and there is one; leave it out.")

    def link(one: DeviceUnit, other: DeviceUnit) -> float:
        if one == other:
            return math.inf
        first, second = groups[one.group], groups[other.group]
        if (one.group, one.node) == (other.group, other.node):
            return first.cluster.hardware.link
        nodes = frozenset({f"{first.name}.{one.node}", f"{second.name}.{other.node}"})
        if nodes in given:
            return given[nodes]
        if one.group == other.group:
            return first.cluster.hardware.network
        rate = given.get(frozenset({first.name, second.name}), default)
        if rate is None:
            raise HardwareError(
                f"cluster: {path}: no bandwidth between {first.name} and {second.name}; give between.default or "
                f'"{first.name} {second.name}".'
            )
        if rate > (most := min(first.cluster.hardware.network, second.cluster.hardware.network)):
            slower = min((first, second), key=lambda group: group.cluster.hardware.network)
            raise HardwareError(
                f"cluster: {path}: {rate:g} bytes/s between {first.name} and {second.name}, but a device of "
                f"{slower.name} has {most:g} to other nodes at all; give that or less."
            )
        return rate

    links = tuple(tuple(link(one, other) for other in units) for one in units)
    alike = len({rate for row in links for rate in row if math.isfinite(rate)}) == 1
    if len(groups) == 1 and alike:
        raise HardwareError(
            f"cluster: {path} has one group of equal links, which is --on {groups[0].cluster.name}; give another "
            f'group, or bandwidths of nodes, such as "{groups[0].name}.0 {groups[0].name}.1" below [between].'
        )
    return links


def _given(path: Path, fields: Mapping[str, Any], groups: Sequence[DeviceGroup]) -> dict[frozenset[str], float]:
    """Bandwidths of pairs of groups, or of nodes, by their names."""
    of = {group.name: group for group in groups}
    given: dict[frozenset[str], float] = {}
    for words, value in fields.items():
        if words == "default":
            continue
        pair, rate = words.split(), _positive(path, f"between.{words!r}", value)
        if len(pair) != 2 or pair[0] == pair[1] or ("." in pair[0]) != ("." in pair[1]):
            raise HardwareError(
                f"cluster: {path}: between.{words!r}: name two groups, or two nodes as GROUP.NUMBER, separated by a "
                f"space; the groups are {', '.join(of)}."
            )
        for word in pair:
            name, _, node = word.partition(".")
            if name not in of:
                raise HardwareError(
                    f"cluster: {path}: between.{words!r}: there is no group {name!r}.{closest(name, tuple(of))} The "
                    f"groups are {', '.join(of)}."
                )
            if "." in word and not (node.isdecimal() and int(node) < of[name].nodes):
                raise HardwareError(
                    f"cluster: {path}: between.{words!r}: group {name!r} has the nodes 0 to {of[name].nodes - 1}, not "
                    f"{node!r}."
                )
        if frozenset(pair) in given:
            raise HardwareError(f"cluster: {path}: between has {words!r} and {' '.join(reversed(pair))!r}; give one.")
        if "." in pair[0]:
            slower = min((of[word.partition(".")[0]] for word in pair), key=lambda one: one.cluster.hardware.network)
            if rate > slower.cluster.hardware.network:
                raise HardwareError(
                    f"cluster: {path}: {rate:g} bytes/s between {pair[0]} and {pair[1]}, but a device of {slower.name} "
                    f"has {slower.cluster.hardware.network:g} to other nodes at all; give that or less."
                )
        given[frozenset(pair)] = rate
    for one, other in itertools.combinations(of, 2):
        both = [*itertools.product(*([f"{name}.{n}" for n in range(of[name].nodes)] for name in (one, other)))]
        if frozenset({one, other}) in given and all(frozenset(pair) in given for pair in both):
            raise HardwareError(
                f'cluster: {path}: between has "{one} {other}" and all of their nodes\' bandwidths; leave one out.'
            )
    return given


def _positive(path: Path, what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise HardwareError(f"cluster: {path}: {what} = {value!r}; give a positive number.")
    return float(value)
