"""What differs between JAX versions, the typing of values inside ``jax.shard_map``, and where a program will run."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
from jax.sharding import AxisType
from jax.typing import DTypeLike
from jaxtyping import Array

_interpreting: contextvars.ContextVar[bool] = contextvars.ContextVar("interpreting", default=False)


class Device(NamedTuple):
    """What a program is traced for: ``"tpu"``, ``"gpu"`` or ``"cpu"``, and the ``device_kind`` where it is known."""

    platform: str
    kind: str


def target_device() -> Device:
    """The device of the mesh in scope, which may be one that is compiled for from afar, or else jax's default."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh is None or mesh.empty else mesh.abstract_device
    if device is None:
        return Device(_platform(jax.default_backend()), jax.devices()[0].device_kind)
    kind = device.device_kind
    return Device("tpu" if kind.startswith("TPU") else "cpu" if kind.lower() == "cpu" else "gpu", kind)


def explicit_axes() -> tuple[str, ...]:
    """Axes of the mesh in scope over which JAX tracks shardings: no kernel can be called there."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh is None or mesh.empty:
        return ()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in types if kind == AxisType.Explicit)


def _platform(backend: str) -> str:
    return "gpu" if backend in ("cuda", "rocm") else backend


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Kernels traced inside run on any device, interpreted: TPU kernels with races detected and memory full of nan.

    Slow: it is there to check values where the device is not.
    """
    _simulate_tpu()
    token = _interpreting.set(True)
    try:
        yield
    finally:
        _interpreting.reset(token)


def _simulate_tpu() -> None:
    """A pipeline inside a TPU kernel asks for the generation of the device, which JAX knows of TPUs only."""
    from jax._src.pallas.mosaic import tpu_info

    chip = tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion.TPU_V5E, 1)
    tpu_info.registry.setdefault("cpu", lambda: chip)


def is_interpreting() -> bool:
    """Whether this is inside ``interpreting()``."""
    return _interpreting.get()


def varying_axes(*arrays: Array | None) -> frozenset[str]:
    """Mesh axes over which any of the arrays may differ from device to device, inside a checked ``jax.shard_map``."""
    axes = (jax.typeof(x).manual_axis_type.varying for x in arrays if x is not None)
    return frozenset().union(*axes)


def vary_over(x: Array, axes: frozenset[str]) -> Array:
    """``x``, varying at least over ``axes``. Without a mesh nothing happens.

    A function with a hand-written derivative must see operands of one kind. The derivative of this widening is the sum
    over the axes ``x`` was the same on, and JAX inserts it.
    """
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def result_like(x: Array, shape: Sequence[int], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """A result of ``pallas_call`` that varies over the mesh axes that the operand ``x`` varies over."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
