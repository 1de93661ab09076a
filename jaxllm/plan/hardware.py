"""Hardware table: FLOP/s, HBM, links, power and price of each device kind, by data sheet.

Peak FLOP/s and HBM are those of ``jaxllm.compiler.device_peaks`` and ``sharding.topology``; links, power and price
are defined here. A file changes or adds entries (``read``):

    [v6e]
    link = 88e9                # measured, bytes/s each way (Pipette, DATE 2024, plans with attained bandwidths)
    dollars_per_hour = 1.22    # what you pay

    [h800]
    like = "h100"              # device kind to compile for; also the default of all other fields
    link = 200e9

Sources. Rates of 8-bit matmuls: the sheets of `jaxllm.compiler.device_peaks`. ICI: cloud.google.com/tpu/docs,
"interconnect bandwidth per chip, bidirectional" of each generation, over its links and two directions. Data-centre
network of TPUs: jax-ml/scaling-book, roofline and TPU chapters. GPUs: NVIDIA data sheets of A100, H100, H200, B200
(NVLink, half of the total each way; TDP of SXM modules) and one 200 Gb/s (A100) or 400 Gb/s adapter a GPU (DGX
systems). Hosts: PCIe x16, generation 4 (A100) and 5; for TPUs it is not published and 16 GB/s are assumed (set host).
Disks: what hosts have differs, and 3 GB/s are assumed for each device, about one NVMe drive on PCIe 3 (set disk, and
disk_write where that is slower; or host_disk, which the devices of a host share).
Host memory: that of DGX systems, two processors of eight channels for eight GPUs (DDR4-3200 of A100, DDR5-4800 of
H100, -5600 of B200). Watts of TPU v4: arXiv:2304.01433, table 4; none are published for other TPUs. GPUs of 24 GB: data
sheets, and NVIDIA's whitepapers of GA102 and Ada for RTX 3090 and 4090; without NVLink (an RTX 3090 has it with a
bridge alone) they reach each other over PCIe 4.0 x16, as their hosts; of their network 25 Gb/s are assumed; CUDA
reports about 23.6 GiB of an RTX, and 22 of an A10G or L4, whose memory holds its ECC. Dollars: on-demand list prices of
cloud.google.com/tpu/pricing in US regions, September 2025; GPUs have no single list price.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.compiler.device_peaks import Peak, peak_of
from jaxllm.config import closest
from jaxllm.parallel.mesh_search import factorings
from sharding import ShardingError
from sharding.topology import GENERATIONS, Topology

OTHER_FIELDS = ("like", "tiers")
"""Fields of a hardware file besides the numbers: the kind that an entry extends, and a file of measured rates."""


class HardwareError(ValueError):
    """Illegal hardware file or device kind; the message says what is legal."""


@dataclass(frozen=True)
class Hardware:
    """Hardware of one JAX device, which on a TPU7x is half a chip.

    Attributes:
        name: device kind, the first part of a topology's name.
        flops: dense bfloat16, FLOP/s.
        flops_float32: float32 matmuls at JAX's default precision there, FLOP/s.
        flops_int8, flops_fp8: 8-bit matmuls, FLOP/s; the bfloat16 rate where the device has no units for them.
        bandwidth: HBM bandwidth, bytes/s.
        hbm_bytes: HBM capacity.
        link: bytes/s each way, of one of a TPU's ICI links, or of a GPU to all others of its node (NVLink).
        network: bytes/s each way, of a device to other slices or nodes (DCN).
        host: bytes/s each way, of a device to its host's memory.
        disk: bytes/s read, of a device's share of its host's disks.
        hop: latency in seconds of a message to a neighbour; on GPUs to any device of a node, or of another one.
        tile: matmul dimensions are rounded up to multiples of it.
        like: device kind that programs are compiled for; "" if they cannot be compiled.
        disk_write: bytes/s written, of that share; None: as fast as they are read.
        host_disk: bytes/s read of all disks of a host, which its devices share: a ``Cluster`` has their part in
            ``disk``; None: ``disk`` is given.
        host_memory: bandwidth of the host's memory, a device's share, bytes/s; None where not published.
        watts: power of a device at work; None where not published.
        dollars_per_hour: price of a device; None where there is no list price.
    """

    name: str
    flops: float
    flops_float32: float
    flops_int8: float
    flops_fp8: float
    bandwidth: float
    hbm_bytes: int
    link: float
    network: float
    host: float
    hop: float
    tile: int
    like: str
    disk: float = 3e9
    disk_write: float | None = None
    host_disk: float | None = None
    host_memory: float | None = None
    watts: float | None = None
    dollars_per_hour: float | None = None

    def __post_init__(self) -> None:
        rates = ("flops", "flops_float32", "flops_int8", "flops_fp8")
        for name in (*rates, "bandwidth", "hbm_bytes", "link", "network", "host", "disk", "tile"):
            if not getattr(self, name) > 0:
                raise HardwareError(f"hardware {self.name}: {name} = {getattr(self, name)}; give a positive number.")
        for name in ("disk_write", "host_disk"):
            if (rate := getattr(self, name)) is not None and not rate > 0:
                raise HardwareError(f"hardware {self.name}: {name} = {rate}; give a positive number.")

    def on_hosts(self, devices: int) -> Hardware:
        """The hardware where so many devices share the disks of a host."""
        return self if self.host_disk is None else dataclasses.replace(self, disk=self.host_disk / devices)


def _known(name: str, link: float, network: float, **more: Any) -> Hardware:
    kind = GENERATIONS[name]
    peak, hbm = peak_of(kind.device_kind), kind.hbm_bytes
    assert peak is not None
    assert hbm is not None
    return _made(name, peak, hbm, link, network, like=name, gpu=kind.platform == "gpu", **more)


def _made(
    name: str,
    peak: Peak,
    hbm: int,
    link: float,
    network: float,
    *,
    like: str,
    gpu: bool,
    tile: int,
    host: float = 64e9,
    int8: float = 1.0,
    fp8: float = 1.0,
    **more: Any,
) -> Hardware:
    # By default, float32 matmuls take one bfloat16 pass on TPUs, and TF32 at half rate on GPUs.
    slower = 2 if gpu else 1
    hop = 5e-6 if gpu else 1e-6
    rates = peak.flops, peak.flops / slower, int8 * peak.flops, fp8 * peak.flops, peak.bandwidth
    return Hardware(name, *rates, hbm, link, network, host, hop, tile, like, **more)


def _uncompiled(name: str, hbm: int, link: float, network: float, **more: Any) -> Hardware:
    peak = peak_of(UNCOMPILED[name])
    assert peak is not None
    return _made(name, peak, hbm, link, network, like="", gpu=True, tile=128, host=32e9, **more)


UNCOMPILED = {
    "a100": "NVIDIA A100-SXM4-80GB",
    "rtx3090": "NVIDIA GeForce RTX 3090",
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "a10g": "NVIDIA A10G",
    "l4": "NVIDIA L4",
}
"""JAX's ``device_kind`` of GPUs whose programs are not compiled without one."""

TABLE = {
    hardware.name: hardware
    for hardware in (
        _known("v4", 50e9, 6.25e9, tile=128, host=16e9, watts=192.0, dollars_per_hour=3.22),
        _known("v5e", 50e9, 3.125e9, tile=128, int8=2.0, host=16e9, dollars_per_hour=1.20),
        _known("v5p", 100e9, 6.25e9, tile=128, int8=2.0, host=16e9, dollars_per_hour=4.20),
        _known("v6e", 100e9, 12.5e9, tile=256, int8=2.0, host=16e9, dollars_per_hour=2.70),
        _known("tpu7x", 50e9, 6.25e9, tile=256, fp8=2.0, host=16e9),
        _uncompiled("a100", 85_097_971_712, 300e9, 25e9, int8=2.0, host_memory=51.2e9, watts=400.0),
        _uncompiled("rtx3090", 25_340_307_046, 32e9, 3.125e9, int8=4.0, watts=350.0),
        _uncompiled("rtx4090", 25_340_307_046, 32e9, 3.125e9, int8=4.0, fp8=2.0, watts=450.0),
        _uncompiled("a10g", 23_622_320_128, 32e9, 3.125e9, int8=2.0, watts=300.0),
        _uncompiled("l4", 23_622_320_128, 32e9, 3.125e9, int8=2.0, fp8=2.0, watts=72.0),
        _known("h100", 450e9, 50e9, tile=128, int8=2.0, fp8=2.0, host_memory=76.8e9, watts=700.0),
        _known("h200", 450e9, 50e9, tile=128, int8=2.0, fp8=2.0, host_memory=76.8e9, watts=700.0),
        _known("b200", 900e9, 50e9, tile=128, int8=2.0, fp8=2.0, host_memory=89.6e9, watts=1000.0),
    )
}
"""Hardware by name. A TPU7x's links are a chip's, shared by its two devices. Those of ``UNCOMPILED`` can be
planned for, not compiled for.
"""


def read(path: Path, table: Mapping[str, Hardware] | None = None) -> dict[str, Hardware]:
    """Hardware table with the changes and additions of a TOML or JSON file.

    Raises:
        HardwareError: the file is illegal; says where, and what is legal.
    """
    known = dict(TABLE if table is None else table)
    try:
        text = path.read_text()
        entries = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise HardwareError(f"hardware: cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise HardwareError(
            f"hardware: {path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}"
        ) from error
    fields = [field.name for field in dataclasses.fields(Hardware) if field.name not in ("name", "like")]
    for name, changes in entries.items():
        if not isinstance(changes, Mapping):
            raise HardwareError(
                f"hardware: {path}: {name} is not a table; write [{name}] with the changed fields below it."
            )
        like = changes.get("like", name)
        if like not in known:
            raise HardwareError(
                f"hardware: {path}: [{name}] is new: name the device kind it extends (like = ...): {', '.join(known)}."
            )
        for field, value in changes.items():
            if field not in (legal := (*OTHER_FIELDS, *fields)):
                raise HardwareError(
                    f"hardware: {path}: [{name}] has no {field!r}.{closest(field, legal)} Legal: {', '.join(legal)}."
                )
            if field not in OTHER_FIELDS and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise HardwareError(f"hardware: {path}: [{name}] {field} = {value!r}; give a number.")
        changed = {field: value for field, value in changes.items() if field not in OTHER_FIELDS}
        if "disk" in changed:
            changed = {"host_disk": None, **changed}
        if "tiers" in changes:
            changed = _measured(path.parent / str(changes["tiers"]), name) | changed
        known[name] = dataclasses.replace(known[like], name=name, **changed)
    return known


def _measured(file: Path, name: str) -> dict[str, float]:
    """Bytes/s from host memory to a device, and from the files of a host, by a file of ``jaxllm bench MODEL --tiers
    FILE``, in which one process reads alone."""
    try:
        found = json.loads(file.read_text())
        return {"host": float(found["host"]), "host_disk": float((found["disk_cold"] or found["disk"])[-1])}
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise HardwareError(
            f"hardware: [{name}] tiers = {file} has no measured rates ({error!r}); write it with `jaxllm bench MODEL "
            "--tiers FILE`, or give host and disk in bytes/s."
        ) from error


@dataclass(frozen=True)
class Cluster:
    """Cluster of devices that a run is planned for.

    Attributes:
        name: name as given.
        hardware: hardware of each device.
        topology: topology of the devices; for a kind that is not compiled for, one of the same form.
    """

    name: str
    hardware: Hardware
    topology: Topology

    @classmethod
    def parse(cls, name: str, table: Mapping[str, Hardware] | None = None) -> Cluster:
        """Cluster with the given topology name, of a device kind in the table.

        Raises:
            ShardingError: there is no such topology; lists the known ones.
            HardwareError: the device kind is not in the table.
        """
        table = TABLE if table is None else table
        count, star, one = name.strip().lower().rpartition("*")
        kind, colon, shape = one.partition(":")
        if kind not in table or kind == "cpu":
            topology = Topology.parse(name)  # lists the known ones, or it is a CPU
            raise HardwareError(f"{topology} has no hardware entry to plan for; legal: {', '.join(table)}.")
        form = table[kind].like or "h100"
        topology = Topology.parse(f"{count}{star}{form}{colon}{shape}")
        return cls(name.strip().lower(), table[kind].on_hosts(devices_of_host(topology)), topology)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.topology.num_devices

    def resized(self, factor: int) -> Cluster | None:
        """Cluster of the same kind, ``factor`` times as large, as cubic as possible; None if there is none."""
        shape = self.topology.shape
        if self.topology.platform == "gpu":
            return _cluster(self.hardware, [(shape[0] * factor, shape[1])])
        return _cluster(self.hardware, _slices(math.prod(shape) * factor, len(shape)))

    @classmethod
    def sized(cls, hardware: Hardware, devices: int) -> Cluster | None:
        """Cluster of that many devices: the most cubic slice, or nodes of up to eight GPUs; None if there is none."""
        kind = GENERATIONS[hardware.like or "h100"]
        if kind.platform == "gpu":
            return _cluster(hardware, [(devices // 8, 8) if devices % 8 == 0 else (1, devices)])
        chips = devices // kind.devices_per_chip
        return _cluster(hardware, _slices(chips, kind.example.count("x") + 1))


def devices_of_host(topology: Topology) -> int:
    """Devices that share a host: GPUs of a node; of TPUs those of four chips, or of a whole slice of up to 2x4."""
    if topology.platform == "gpu":
        return topology.shape[1]
    chips = math.prod(topology.shape)
    per_chip = topology.num_devices // (chips * topology.slices)
    return per_chip * (chips if chips <= 8 and len(topology.shape) == 2 else min(chips, 4))


def _slices(chips: int, dimensions: int) -> list[tuple[int, ...]]:
    return sorted({tuple(sorted(sides)) for sides in factorings(chips, dimensions)}, key=max)


def _cluster(hardware: Hardware, shapes: Sequence[tuple[int, ...]]) -> Cluster | None:
    """Cluster of the first shape that exists."""
    for sides in shapes:
        written = "x".join(map(str, sides))
        with contextlib.suppress(ShardingError):
            topology = Topology.parse(f"{hardware.like or 'h100'}:{written}")
            shared = hardware.on_hosts(devices_of_host(topology))
            return Cluster(f"{hardware.name}:{written}", shared, topology)
    return None
