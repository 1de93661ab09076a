"""Expert folding: the layers' experts factor the devices of a mesh in another way than attention does.

(MoE Parallel Folding, arXiv:2504.14960, section 3.2.) A mesh says how attention uses its devices: which split tokens,
which split heads. For experts the same devices are expert shards times shards of the experts' width, and what is left
of them has replicas of the experts, each with its own tokens. Axes are taken from the innermost outwards, for the width
first: it communicates most, and the exchange of tokens comes next.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sharding.mesh import AXES, ShardingError

FOLDED = ("data", "fsdp", "context", "expert", "ulysses", "tensor")
"""Mesh axes whose devices experts may factor, outermost first: neither replicas nor stages."""
_BATCH, _SEQ = ("replica", "data", "local", "fsdp", "expert"), ("context", "ulysses", "tensor")


@dataclass(frozen=True)
class Folding:
    """Factoring of a mesh's devices for experts.

    Attributes:
        expert: shards that the experts are split into.
        tensor: shards of the experts' width.
    """

    expert: int
    tensor: int = 1

    @classmethod
    def parse(cls, text: str) -> Folding:
        """Folding written as ``expert=8`` or ``expert=4,tensor=2``.

        Raises:
            ShardingError: it is not written so.
        """
        found = re.fullmatch(r"expert=([1-9]\d*)(?:,tensor=([1-9]\d*))?", text.replace(" ", ""))
        if found is None:
            raise ShardingError(
                f'experts = {text!r}: give the number of expert shards, such as "expert=8", and if their width is '
                'split, of its shards, such as "expert=4,tensor=2".'
            )
        return cls(int(found[1]), int(found[2] or 1))

    def __str__(self) -> str:
        return f"expert={self.expert}" + (f",tensor={self.tensor}" if self.tensor > 1 else "")

    def table(self, sizes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
        """Mesh axes of the experts' logical axes on a mesh whose axes have these sizes.

        Raises:
            ShardingError: the axes do not factor so; names what does.
        """
        return dict(_table(self, tuple((axis, sizes[axis]) for axis in FOLDED if sizes.get(axis, 1) > 1)))


@functools.lru_cache(maxsize=64)
def _table(folding: Folding, sizes: tuple[tuple[str, int], ...]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    width = _innermost(sizes, folding.tensor)
    shards = None if width is None else _innermost(sizes[: len(sizes) - len(width)], folding.expert)
    if width is None or shards is None:
        axes = " x ".join(f"{axis}={size}" for axis, size in sizes) or "one device"
        nearest = sorted(legal(sizes), key=lambda one: (_distance(one, folding), one.expert, one.tensor))[:4]
        raise ShardingError(
            f'parallel: experts = "{folding}" does not fit the mesh {axes}: the shards of the width are whole axes '
            "from the innermost outwards, and the expert shards those before them. The nearest that fit are "
            f"{', '.join(map(repr, map(str, nearest)))}. The mesh axis expert divides fsdp where a size between is "
            "missing: outside of experts both are the same."
        )
    tokens = tuple(axis for axis in AXES if axis not in width)
    stored = tuple(axis for axis in tokens if axis in FOLDED and axis not in (*shards, "data"))
    return (
        ("experts", shards),
        ("expert_mlp", width),
        ("expert_embed", stored),
        ("router_seq", tuple(axis for axis in _SEQ if axis != "tensor" or axis not in width)),
        ("expert_batch", tuple(axis for axis in tokens if axis in _BATCH)),
        ("expert_seq", tuple(axis for axis in tokens if axis in _SEQ)),
    )


def legal(sizes: tuple[tuple[str, int], ...]) -> list[Folding]:
    """Foldings that fit mesh axes of these names and sizes, outermost first."""
    found = []
    for end in range(len(sizes), -1, -1):
        for begin in range(end, -1, -1):
            counts = [math.prod(size for _, size in part) for part in (sizes[begin:end], sizes[end:])]
            found.append(Folding(*counts))
    return found


def _innermost(sizes: tuple[tuple[str, int], ...], count: int) -> tuple[str, ...] | None:
    """Innermost axes with so many devices, outermost first; None if there are none."""
    for begin in range(len(sizes), -1, -1):
        if math.prod(size for _, size in sizes[begin:]) == count:
            return tuple(axis for axis, _ in sizes[begin:])
    return None


def _distance(one: Folding, asked: Folding) -> float:
    return abs(math.log(one.expert / asked.expert)) + abs(math.log(one.tensor / asked.tensor))
