"""Device topologies by name, without the devices, for ahead-of-time compilation for TPU and GPU pods.

    name             devices                                        compiler comes with
    v6e:8x8          TPU slice of 8 x 8 chips (v4 and v5p: 4x4x4)   pip install 'jaxllm[tpu]'
    4*v6e:8x8        four such slices, joined by the data-centre network
    h100:8x8         8 nodes of 8 GPUs                              pip install 'jaxllm[aot-gpu]'
    cpu:8            8 simulated devices of this machine            jax itself

A process must be set up for a compiler before JAX starts; ``sharding.isolate.run_isolated`` runs a function in a child
process with that setup.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from sharding.mesh import ShardingError

GIB = 2**30


class CompilerMissing(RuntimeError):
    """Compiler for a topology that this process does not have; the message says what to install or to set."""


@dataclass(frozen=True)
class Generation:
    """Accelerator generation.

    Attributes:
        platform: ``"tpu"``, ``"gpu"`` or ``"cpu"``.
        device_kind: ``jax.Device.device_kind`` of the real device.
        example: a legal shape, shown in messages.
        hbm_bytes: device memory available to a program, in bytes. TPU: as the compiler reports, in hundredths of a GiB
            (a little less than the chip has). GPU: as the driver reports; a JAX process takes 3/4 of it unless
            ``XLA_PYTHON_CLIENT_MEM_FRACTION`` is set, and NCCL needs some too. None: not known (CPU).
        max_chips: chips in the largest slice.
        devices_per_chip: JAX devices on a TPU chip (v4 and v5p fuse their two cores, "megacore"; tpu7x does not).
        target: GPU only: the fields of XLA's ``GpuTargetConfigProto`` in which the generations differ.
    """

    platform: str
    device_kind: str
    example: str
    hbm_bytes: int | None
    max_chips: int
    devices_per_chip: int = 1
    target: str = ""


# Source of the GPU specifications: openxla/xla, xla/backends/gpu/target_config/specs.
_HOPPER = "core_count: 132 l2_cache_size: 52428800 clock_rate_ghz: 1.98 cuda_compute_capability { major: 9 %s }"
_BLACKWELL = "core_count: 148 l2_cache_size: 132644864 clock_rate_ghz: 1.965 cuda_compute_capability { major: 10 %s }"
_ACCELERATED = "feature_extension: ACCELERATED_FEATURES"  # sm_90a, sm_100a: wgmma and tcgen05 need them
_H100 = "memory_bandwidth: 3352320000000 " + _HOPPER % _ACCELERATED
_H200 = "memory_bandwidth: 4800000000000 " + _HOPPER % _ACCELERATED
_B200 = "memory_bandwidth: 7672320000000 " + _BLACKWELL % _ACCELERATED

GENERATIONS = {
    "v4": Generation("tpu", "TPU v4", "2x2x4", int(30.75 * GIB), 4096),
    "v5e": Generation("tpu", "TPU v5 lite", "16x16", int(15.75 * GIB), 256),
    "v5p": Generation("tpu", "TPU v5", "4x4x4", int(95.73 * GIB), 6144),
    "v6e": Generation("tpu", "TPU v6 lite", "8x8", int(31.24 * GIB), 256),
    "tpu7x": Generation("tpu", "TPU7x", "4x4x4", int(94.74 * GIB), 9216, devices_per_chip=2),
    "h100": Generation("gpu", "NVIDIA H100 80GB HBM3", "8x8", 84942979072, 65536, target=_H100),
    "h200": Generation("gpu", "NVIDIA H200", "8x8", 151397597184, 65536, target=_H200),
    "b200": Generation("gpu", "NVIDIA B200", "8x8", 191514411008, 65536, target=_B200),
    "cpu": Generation("cpu", "cpu", "8", None, 4096),
}
"""Accelerator generations, by the first part of a topology's name."""

# Slice shapes of Cloud TPU. v5e and v6e: all of them. The others: these, and AxBxC of multiples of 4 with A <= B <= C.
_SLICES_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SLICES_3D = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_GPUS_PER_NODE = (1, 2, 4, 8)


def known() -> str:
    """Known topologies, an example of each generation, for messages."""
    return ", ".join(f"{name}:{generation.example}" for name, generation in GENERATIONS.items())


@dataclass(frozen=True)
class Topology:
    """Device topology; no backend is initialised until ``devices()``.

    Attributes:
        name: name that ``parse`` reads.
        generation: key in ``GENERATIONS``.
        platform: ``"tpu"``, ``"gpu"`` or ``"cpu"``.
        device_kind: ``jax.Device.device_kind``.
        shape: chips along each side of a TPU slice; (nodes, GPUs per node); (CPU devices,).
        num_devices: total number of JAX devices.
        slices: number of TPU slices of that shape.
        hbm_bytes: memory of one device in bytes, see ``Generation``; None where it is not known.
    """

    name: str
    generation: str
    platform: str
    device_kind: str
    shape: tuple[int, ...]
    num_devices: int
    hbm_bytes: int | None
    slices: int = 1

    @classmethod
    def parse(cls, name: str) -> Topology:
        """Topology of a name such as ``"v6e:8x8"``.

        Raises:
            ShardingError: unknown generation (lists the known ones), or illegal shape (lists the nearest legal ones).
        """
        count, star, one = name.strip().lower().rpartition("*")
        generation, _, sides = one.partition(":")
        if generation not in GENERATIONS:
            closest = difflib.get_close_matches(generation, GENERATIONS, n=1, cutoff=0.0)[0]
            example = f"{closest}:{GENERATIONS[closest].example}"
            raise ShardingError(f"unknown topology {name!r}; there are {known()}. The closest is {example}.")
        if not re.fullmatch(r"\d{1,5}(x\d{1,5})*", sides):
            raise ShardingError(
                f"topology {name!r}: after {generation}: comes its shape, such as "
                f"{generation}:{GENERATIONS[generation].example}."
            )
        shape = tuple(int(side) for side in sides.split("x"))
        near = _nearest_legal(generation, shape)
        if shape not in near:
            listed = ", ".join(f"{generation}:{'x'.join(map(str, legal))}" for legal in near)
            raise ShardingError(f"there is no topology {name!r}: {_RULES[_kind(generation)]} The nearest: {listed}.")
        kind = GENERATIONS[generation]
        if star and (kind.platform != "tpu" or not re.fullmatch(r"[1-9]\d{0,3}", count)):
            raise ShardingError(
                f"topology {name!r}: before * comes a number of TPU slices, such as 4*v6e:8x8; nodes of GPUs are "
                "counted in their shape (h100:8x8)."
            )
        slices = int(count) if star else 1
        return cls(
            name=f"{slices}*{generation}:{sides}" if slices > 1 else f"{generation}:{sides}",
            generation=generation,
            platform=kind.platform,
            device_kind=kind.device_kind,
            shape=shape,
            num_devices=math.prod(shape) * kind.devices_per_chip * slices,
            hbm_bytes=kind.hbm_bytes,
            slices=slices,
        )

    def __str__(self) -> str:
        return self.name

    def environment(self) -> dict[str, str]:
        """Environment variables that a process compiling for this topology must have before jax starts."""
        # On a machine without the devices, jax must not look for them.
        environment = {"JAX_PLATFORMS": "cpu"}
        if self.platform == "tpu":
            # Without these libtpu would query the metadata server and wait; their values do not matter here.
            environment |= {
                "TPU_SKIP_MDS_QUERY": "1",
                "TPU_WORKER_HOSTNAMES": "localhost",
                "TPU_ACCELERATOR_TYPE": "v5litepod-16",
                "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several compilers may run at the same time
            }
        elif self.platform == "gpu":
            environment |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}  # no NVIDIA libraries needed
        return environment

    def devices(self) -> list[jax.Device]:
        """Devices for a mesh, in a fixed order. TPUs and GPUs here are compile-only: they hold no arrays.

        Raises:
            CompilerMissing: this process cannot compile for them; says what to install, or how to set it up.
        """
        return list(_devices(self))


@functools.cache  # each description creates new devices, and a program must not mix those of two
def _devices(topology: Topology) -> tuple[jax.Device, ...]:
    if topology.platform == "cpu":
        return _cpu_devices(topology)
    unset = {key: value for key, value in topology.environment().items() if os.environ.get(key) != value}
    if unset:
        settings = " ".join(f"{key}={value}" for key, value in unset.items())
        raise CompilerMissing(
            f"this process is not set up to compile for {topology}: run your function through "
            f"sharding.isolate.run_isolated, or start python with {settings}"
        )
    extra = {"tpu": "tpu", "gpu": "aot-gpu"}[topology.platform]
    install = f"pip install 'jaxllm[{extra}]'"
    try:
        if topology.platform == "tpu":
            importlib.import_module("libtpu")
        elif not any(_importable(f"jax_plugins.xla_cuda{major}") for major in (13, 12)):
            raise ImportError("no module jax_plugins.xla_cuda13")
    except ImportError as error:
        raise CompilerMissing(f"compiling for {topology} needs the {extra} extra: {install} ({error})") from error
    options = _tpu_options(topology) if topology.platform == "tpu" else _gpu_options(topology)
    try:
        return tuple(topologies.get_topology_desc(**options).devices)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise CompilerMissing(
            f"the installed compiler has no topology {topology} ({error}). The extra of this jax ({jax.__version__}): "
            f"{install}"
        ) from error


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # its parent package is missing
        return False


def _cpu_devices(topology: Topology) -> tuple[jax.Device, ...]:
    wanted = topology.num_devices
    forced = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")  # JAX does not allow both settings
    if not forced and getattr(jax.config, "jax_num_cpu_devices") < wanted:  # noqa: B009 (no type knows it)
        with contextlib.suppress(RuntimeError):  # raised if JAX has started; it may have enough devices anyway
            jax.config.update("jax_num_cpu_devices", wanted)
    there = jax.devices("cpu")
    if len(there) < wanted:
        raise CompilerMissing(
            f"{topology} needs {wanted} CPU devices, but JAX has started with {len(there)}: "
            f'call jax.config.update("jax_num_cpu_devices", {wanted}) first, or use sharding.isolate.run_isolated'
        )
    return tuple(there[:wanted])


def _tpu_options(topology: Topology) -> dict[str, Any]:
    """Arguments of libtpu's topology: cores, host size and wrap-around links as in Cloud TPU."""
    shape = topology.shape
    one = topology.name.rpartition("*")[2]
    options: dict[str, Any] = {"platform": "tpu", "topology_name": one}
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if topology.generation == "v4":
        options["chip_config_name"] = "megacore"  # one device per chip, as on the real ones; v5p's default
    if len(shape) == 2:
        # Slices up to 2x4 are one host. Links wrap around only along a full side of the pod.
        options["chips_per_host_bounds"] = (*shape, 1) if math.prod(shape) <= 8 else (2, 2, 1)
        options["wrap"] = (*(side == 16 for side in shape), False)
    else:
        # Cubes of 4x4x4 are joined by optical switches, which wrap the links around.
        options["wrap"] = (all(side % 4 == 0 for side in shape),) * 3
    return options


def _gpu_options(topology: Topology) -> dict[str, Any]:
    nodes, gpus = topology.shape
    kind = GENERATIONS[topology.generation]
    target = f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: 128
          shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          device_memory_size: {kind.hbm_bytes} {kind.target}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        device_description_str: "{kind.device_kind}"
    """
    return {"platform": "cuda", "topology": f"1x{nodes}x{gpus}", "target_config": target}


_RULES = {
    "2d": "its slices are " + ", ".join("x".join(map(str, shape)) for shape in _SLICES_2D) + ".",
    "3d": "its slices are "
    + ", ".join("x".join(map(str, shape)) for shape in _SLICES_3D)
    + " and AxBxC of multiples of 4 with A <= B <= C, up to the size of a pod.",
    "gpu": f"a shape is nodes x GPUs in a node, and a node has {', '.join(map(str, _GPUS_PER_NODE))} GPUs.",
    "cpu": "a shape is a number of devices, up to 4096.",
}


def _kind(generation: str) -> str:
    platform, example = GENERATIONS[generation].platform, GENERATIONS[generation].example
    return platform if platform != "tpu" else f"{example.count('x') + 1}d"


def _nearest_legal(generation: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Legal shapes nearest to ``shape``, by number of chips and then by sides; ``[shape]`` if it is legal."""
    limit, asked, kind = GENERATIONS[generation].max_chips, max(1, math.prod(shape)), _kind(generation)
    legal: set[tuple[int, ...]]
    if kind == "cpu":
        legal = {(min(asked, limit),)}
    elif kind == "gpu":
        shape = shape if len(shape) == 2 else (1, asked)
        legal = {(min(max(1, shape[0]), limit // gpus), gpus) for gpus in _GPUS_PER_NODE}
    elif kind == "2d":
        legal = set(_SLICES_2D)
    else:
        legal = set(_SLICES_3D)
        for a in range(4, round(limit ** (1 / 3)) + 1, 4):
            for b in range(a, math.isqrt(limit // a) + 1, 4):
                legal |= {(a, b, c) for c in range(b, limit // (a * b) + 1, 4)}
    if shape in legal:
        return [shape]

    def distance(candidate: tuple[int, ...]) -> tuple[float, float]:
        sides = (*shape, *(1,) * (3 - len(shape))), (*candidate, *(1,) * (3 - len(candidate)))
        return abs(math.log(math.prod(candidate) / asked)), sum(abs(a - b) for a, b in zip(*sides, strict=False))

    return sorted(legal, key=distance)[:3]
