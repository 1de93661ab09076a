"""Parts of a serving step: makespan of a step whose rows go through each sublayer in parts, and the best parts.

A device computes one part of a sublayer at a time, and its links carry one all-reduce at a time; a part's sublayer
waits for the all-reduce of the part's sublayer before (NanoFlow, arXiv:2408.12757; ISO, arXiv:2409.11155, has two parts
of a prompt). More parts hide more of the all-reduces, and each reads the weights again. ``best_parts`` compares all
ways to cut the rows; the engine cuts them in the middle (``jaxllm.infer.runner.step.step_halves``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxllm.plan.formulas.serving_step import BatchWork, ServingStepModel

SUBLAYERS = 2
"""All-reduces of a layer: after attention, and after the feed-forward layer."""


@dataclass(frozen=True)
class PartedStep:
    """Step in parts.

    Attributes:
        sizes: rows of each part.
        seconds: makespan.
    """

    sizes: tuple[int, ...]
    seconds: float


def makespan(compute: Sequence[float], network: Sequence[float], sublayers: int) -> float:
    """Seconds until the last all-reduce of all parts.

    Args:
        compute: seconds that a sublayer of each part computes, in the order of the parts.
        network: seconds of its all-reduce.
        sublayers: one after the other.
    """
    reduced = [0.0] * len(compute)
    device = links = 0.0
    for _ in range(sublayers):
        for part, (own, sent) in enumerate(zip(compute, network, strict=True)):
            device = max(device, reduced[part]) + own
            reduced[part] = links = max(links, device) + sent
    return max(reduced)


def parted_step(model: ServingStepModel, sizes: Sequence[int], start: int = 0) -> PartedStep:
    """Makespan of one prompt's chunk in parts of so many tokens, without the head.

    Args:
        model: costs of a step; its collectives are taken to be the all-reduces after the sublayers.
        sizes: tokens of each part.
        start: tokens of the prompt before the chunk.
    """
    sublayers, each, at = SUBLAYERS * model.config.layers, [], start
    for size in sizes:
        batches = [BatchWork.of([at], [size])] * model.replicas
        each.append(model.step(batches, size, 0))
        at += size
    compute = [(one.seconds - one.network) / sublayers for one in each]
    return PartedStep(tuple(sizes), makespan(compute, [one.network / sublayers for one in each], sublayers))


def best_parts(model: ServingStepModel, rows: int, most: int = 4, grid: int = 8) -> PartedStep:
    """The parts of a prompt's chunk with the least makespan; the fewest of equally good ones.

    Args:
        model: costs of a step.
        rows: tokens of the chunk.
        most: parts.
        grid: the rows are cut at multiples of 1 / grid of them.

    Raises:
        ValueError: the rows cannot be cut so, or no part is allowed.
    """
    if rows < grid or not 1 <= most <= grid:
        raise ValueError(f"rows = {rows} in up to {most} parts; give {grid} rows or more, and 1 to {grid} parts.")
    found = [parted_step(model, sizes) for sizes in cuts(rows, most, grid)]
    return min(found, key=lambda one: (one.seconds, len(one.sizes)))


def cuts(rows: int, most: int, grid: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut rows into up to ``most`` parts at multiples of 1 / grid, as the sizes of the parts."""
    for count in range(1, most + 1):
        for inner in itertools.combinations(range(1, grid), count - 1):
            ends = [0, *(rows * one // grid for one in inner), rows]
            yield tuple(b - a for a, b in itertools.pairwise(ends))
