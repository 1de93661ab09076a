"""Depths of unequal pipeline stages: splits of layers of which none has both a smaller latency and a shorter stage.

A stage of d layers is busy for u = fixed + d x layer seconds a micro-batch. A step of m micro-batches takes

    sum over stages of u + (m - 1) max over stages of u

so the best split for any m is one of those that no other beats in both the sum (latency) and the maximum (inverse
throughput): the Pareto front (ParetoPipe, arXiv:2601.08025).

Legend: P stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class DepthSplit(NamedTuple):
    """Layers of a pipeline's stages.

    Attributes:
        total: seconds of a micro-batch over all stages, its latency.
        slowest: seconds of a micro-batch in the slowest stage.
        depths: layers of each stage. [P]
    """

    total: float
    slowest: float
    depths: tuple[int, ...]

    def seconds(self, micro_batches: int) -> float:
        """Seconds of a step."""
        return self.total + (micro_batches - 1) * self.slowest


def depth_splits(layer: Sequence[float], fixed: Sequence[float], layers: int, most: int) -> list[DepthSplit]:
    """Non-dominated splits, the one with the shortest slowest stage first; none where the layers do not fit.

    Args:
        layer: seconds of one layer, by stage. [P]
        fixed: seconds of a stage beside its layers. [P]
        layers: of the model; each stage gets at least one.
        most: layers that a stage may have.
    """
    found: list[DepthSplit] = []
    for split in _ascending(layer, fixed, layers, most):
        if not found or split.total < found[-1].total * (1 - 1e-12):  # by more than rounding
            found.append(split)
    return found


def best_split(
    layer: Sequence[float], fixed: Sequence[float], layers: int, most: int, micro_batches: int
) -> DepthSplit | None:
    """Split with the fastest step, the first one of ``depth_splits``' where several are; None where none fits.

    Args:
        layer, fixed, layers, most: see ``depth_splits``.
        micro_batches: of a step.
    """
    least = _filled(layer, fixed, layers, [most] * len(layer))
    if least is None:
        return None
    best: DepthSplit | None = None
    for split in _ascending(layer, fixed, layers, most):
        if best is not None and least.total + (micro_batches - 1) * split.slowest >= best.seconds(micro_batches):
            break  # slower stages from here on, and no smaller sum
        if best is None or split.seconds(micro_batches) < best.seconds(micro_batches):
            best = split
    return best


def split_of(layer: Sequence[float], fixed: Sequence[float], depths: Sequence[int]) -> DepthSplit:
    """A split with its seconds.

    Args:
        layer, fixed: see ``depth_splits``.
        depths: layers of each stage. [P]
    """
    seconds = [f + d * one for one, f, d in zip(layer, fixed, depths, strict=True)]
    return DepthSplit(sum(seconds), max(seconds), tuple(depths))


def _ascending(layer: Sequence[float], fixed: Sequence[float], layers: int, most: int) -> Iterator[DepthSplit]:
    """The split of the least sum below each bound that a slowest stage can have, by rising bounds."""
    bounds = sorted({f + d * one for one, f in zip(layer, fixed, strict=True) for d in range(1, most + 1)})
    low, high = 0, len(bounds)
    while low < high:  # the first bound below which the layers fit
        middle = (low + high) // 2
        if _below(layer, fixed, layers, most, bounds[middle]) is None:
            low = middle + 1
        else:
            high = middle
    for bound in bounds[low:]:
        split = _below(layer, fixed, layers, most, bound)
        assert split is not None
        yield split


def _below(layer: Sequence[float], fixed: Sequence[float], layers: int, most: int, bound: float) -> DepthSplit | None:
    room = [min(most, _deepest(one, f, bound)) for one, f in zip(layer, fixed, strict=True)]
    return _filled(layer, fixed, layers, room)


def _deepest(layer: float, fixed: float, bound: float) -> int:
    """Layers of a stage that takes at most ``bound`` seconds, by the same sums as ``_filled``'s."""
    depth = max(0, math.floor((bound - fixed) / layer))
    while fixed + (depth + 1) * layer <= bound:
        depth += 1
    while depth and fixed + depth * layer > bound:
        depth -= 1
    return depth


def _filled(layer: Sequence[float], fixed: Sequence[float], layers: int, room: Sequence[int]) -> DepthSplit | None:
    """Split of the least sum within the stages' rooms: one layer each, then the fastest stages first."""
    if min(room) < 1 or sum(room) < layers or layers < len(layer):
        return None
    depths, left = [1] * len(layer), layers - len(layer)
    for stage in sorted(range(len(layer)), key=lambda p: layer[p]):
        more = min(left, room[stage] - 1)
        depths[stage] += more
        left -= more
    return split_of(layer, fixed, depths)
