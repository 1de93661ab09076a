"""2D tensor parallelism: the mesh axis ``tensor`` is factored into ``features`` and ``tensor``.

    features   parts of the residual stream's features, which are the rows of a layer's first weights
    tensor     parts of heads and feed-forward width, which are their columns

A weight ``W[D_features, F_tensor]`` is multiplied where it is (2D weight-stationary: GSPMD, arXiv:2105.04663, section
5.1; arXiv:2211.05102, section 3.2.2). Colossal-AI (arXiv:2110.14883) and Optimus
(arXiv:2104.05343) split activations and weights over two axes too. A collective of a layer crosses the devices of one
of the two axes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sharding.mesh import MeshSpec, ShardingError, divisors
from sharding.rules import FEATURES

TENSOR = "tensor"


@dataclass(frozen=True)
class TensorFactoring:
    """Factoring of the mesh axis ``tensor``.

    Attributes:
        features: parts of the features; 0: near-square, the largest divisor up to the square root.
        tensor: parts of heads and width; 0: the rest of the devices.
    """

    features: int = 0
    tensor: int = 0

    @classmethod
    def parse(cls, text: str) -> TensorFactoring:
        """Factoring written as ``2d``, or as ``2x4``: parts of the features times parts of heads and width.

        Raises:
            ShardingError: it is not written so, or has one part along an axis.
        """
        if text == "2d":
            return cls()
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text.replace(" ", ""))
        if found is None or "1" in found.groups():
            raise ShardingError(
                f'parallel: tensor = {text!r}: give "1d", "2d" for a near-square factoring of the mesh axis tensor, or '
                'parts of the features times parts of heads and width, 2 or more of each, such as "2x4".'
            )
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.features}x{self.tensor}" if self.features else "2d"

    def on(self, mesh: MeshSpec) -> MeshSpec:
        """Mesh with ``tensor`` factored; its devices keep their places. The mesh itself where it is so already.

        Args:
            mesh: with all sizes known.

        Raises:
            ShardingError: the axis does not factor so; names the factorings that it has.
        """
        sizes = dict(mesh.axes)
        size, said = sizes.get(TENSOR, 1), f'parallel: tensor = "{self}"'
        if FEATURES in sizes:
            if not self.features or (self.features, self.tensor) == (sizes[FEATURES], size):
                return mesh
            raise ShardingError(
                f'{said} factors the mesh axis tensor, and the mesh {mesh} has features already: leave tensor at "1d", '
                f"or give the mesh tensor={sizes[FEATURES] * size} alone."
            )
        if not (choices := legal(size)):
            near = sorted((n for n in range(4, 2 * size + 5) if legal(n)), key=lambda n: (abs(n - size), n))[:3]
            raise ShardingError(
                f"{said} factors the mesh axis tensor in two, and tensor={size} has no two factors above 1: give it a "
                f'size that has, such as {", ".join(map(str, sorted(near)))}, or tensor = "1d".'
            )
        chosen = self if self.features else choices[0]
        if chosen not in choices:
            raise ShardingError(
                f"{said} is {chosen.features * chosen.tensor} devices, and the mesh {mesh} has tensor={size}. The "
                f"nearest factorings of {size} are {', '.join(map(repr, map(str, choices[:4])))}."
            )
        split = {TENSOR: ((FEATURES, chosen.features), (TENSOR, chosen.tensor))}
        return MeshSpec(tuple(part for axis in mesh.axes for part in split.get(axis[0], (axis,))))


def legal(size: int) -> list[TensorFactoring]:
    """Factorings of so many devices into two parts above 1, the nearest to square first."""
    found = [TensorFactoring(n, size // n) for n in divisors(size) if 1 < n < size]
    return sorted(found, key=lambda one: (max(one.features, one.tensor) / min(one.features, one.tensor), one.features))
