"""Offload bands: which layers of which chunks of a pipeline stage go to the host, longest-lived chunks first.

PipeOffload (arXiv:2503.01328) offloads first what lives longest. All stages run one program, in which what differs from
chunk to chunk is data: layers are divided into bands, in each of which a chunk's activations go to the host as a whole
or stay. A band has pools of its own, on the device for the chunks that stay, in host memory for the others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxllm.parallel.pipeline.schedule import Schedule, ScheduleError

OffloadedChunks = Literal["all", "longest"]
"""Chunks that a share of a stage's layers is taken of: the same share of all, or those that live longest first."""


class OffloadBand(NamedTuple):
    """Layers of every chunk, from ``first`` to ``end``, of which the chunks ``away`` are offloaded."""

    first: int
    end: int
    away: frozenset[int]


def chunk_lifespans(schedule: Schedule) -> tuple[float, ...]:
    """Time from the end of a chunk's forward operation to its last use, a mean over stages and micro-batches."""
    spans: list[list[float]] = [[] for _ in range(schedule.chunks)]
    last = schedule.kinds[-1]
    for row in schedule.timeline():
        ends = {one.op: one.end for one in row}
        for op, end in ends.items():
            if op.kind == "F":
                spans[op.chunk].append(ends[op._replace(kind=last)] - end)
    return tuple(sum(one) / len(one) for one in spans)


def check_offloaded_chunks(schedule: Schedule, share: float, which: OffloadedChunks) -> None:
    """Checks that chunks can be told apart.

    Raises:
        ScheduleError: there is one, or nothing is offloaded.
    """
    if which == "longest" and (schedule.chunks == 1 or not share):
        raise ScheduleError(
            f'parallel: offload_chunks = "longest" with {schedule.name}, which has {schedule.chunks} chunks on a '
            f"stage, and offload = {share:g}; give a schedule of several chunks and a share above 0, or "
            'offload_chunks = "all".'
        )


def offload_bands(
    schedule: Schedule, rooms: Sequence[int], share: float, which: OffloadedChunks = "all"
) -> tuple[tuple[OffloadBand, ...], ...]:
    """Bands of each segment's layers.

    Args:
        schedule: of the pipeline.
        rooms: most layers (or groups) of each segment on a virtual stage.
        share: of a stage's layers that are offloaded; of each segment, as many as of all chunks, rounded up.
        which: chunks that they are taken of.

    Raises:
        ScheduleError: see ``check_offloaded_chunks``.
    """
    check_offloaded_chunks(schedule, share, which)
    found = []
    for room in rooms:
        away = math.ceil(share * room)
        counts = [away] * schedule.chunks
        if which == "longest":
            left = away * schedule.chunks
            spans = chunk_lifespans(schedule)
            for chunk in sorted(range(schedule.chunks), key=lambda chunk: -spans[chunk]):
                counts[chunk] = min(room, left)
                left -= counts[chunk]
        cuts = sorted({0, room, *counts})
        found.append(
            tuple(
                OffloadBand(first, end, frozenset(c for c, count in enumerate(counts) if count >= end))
                for first, end in itertools.pairwise(cuts)
            )
        )
    return tuple(found)
