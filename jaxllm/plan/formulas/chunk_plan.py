"""Chunks of equal size: a model's tensors packed into chunks, and which chunks are on the device at each moment.

PatrickStar (arXiv:2108.05818) searches the size of chunks that wastes least, and has a warm-up step record when each
chunk is needed and what other memory takes meanwhile. After that the chunk that is needed latest leaves the device
first, which is Belady's rule: with chunks of equal size no order of evictions loads fewer. This is the plan alone; the
disk tier (``jaxllm.train.disk``) moves layers, in an order that it knows without a warm-up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.memory_estimate import MemoryEstimate


class ChunkError(ValueError):
    """Chunks that tensors or a device cannot have; says which, and how large they may be."""


class ChunkLayout(NamedTuple):
    """Layout of tensors in chunks.

    Attributes:
        size: bytes of a chunk.
        chunks: chunk of each tensor, in the order of tensors.
        used: bytes of all tensors.
    """

    size: int
    chunks: tuple[int, ...]
    used: int

    @property
    def count(self) -> int:
        """Number of chunks."""
        return self.chunks[-1] + 1

    @property
    def waste(self) -> int:
        """Bytes of chunks that no tensor has."""
        return self.count * self.size - self.used


def chunk_layout(sizes: Sequence[int], size: int) -> ChunkLayout:
    """Layout of tensors in the order in which they are used; one that does not fit begins the next chunk.

    Args:
        sizes: bytes of tensors.
        size: bytes of a chunk.

    Raises:
        ChunkError: there is no tensor, or one is larger than a chunk.
    """
    if not sizes:
        raise ChunkError("chunks: there are no tensors to pack.")
    if max(sizes) > size:
        raise ChunkError(f"chunks of {size:,} bytes: a tensor has {max(sizes):,}; give larger chunks.")
    chunks, chunk, room = [], 0, size
    for one in sizes:
        if one > room:
            chunk, room = chunk + 1, size
        room -= one
        chunks.append(chunk)
    return ChunkLayout(size, tuple(chunks), sum(sizes))


def least_waste(sizes: Sequence[int], least: int, most: int) -> ChunkLayout:
    """Layout that wastes fewest bytes of all chunk sizes in a range; the smallest chunks of equals.

    More bytes in a chunk never need more chunks, so for each number of chunks the smallest size that suffices is found
    by bisection, instead of a search over a grid of sizes as in the paper.

    Args:
        sizes: bytes of tensors, in the order in which they are used.
        least, most: smallest and largest chunks to consider.

    Raises:
        ChunkError: a tensor is larger than the largest chunk.
    """
    fewest, lowest = chunk_layout(sizes, most).count, max(least, *sizes)
    allowed = range(lowest, most + 1)
    found = [
        chunk_layout(sizes, allowed[bisect_left(allowed, -count, key=lambda size: -chunk_layout(sizes, size).count)])
        for count in range(fewest, chunk_layout(sizes, lowest).count + 1)
    ]
    return min(found, key=lambda layout: (layout.waste, layout.size))


class Moment(NamedTuple):
    """Moment of a step: the start of an operation.

    Attributes:
        needs: chunks that the operation reads or writes.
        others: bytes of a device that are not in chunks meanwhile: activations, temporaries.
    """

    needs: frozenset[int]
    others: int


class ChunkTraffic(NamedTuple):
    """Chunks that moved in one step.

    Attributes:
        loads, evictions: chunks moved to the device, and away from it.
        most: most chunks on the device.
    """

    loads: int
    evictions: int
    most: int


def replay(
    moments: Sequence[Moment], size: int, capacity: int, steps: int, leaves: Literal["latest use", "oldest use"]
) -> list[ChunkTraffic]:
    """Chunks that move in each of some equal steps, all of them elsewhere before the first.

    Args:
        moments: of a step, as a warm-up records them.
        size: bytes of a chunk.
        capacity: bytes of the device.
        steps: number of steps.
        leaves: the chunk that leaves: the one whose next use is latest, or whose last use is oldest (LRU).

    Raises:
        ChunkError: the chunks of one moment do not fit beside its other bytes.
    """
    uses: dict[int, list[int]] = {}
    for time in range(steps * len(moments)):
        for chunk in moments[time % len(moments)].needs:
            uses.setdefault(chunk, []).append(time)
    never = steps * len(moments)
    here: set[int] = set()
    found = []
    for step in range(steps):
        loads = evictions = most = 0
        for number, moment in enumerate(moments):
            time = step * len(moments) + number
            room = (capacity - moment.others) // size
            if len(moment.needs) > room:
                raise ChunkError(
                    f"chunks of {size:,} bytes: moment {number} needs {len(moment.needs)} of them and "
                    f"{moment.others:,} other bytes; a device of {capacity:,} has room for {max(room, 0)}. "
                    "Give smaller chunks."
                )

            def last(chunk: int, time: int = time) -> int:
                return -uses[chunk][bisect_left(uses[chunk], time) - 1]

            def next_one(chunk: int, time: int = time) -> int:
                after = bisect_left(uses[chunk], time)
                return uses[chunk][after] if after < len(uses[chunk]) else never

            key = next_one if leaves == "latest use" else last
            free = sorted(here - moment.needs, key=lambda chunk: (key(chunk), chunk))
            while free and len(free) + len(moment.needs) > room:
                here.remove(free.pop())
                evictions += 1
            loads += len(moment.needs - here)
            here |= moment.needs
            most = max(most, len(here))
        found.append(ChunkTraffic(loads, evictions, most))
    return found


def parameter_sizes(work: DeviceWork) -> tuple[list[int], list[range]]:
    """Bytes of a device's parameters in compute dtype, in the order of the forward pass, and those of each layer.

    What is outside of layers comes first, as one layer.
    """
    ends = [w.stored * w.layers * work.width for w in work.weights if not w.name.startswith("segments/")]
    sizes, layers = list(ends), [range(len(ends))]
    segments: dict[str, list[tuple[int, int]]] = {}
    for w in work.weights:
        if w.name.startswith("segments/"):
            segments.setdefault(w.name.split("/")[1], []).append((w.layers, w.stored * work.width))
    for parts in segments.values():
        for _ in range(parts[0][0]):
            layers.append(range(len(sizes), len(sizes) + len(parts)))
            sizes += [size for _, size in parts]
    return sizes, layers


def pass_moments(layout: ChunkLayout, layers: Iterable[range], estimate: MemoryEstimate) -> list[Moment]:
    """Moments of a forward and a backward pass, one for each layer and direction, and one between them for the loss.

    What is outside of layers, the first of ``layers``, is needed at the beginning, for the loss, and at the end. A
    layer's gradients take the place of its parameters, as in the paper, so they need no chunks of their own. Saved
    activations grow in the forward pass and shrink in the backward pass.

    Args:
        layout: of the parameters.
        layers: tensors of each layer, see ``parameter_sizes``.
        estimate: the planner's, for activations and working memory.
    """
    needs = [frozenset(layout.chunks[tensor] for tensor in layer) for layer in layers]
    forward = [
        Moment(chunks, estimate.batch + estimate.working + estimate.activations * number // len(needs))
        for number, chunks in enumerate(needs)
    ]
    loss = Moment(needs[0], estimate.batch + estimate.working + estimate.activations)
    return [*forward, loss, *reversed(forward)]
