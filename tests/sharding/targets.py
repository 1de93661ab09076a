"""Functions that tests run in a child process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sharding
from sharding import MeshSpec
from sharding.isolate import stage
from sharding.topology import Topology


def compile_all(topology: Topology, names: list[str]) -> dict[str, list[Any]]:
    """A matmul, sharded over all devices and all-gathered, compiled for each topology of one platform."""
    found = {}
    for name in names:
        one = Topology.parse(name)
        devices = one.devices()
        mesh = MeshSpec.parse("fsdp").build(devices)
        weight = jax.ShapeDtypeStruct((8 * len(devices), 128), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
        with jax.set_mesh(mesh):
            compiled = jax.jit(lambda w: jax.sharding.reshard(w, P()).T @ jax.sharding.reshard(w, P())).lower(weight)
            text = compiled.compile().as_text()
        gathers = "all-gather" in text or "all-reduce" in text  # TPUs gather small arrays by adding them to zeros
        found[name] = [len(devices), devices[0].platform, devices[0].device_kind, gathers]
    return found


def too_large(topology: Topology) -> None:
    """Adds one to 64 GiB of floats on each device."""
    mesh = MeshSpec.parse("fsdp").build(topology.devices())
    shape = (topology.num_devices * 2**17, 2**17)
    huge = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    with jax.set_mesh(mesh):
        jax.jit(lambda x: x + 1).lower(huge).compile()


def without_compilers(topology: Topology) -> int:
    """Simulates a machine where no extra is installed."""
    for module in ("libtpu", "jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"):
        sys.modules[module] = None  # type: ignore[assignment]
    return len(topology.devices())


def echo(topology: Topology, **kwargs: Any) -> dict[str, Any]:
    """Returns its argument, with some noise on the output streams."""
    print("noise on stdout")
    print("noise on stderr", file=sys.stderr)
    os.write(1, b"noise from below\n")
    stage("echoing")
    return {"topology": topology.name, "kwargs": kwargs}


def environment(topology: Topology, names: list[str]) -> dict[str, str | None]:
    """The child's environment variables."""
    return {name: os.environ.get(name) for name in names}


def raise_value_error(topology: Topology) -> None:
    """Fails."""
    raise ValueError("the heads do not divide")


def misplace(topology: Topology) -> None:
    """Asks for a mesh that the devices do not make."""
    MeshSpec.parse("fsdp=3").build(topology.devices())


def return_unspeakable(topology: Topology) -> Any:
    """Returns what JSON does not have."""
    return {1, 2}


def end(topology: Topology, signal: int = 0) -> None:
    """Dies without a word of Python's."""
    print("last words", file=sys.stderr)
    if signal:
        os.kill(os.getpid(), signal)
    os._exit(7)


def sleep(topology: Topology, note: str) -> None:
    """Writes its process id to ``note`` and sleeps."""
    stage("sleeping")
    Path(note).write_text(str(os.getpid()))
    time.sleep(600)


def mesh_shape(topology: Topology, mesh: str) -> dict[str, int]:
    """Sizes of a mesh laid over the topology's devices, which are all in it."""
    built = MeshSpec.parse(mesh).build(topology.devices())
    assert set(built.devices.flat) == set(topology.devices())
    return dict(built.shape)


def units_of_one_row(topology: Topology) -> dict[str, bool]:
    """Whether a matmul of a single row is the matrix unit's (a convolution), as it is and by ``multiply_rows``."""
    place = jax.sharding.SingleDeviceSharding(topology.devices()[0])
    row, weight = (jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=place) for size in ((1, 1024), (1024, 8, 128)))

    def plain(row: Any, weight: Any) -> Any:
        return jax.lax.dot_general(row, weight, (((1,), (0,)), ((), ())))

    def by_rows(row: Any, weight: Any) -> Any:
        return sharding.multiply_rows(lambda row: plain(row, weight), row)

    text = lambda f: jax.jit(f).lower(row, weight).compile().as_text() or ""  # noqa: E731
    return {f.__name__: " convolution(" in text(f) for f in (plain, by_rows)}
