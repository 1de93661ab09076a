"""Compatibility helpers: JAX versions, varying-axes typing inside ``jax.shard_map``, and the target device."""

from __future__ import annotations

import contextlib
import contextvars
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType
from jax.typing import DTypeLike
from jaxtyping import Array

_interpreting: contextvars.ContextVar[bool] = contextvars.ContextVar("interpreting", default=False)


class TargetDevice(NamedTuple):
    """Device that a program is traced for.

    Attributes:
        platform: "tpu", "gpu" or "cpu".
        kind: its ``device_kind``, where known.
    """

    platform: str
    kind: str


def target_device() -> TargetDevice:
    """Target device: that of the mesh in scope, which may be an AOT topology that is not attached, else jax's default
    device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh is None or mesh.empty else mesh.abstract_device
    if device is None:
        return TargetDevice(_platform(jax.default_backend()), jax.devices()[0].device_kind)
    kind = device.device_kind
    return TargetDevice("tpu" if kind.startswith("TPU") else "cpu" if kind.lower() == "cpu" else "gpu", kind)


def explicit_axes() -> tuple[str, ...]:
    """Mesh axes in scope with explicit sharding types (``AxisType.Explicit``), under which no Pallas kernel can be
    called.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh is None or mesh.empty:
        return ()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in types if kind == AxisType.Explicit)


def manual_on_one_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, inside a manual ``jax.shard_map`` where the mesh in scope has explicit axes of one device in all.

    Models leave ``jax.shard_map`` out there, since nothing is split, but a Pallas kernel needs it. Arguments and
    results are trees; what is not an array in them is passed on.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not explicit_axes() or any(mesh.shape[axis] > 1 for axis in explicit_axes()):
        return function

    def call(*args: Any, **kw: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kw))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

        def local(*arrays: Array) -> Any:
            given = dict(zip(places, arrays, strict=True))
            args, kw = jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
            return function(*args, **kw)

        whole = jax.sharding.PartitionSpec()
        arrays = [jax.sharding.reshard(leaves[i], whole) for i in places]
        names = set(explicit_axes())
        return jax.shard_map(local, in_specs=whole, out_specs=whole, axis_names=names)(*arrays)

    return call


def processor_features() -> str:
    """The processor's kind and its features, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _platform(backend: str) -> str:
    return "gpu" if backend in ("cuda", "rocm") else backend


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Context manager in which kernels run in Pallas interpret mode on any device.

    TPU kernels run with race detection and with uninitialised memory filled with nan. Interpret mode is slow: it is
    meant for checking values where the device is not available.
    """
    _simulate_tpu()
    token = _interpreting.set(True)
    try:
        yield
    finally:
        _interpreting.reset(token)


def _simulate_tpu() -> None:
    """Registers the TPU v5e's parameters for "cpu": a pipeline inside a TPU kernel queries the device generation,
    which JAX knows for TPUs only.
    """
    from jax._src.pallas.mosaic import tpu_info

    chip = tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion.TPU_V5E, 1)
    tpu_info.registry.setdefault("cpu", lambda: chip)


def is_interpreting() -> bool:
    """True inside ``interpreting()``."""
    return _interpreting.get()


def varying_axes(*arrays: Array | None) -> frozenset[str]:
    """Mesh axes over which any of the arrays may differ between devices, inside a checked ``jax.shard_map``."""
    axes = (jax.typeof(x).manual_axis_type.varying for x in arrays if x is not None)
    return frozenset().union(*axes)


def vary_over(x: Array, axes: frozenset[str]) -> Array:
    """``x`` typed as varying over at least ``axes``; without a mesh, ``x`` itself.

    All operands of a function with a custom VJP must vary over the same axes. The derivative of this widening is a sum
    over the axes on which ``x`` was replicated; JAX inserts it.
    """
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def result_like(x: Array, shape: Sequence[int], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """Output shape of a ``pallas_call`` that varies over the same mesh axes as the operand ``x``."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
