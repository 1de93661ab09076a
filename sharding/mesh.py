"""Named device meshes: how many devices along which axis."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

# The axes a plan may use, outermost (slowest links) first. One table, so that a typo is an error and not a new axis.
AXES = {
    "data": "replicas of the parameters, each with its own part of the batch",
    "stage": "pipeline stages",
    "fsdp": "parts of the batch that also share out parameters and optimizer state (ZeRO-3)",
    "context": "parts of the sequence, whose keys and values travel to the queries; parameters as over fsdp",
    "expert": "experts of a mixture-of-experts layer; outside it, as fsdp",
    "ulysses": "parts of the sequence, exchanged for parts of the heads inside attention; parameters as over fsdp",
    "tensor": "parts of heads, feed-forward width and vocabulary (Megatron)",
}


BETWEEN_SLICES = ("data", "stage", "fsdp", "context")
"""Axes that may go across slices, over the data-centre network: in this order they take what the slices ask for."""


class ShardingError(ValueError):
    """An array, a mesh or a rule does not fit the others; the message says what would."""


def divisors(n: int) -> list[int]:
    """All divisors of ``n`` in rising order: the legal sizes of a mesh axis over a dimension of size ``n``."""
    return [d for d in range(1, n + 1) if n % d == 0]


@dataclass(frozen=True)
class MeshSpec:
    """Sizes of the named mesh axes, in order.

    A size of -1 takes the devices that are left; two of them share those out as evenly as can be, the outer axis
    getting the larger part (inner axes communicate more).

    Attributes:
        axes: ``((name, size), ...)``; names from ``AXES``.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        for name in names:
            if name not in AXES:
                raise ShardingError(f"unknown mesh axis {name!r}; the axes are {', '.join(AXES)}.")
            if names.count(name) > 1:
                raise ShardingError(f"mesh axis {name!r} is given twice.")
        for name, size in self.axes:
            if size < 1 and size != -1:
                raise ShardingError(f"mesh axis {name}={size}: a size is a positive number, or -1 for 'what is left'.")
        if sum(size == -1 for _, size in self.axes) > 2:
            raise ShardingError("at most two mesh axes can be -1 ('what is left').")

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """Reads ``"fsdp=4,tensor=2"`` or a preset's name (``dp``, ``fsdp``, ``tp``, ``fsdp_tp``).

        A preset leaves its sizes to the number of devices, see ``resolve``.

        Raises:
            ShardingError: the text is neither.
        """
        text = text.strip()
        if text in PRESETS:
            return PRESETS[text]
        axes = []
        for part in text.split(","):
            name, equals, size = part.partition("=")
            if not equals or not re.fullmatch(r"\s*-?[0-9]+\s*", size):
                raise ShardingError(
                    f"cannot read the mesh {text!r}: write it as 'fsdp=4,tensor=2' with axes from "
                    f"{', '.join(AXES)}, or name a preset: {', '.join(PRESETS)}."
                )
            axes.append((name.strip(), int(size)))
        return cls(tuple(axes))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    def resolve(self, num_devices: int) -> MeshSpec:
        """Fills in -1 so that the sizes multiply to ``num_devices``.

        Raises:
            ShardingError: they cannot; names the nearest legal sizes.
        """
        fixed = math.prod(size for _, size in self.axes if size != -1)
        open_axes = [name for name, size in self.axes if size == -1]
        if (open_axes and num_devices % fixed) or (not open_axes and fixed != num_devices):
            raise ShardingError(
                f"the mesh {self} needs {'a multiple of ' if open_axes else ''}{fixed} devices and there are "
                f"{num_devices}. Axis sizes must multiply to {num_devices}; each can be one of {divisors(num_devices)}."
            )
        rest = num_devices // fixed
        inner = max(d for d in divisors(rest) if d * d <= rest) if len(open_axes) == 2 else rest
        sizes = {open_axes[0]: rest // inner} if len(open_axes) == 2 else {}
        return MeshSpec(tuple((name, sizes.get(name, inner) if size == -1 else size) for name, size in self.axes))

    def build(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """A mesh of explicit axes over ``devices`` (all of this backend by default).

        Devices are ordered so that inner axes lie on the fastest links; an axis of the mesh may be part of an axis
        of the slice (tensor=4 on an 8 x 8 slice), which ``jax.make_mesh`` refuses. Over several slices, the outer parts
        of ``BETWEEN_SLICES`` go from slice to slice and everything else stays inside one.

        Raises:
            ShardingError: the sizes do not multiply to the number of devices, or do not divide over the slices.
        """
        devices = list(jax.devices() if devices is None else devices)
        spec = self.resolve(len(devices))
        names = tuple(name for name, _ in spec.axes)
        sizes = tuple(size for _, size in spec.axes)
        slices = len({getattr(device, "slice_index", 0) for device in devices})
        if slices == 1:
            ordered = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        else:
            between = spec.between(slices)
            inside = [size // outer for size, outer in zip(sizes, between, strict=True)]
            ordered = mesh_utils.create_hybrid_device_mesh(inside, between, devices, allow_split_physical_axes=True)
        return Mesh(ordered, names, axis_types=(AxisType.Explicit,) * len(names))

    def between(self, slices: int) -> tuple[int, ...]:
        """How many parts of each axis, in order, lie in different slices; they multiply to ``slices``.

        Raises:
            ShardingError: the axes that may go between slices cannot make so many.
        """
        sizes, rest = dict(self.axes), slices
        outer = dict.fromkeys(sizes, 1)
        for name in BETWEEN_SLICES:
            outer[name] = math.gcd(sizes.get(name, 1), rest)
            rest //= outer[name]
        if rest > 1:
            raise ShardingError(
                f"the mesh {self} does not divide over {slices} slices: between slices go {', '.join(BETWEEN_SLICES)}, "
                f"and their sizes must have {slices} as a factor; give data a multiple of {slices}."
            )
        return tuple(outer[name] for name, _ in self.axes)

    def abstract(self, num_devices: int | None = None) -> AbstractMesh:
        """The same mesh without devices: enough to type-check a program's shardings.

        Raises:
            ShardingError: as ``build``; also when a size is -1 and ``num_devices`` is not given.
        """
        if num_devices is None:
            if any(size == -1 for _, size in self.axes):
                raise ShardingError(f"the mesh {self} has an open size; say for how many devices.")
            num_devices = math.prod(size for _, size in self.axes)
        spec = self.resolve(num_devices)
        names = tuple(name for name, _ in spec.axes)
        sizes = tuple(size for _, size in spec.axes)
        return AbstractMesh(sizes, names, axis_types=(AxisType.Explicit,) * len(names))


PRESETS = {
    "dp": MeshSpec((("data", -1),)),
    "fsdp": MeshSpec((("fsdp", -1),)),
    "tp": MeshSpec((("tensor", -1),)),
    "fsdp_tp": MeshSpec((("fsdp", -1), ("tensor", -1))),
}
"""Plans by name; the rules (``sharding.rules.DEFAULT``) are the same for all."""
