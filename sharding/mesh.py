"""Device meshes with named axes: the number of devices along each mesh axis."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

# Mesh axes of a plan, outermost (slowest links) first. One table, so that a typo is an error and not a new axis.
AXES = {
    "replica": "replicas that train by themselves: parameters of their own, brought together by outer steps",
    "data": "data parallelism: replicas of the parameters, each with its own part of the batch",
    "stage": "pipeline parallelism: stages of layers",
    "local": "data parallelism inside a slice or node, beside data between them: gradients are summed over it first",
    "fsdp": "FSDP: parts of the batch, over which parameters and optimizer state are sharded too (ZeRO-3)",
    "context": "context parallelism: parts of the sequence (ring attention, or gathered keys); parameters as over fsdp",
    "expert": "expert parallelism: experts of a mixture-of-experts layer; outside it, as fsdp",
    "ulysses": "parts of the sequence, exchanged for heads inside attention (all-to-all); parameters as over fsdp",
    "features": "2D tensor parallelism: parts of the features of the residual stream, beside tensor inside layers",
    "tensor": "tensor parallelism (Megatron): parts of heads, feed-forward width and vocabulary",
}


BETWEEN_SLICES = ("replica", "data", "stage", "fsdp", "context")
"""Axes that may span slices, over the data-centre network; the number of slices is factored over them in this order."""


class ShardingError(ValueError):
    """Array, mesh or rule that does not fit the others; the message says what would."""


def divisors(n: int) -> list[int]:
    """Divisors of ``n`` in rising order: the legal sizes of a mesh axis over a dimension of size ``n``."""
    return [d for d in range(1, n + 1) if n % d == 0]


@dataclass(frozen=True)
class MeshSpec:
    """Mesh specification: names and sizes of the mesh axes, in order.

    An axis of size -1 takes the remaining devices; two of them share these as evenly as possible, the outer axis
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
                raise ShardingError(
                    f"mesh axis {name}={size}: a size is a positive number, or -1 for the remaining devices."
                )
        if sum(size == -1 for _, size in self.axes) > 2:
            raise ShardingError("at most two mesh axes can be -1 (the remaining devices).")

    @classmethod
    def parse(cls, text: str) -> MeshSpec:
        """Mesh specification from text: ``"fsdp=4,tensor=2"``, or a preset (``dp``, ``fsdp``, ``tp``, ``fsdp_tp``).

        The sizes of a preset depend on the number of devices, see ``resolve``.

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
        """Mesh specification with -1 filled in, so that the sizes multiply to ``num_devices``.

        Raises:
            ShardingError: they cannot; names the legal sizes.
        """
        fixed = math.prod(size for _, size in self.axes if size != -1)
        open_axes = [name for name, size in self.axes if size == -1]
        if (open_axes and num_devices % fixed) or (not open_axes and fixed != num_devices):
            raise ShardingError(
                f"the mesh {self} needs {'a multiple of ' if open_axes else ''}{fixed} devices, but there are "
                f"{num_devices}. Axis sizes must multiply to {num_devices}; each can be one of {divisors(num_devices)}."
            )
        rest = num_devices // fixed
        inner = max(d for d in divisors(rest) if d * d <= rest) if len(open_axes) == 2 else rest
        sizes = {open_axes[0]: rest // inner} if len(open_axes) == 2 else {}
        return MeshSpec(tuple((name, sizes.get(name, inner) if size == -1 else size) for name, size in self.axes))

    def build(self, devices: Sequence[jax.Device] | None = None, order: Sequence[int] = ()) -> Mesh:
        """Mesh of explicit axes over ``devices`` (all of this backend by default).

        Devices are ordered so that inner axes use the fastest links; a mesh axis may be a part of a slice's axis
        (tensor=4 on an 8 x 8 slice), which ``jax.make_mesh`` does not support. Over several slices, the outer parts of
        the axes in ``BETWEEN_SLICES`` span slices, and everything else stays inside one.

        Args:
            devices: of the mesh.
            order: order of equal blocks of consecutive devices, by their numbers from 0: the first axes are over these
                blocks in this order, and devices are ordered by their links inside each alone. Empty: by links.

        Raises:
            ShardingError: the sizes do not multiply to the number of devices, or do not divide over the slices; the
                order is not one of the blocks that the first axes are over.
        """
        devices = list(jax.devices() if devices is None else devices)
        spec = self.resolve(len(devices))
        names = tuple(name for name, _ in spec.axes)
        sizes = tuple(size for _, size in spec.axes)
        if order:
            outer, each = spec.over_blocks(order), len(devices) // len(order)
            inside = sizes[outer:] or (1,)
            blocks = [devices[at * each : (at + 1) * each] for at in order]
            laid = [mesh_utils.create_device_mesh(inside, one, allow_split_physical_axes=True) for one in blocks]
            return Mesh(np.reshape(laid, sizes), names, axis_types=(AxisType.Explicit,) * len(names))
        slices = len({getattr(device, "slice_index", 0) for device in devices})
        if slices == 1:
            ordered = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        else:
            between = spec.between(slices)
            inside = [size // outer for size, outer in zip(sizes, between, strict=True)]
            ordered = mesh_utils.create_hybrid_device_mesh(inside, between, devices, allow_split_physical_axes=True)
        return Mesh(ordered, names, axis_types=(AxisType.Explicit,) * len(names))

    def over_blocks(self, order: Sequence[int]) -> int:
        """Number of first axes that are over the blocks of a device order, see ``build``.

        Raises:
            ShardingError: the order does not have each block once, or no first axes multiply to their number.
        """
        if sorted(order) != list(range(len(order))):
            raise ShardingError(
                f"device order {' '.join(map(str, order))}: give each number from 0 to {len(order) - 1} once, in the "
                "order of the mesh."
            )
        legal = list(itertools.accumulate((size for _, size in self.axes), operator.mul))
        if len(order) not in legal:
            raise ShardingError(
                f"a device order of {len(order)} blocks does not go with the mesh {self}, whose first axes multiply to "
                f"{', '.join(map(str, dict.fromkeys(legal)))}; give the order of as many blocks."
            )
        return legal.index(len(order)) + 1

    def between(self, slices: int) -> tuple[int, ...]:
        """Factor of each axis, in order, that spans slices; the factors multiply to ``slices``.

        Raises:
            ShardingError: the sizes of the axes that may span slices do not allow it.
        """
        sizes, rest = dict(self.axes), slices
        outer = dict.fromkeys(sizes, 1)
        for name in BETWEEN_SLICES:
            outer[name] = math.gcd(sizes.get(name, 1), rest)
            rest //= outer[name]
        if rest > 1:
            raise ShardingError(
                f"the mesh {self} does not divide over {slices} slices: only {', '.join(BETWEEN_SLICES)} may span "
                f"slices, and their sizes must have {slices} as a factor; give data a multiple of {slices}."
            )
        return tuple(outer[name] for name, _ in self.axes)

    def outermost(self, nodes: int) -> tuple[int, ...]:
        """Factor of each axis, in order, that spans nodes, where devices are numbered node by node."""
        factors = []
        for _, size in self.axes:
            factors.append(math.gcd(size, nodes))
            nodes //= factors[-1]
        return tuple(factors)

    def with_local(self, outside: int) -> MeshSpec:
        """Mesh specification whose axis ``data`` is split in two: ``outside`` parts, and ``local`` inside each.

        Devices keep their places. The specification itself where there is nothing to split.

        Args:
            outside: parts of ``data`` in different slices or nodes; a divisor of its size.
        """
        sizes = dict(self.axes)
        inside = sizes.get("data", 1) // outside
        if "local" in sizes or outside == 1 or inside == 1:
            return self
        split = {"data": (("data", outside), ("local", inside))}
        return MeshSpec(tuple(part for axis in self.axes for part in split.get(axis[0], (axis,))))

    def abstract(self, num_devices: int | None = None) -> AbstractMesh:
        """Abstract mesh, without devices: enough to type-check the shardings of a program.

        Raises:
            ShardingError: as for ``build``; also when a size is -1 and ``num_devices`` is not given.
        """
        if num_devices is None:
            if any(size == -1 for _, size in self.axes):
                raise ShardingError(f"the mesh {self} has an open size (-1); give the number of devices.")
            return _abstract(self.axes)
        return _abstract(self.resolve(num_devices).axes)


@functools.lru_cache(maxsize=4096)
def _abstract(axes: tuple[tuple[str, int], ...]) -> AbstractMesh:
    names, sizes = tuple(name for name, _ in axes), tuple(size for _, size in axes)
    return AbstractMesh(sizes, names, axis_types=(AxisType.Explicit,) * len(names))


PRESETS = {
    "dp": MeshSpec((("data", -1),)),
    "fsdp": MeshSpec((("fsdp", -1),)),
    "tp": MeshSpec((("tensor", -1),)),
    "fsdp_tp": MeshSpec((("fsdp", -1), ("tensor", -1))),
}
"""Meshes by name; the rules (``sharding.rules.DEFAULT``) are the same for all."""
