"""Time of collectives: placement of mesh axes on a torus or in nodes, and the bandwidth of its links.

Bandwidths add up over the dimensions of a torus, and a closed ring has two directions (jax-ml/scaling-book, chapter on
sharding). Beyond a slice or a node a collective has two levels, which overlap: the slower one counts. A device of k in
the slice sends the k-th part of what goes between slices.

    all-gather, reduce-scatter of V bytes    V (n-1)/n over the links' bytes/s
    all-reduce                               twice that
    all-to-all of V bytes a device           V p / 4 over the bytes/s of a torus dimension of p; V (n-1)/n of a switch
    collective-permute                       V over one link
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxllm.plan.hardware import Cluster
from sharding import MeshSpec


@dataclass(frozen=True)
class AxisSegment:
    """Segment of a mesh axis along one dimension of the devices.

    Attributes:
        dimension: dimension of a slice (from 0), or of the devices of a node (0); -1 between slices or nodes.
        size: number of devices.
        stride: distance between neighbouring devices of the segment, along the dimension.
    """

    dimension: int
    size: int
    stride: int


@dataclass(frozen=True)
class CollectiveTime:
    """Seconds of a collective.

    Attributes:
        near: over links inside a slice or node (ICI, NVLink).
        far: over the network between them (DCN).
    """

    near: float = 0.0
    far: float = 0.0

    @property
    def seconds(self) -> float:
        """Total seconds: both levels overlap, so the slower one counts."""
        return max(self.near, self.far)


class Network:
    """Network model: times of collectives over a mesh's axes on a cluster."""

    def __init__(self, cluster: Cluster, mesh: MeshSpec):
        self.hardware, topology = cluster.hardware, cluster.topology
        self.torus = topology.platform == "tpu"
        sides = topology.shape if self.torus else topology.shape[1:]
        chip = round(topology.num_devices / topology.slices / math.prod(topology.shape))
        self.sides = (*sides, chip) if chip > 1 else tuple(sides)
        outside = topology.slices if self.torus else topology.shape[0]
        if self.torus:
            whole = 16 if len(topology.shape) == 2 else 4
            closed = [side % whole == 0 for side in topology.shape]
            self.closed = tuple(closed if len(closed) == 2 else [all(closed)] * 3) + (False,) * (chip > 1)
        else:
            self.closed = (False,)
        sizes = dict(mesh.axes)
        factors = mesh.between(outside) if self.torus else mesh.outermost(outside)
        between = dict(zip(sizes, factors, strict=True))
        inside = {name: size // between[name] for name, size in sizes.items()}
        self.parts = {name: [*_far(between[name])] for name in sizes}
        for name, parts in _lay(inside, self.sides).items():
            self.parts[name] += parts

    def time(self, kind: str, axes: Sequence[str], size: int) -> CollectiveTime:
        """Time of a collective that moves ``size`` bytes, see ``jaxllm.parallel.sharding_table.ExpectedCollective``."""
        parts = [part for axis in axes for part in self.parts[axis]]
        near = [part for part in parts if part.dimension >= 0]
        inside, outside = math.prod(p.size for p in near), math.prod(p.size for p in parts if p.dimension < 0)
        twice = 2 if kind == "all-reduce" else 1
        latency = self._steps(near, outside) * self.hardware.hop * twice
        far = self._far(kind, size, inside, outside) * twice
        if inside == 1:
            return CollectiveTime(far=far + latency if outside > 1 else 0.0)
        if kind == "collective-permute":
            stride = min(stride for _, stride in self._dimensions(near).values())
            return CollectiveTime(size * stride / self.hardware.link + self.hardware.hop, far)
        if "all-to-all" in kind:
            moved = size / outside
            if not self.torus:
                return CollectiveTime(moved * (inside - 1) / inside / self.hardware.link + latency, far)
            along = [moved * p / 4 / self._bandwidth(d, p, s) for d, (p, s) in self._dimensions(near).items()]
            return CollectiveTime(max(along) + latency, far)
        speed = sum(self._bandwidth(d, p, s) for d, (p, s) in self._dimensions(near).items())
        return CollectiveTime(twice * size * (inside - 1) / inside / speed + latency, far)

    def sent(self, kind: str, axes: Sequence[str], size: int) -> tuple[float, float]:
        """Bytes that a device sends in a collective, by class of link: inside a slice or node, and between them.

        Args:
            kind, axes, size: as for ``time``.
        """
        parts = [part for axis in axes for part in self.parts[axis]]
        inside, outside = (math.prod(p.size for p in parts if (p.dimension >= 0) == near) for near in (True, False))
        twice = 2 if kind == "all-reduce" else 1
        far = self._far(kind, size, inside, outside) * self.hardware.network * twice
        if inside == 1:
            return 0.0, far
        if kind == "collective-permute":
            return float(size), far
        return twice * (size / outside if "all-to-all" in kind else size) * (inside - 1) / inside, far

    def spread(self, axes: Sequence[str]) -> int:
        """Number of torus dimensions that the axes span."""
        return len({part.dimension for axis in axes for part in self.parts[axis]})

    def _far(self, kind: str, size: int, inside: int, outside: int) -> float:
        if outside == 1:
            return 0.0
        if kind == "collective-permute" or "all-to-all" in kind:
            return size * ((outside - 1) / outside if "all-to-all" in kind else 1.0) / self.hardware.network
        return size / inside * (outside - 1) / outside / self.hardware.network

    def _dimensions(self, parts: Sequence[AxisSegment]) -> Mapping[int, tuple[int, int]]:
        """For each dimension that the segments lie in, their total size and the stride of the innermost."""
        out: dict[int, tuple[int, int]] = {}
        for part in parts:
            size, stride = out.get(part.dimension, (1, part.stride))
            out[part.dimension] = size * part.size, min(stride, part.stride)
        return out

    def _bandwidth(self, dimension: int, size: int, stride: int) -> float:
        """Bytes/s of a device along a dimension; interleaved rings share the links."""
        if not self.torus:
            return self.hardware.link
        ring = self.closed[dimension] and size * stride == self.sides[dimension] and size > 2
        return self.hardware.link * (2 if ring else 1) / stride

    def _steps(self, near: Sequence[AxisSegment], outside: int) -> float:
        """Number of sequential messages of a collective."""
        sizes = [size for size, _ in self._dimensions(near).values()]
        inside = sum(size - 1 for size in sizes) if self.torus else sum(math.log2(size) for size in sizes)
        return inside + 10 * math.log2(outside) * (outside > 1)


def _far(size: int) -> list[AxisSegment]:
    return [AxisSegment(-1, size, 1)] if size > 1 else []


def _lay(sizes: Mapping[str, int], sides: Sequence[int]) -> dict[str, list[AxisSegment]]:
    """Segments of each axis: the innermost axis first, along whole dimensions where some multiply to its size."""
    left = list(sides)
    out: dict[str, list[AxisSegment]] = {}
    for name, size in reversed(list(sizes.items())):
        out[name] = []
        for place in _whole(size, left) or range(len(left)):
            part = math.gcd(size, left[place])
            if part > 1:
                out[name].append(AxisSegment(place, part, sides[place] // left[place]))
                left[place] //= part
                size //= part
    return out


def _whole(size: int, left: Sequence[int]) -> tuple[int, ...]:
    """Dimensions that multiply to ``size``, as few as possible; empty if there are none."""
    places = [i for i, side in enumerate(left) if side > 1]
    best: tuple[int, ...] = ()
    for chosen in range(1, 2 ** len(places)):
        subset = tuple(p for i, p in enumerate(places) if chosen >> i & 1)
        if math.prod(left[p] for p in subset) == size and (not best or len(subset) < len(best)):
            best = subset
    return best
