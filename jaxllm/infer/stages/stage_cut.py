"""Stage cut: which layers of a model each pipeline stage has.

Stages have consecutive layers, cut between the repeats of a segment's group of blocks (``DecoderConfig.segments``), so
that the stage with the most layers has as few as possible.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.infer.streaming.layer_store import Unit, units_of


@dataclass(frozen=True)
class Stretch:
    """Consecutive repeats of one segment.

    Attributes:
        segment: index of the segment, ``DecoderConfig.segments``.
        start, stop: its repeats, from ``start`` to before ``stop``.
        first: number in the model of the first layer.
    """

    segment: int
    start: int
    stop: int
    first: int

    def weights(self, params: Any) -> Any:
        """Weights of these repeats, stacked, of a model's parameters whose layers are stacked or apart."""
        segment = params["segments"][str(self.segment)]
        if isinstance(segment, tuple):
            return jax.tree.map(lambda *layers: jnp.stack(layers), *segment[self.start : self.stop])
        return jax.tree.map(lambda x: x[self.start : self.stop], segment)


@dataclass(frozen=True)
class StageLayers:
    """Layers of one stage.

    Attributes:
        layers: their numbers in the model.
        stretches: the same layers as repeats of segments, in order.
    """

    layers: range
    stretches: tuple[Stretch, ...]


def cut_stages(segments: Any, stages: int) -> tuple[StageLayers, ...]:
    """Cuts a model's layers into stages.

    Args:
        segments: ``DecoderConfig.segments``.
        stages: number of stages.

    Raises:
        ValueError: the model has fewer repeats of its groups of blocks than there are stages.
    """
    units = units_of(segments)
    if stages > len(units):
        raise ValueError(
            f"stage = {stages}: the model has {len(units)} groups of layers to cut between; give stage = 2 to "
            f"{len(units)}, or split heads over tensor."
        )
    sizes = [len(segments[unit.segment][0]) for unit in units]
    starts = [0, *itertools.accumulate(sizes)]
    # fewest[n][k]: layers of the largest stage when the first n units are in k stages, and where the last one begins.
    fewest: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for n in range(1, len(units) + 1):
        found: dict[int, tuple[int, int]] = {}
        for begin, k in itertools.product(range(n), range(1, stages + 1)):
            if k - 1 in fewest[begin]:
                most = max(fewest[begin][k - 1][0], starts[n] - starts[begin])
                found[k] = min(found.get(k, (most, begin)), (most, begin))
        fewest.append(found)
    ends = [len(units)]
    for k in range(stages, 0, -1):
        ends.insert(0, fewest[ends[0]][k][1])
    return tuple(StageLayers(range(starts[a], starts[b]), _stretches(units[a:b])) for a, b in itertools.pairwise(ends))


def _stretches(units: list[Unit]) -> tuple[Stretch, ...]:
    groups = [list(group) for _, group in itertools.groupby(units, key=lambda unit: unit.segment)]
    return tuple(Stretch(g[0].segment, g[0].repeat, g[-1].repeat + 1, g[0].first) for g in groups)
