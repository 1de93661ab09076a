"""Arena: offsets in one block of memory for arrays with known live ranges, and a lower bound of the block's size.

A compiler that packs arrays into one block leaves gaps. How large the block could be tells whether they matter: no
packing takes less than the live bytes at the fullest step, and two greedy packings usually come close to that
("Efficient Memory Management for Deep Neural Net Inference", arXiv:2001.03288, section 5). No compiler is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class LiveRange(NamedTuple):
    """Array that needs so many bytes from its first to its last step, both included."""

    bytes: int
    first: int
    last: int

    def meets(self, other: LiveRange) -> bool:
        """Whether both need their memory at one step."""
        return self.first <= other.last and other.first <= self.last


class Packing(NamedTuple):
    """Offsets of arrays in a block of so many bytes."""

    bytes: int
    offsets: tuple[int, ...]


def live_bytes(ranges: Sequence[LiveRange]) -> np.ndarray:
    """Live bytes at each step, int64[steps]; their maximum is a lower bound of every packing."""
    changes = np.zeros(max((one.last for one in ranges), default=-1) + 2, np.int64)
    for one in ranges:
        changes[one.first] += one.bytes
        changes[one.last + 1] -= one.bytes
    return changes.cumsum()[:-1]


def pack(ranges: Sequence[LiveRange]) -> Packing:
    """The smaller of two greedy packings: by size, and by the live bytes of steps."""
    return min((place(ranges, order) for order in (by_size(ranges), by_breadth(ranges))), key=lambda one: one.bytes)


def by_size(ranges: Sequence[LiveRange]) -> list[int]:
    """Order of placement: the largest array first."""
    return sorted(range(len(ranges)), key=lambda i: -ranges[i].bytes)


def by_breadth(ranges: Sequence[LiveRange]) -> list[int]:
    """Order of placement: the arrays of the fullest step first, the largest of them first; then the next step's."""
    live = live_bytes(ranges)
    if not ranges:
        return []
    # The fullest step of an array is where it is placed, so it has the rank of that step among all.
    rank = np.empty(len(live), np.int64)
    rank[np.argsort(-live, kind="stable")] = np.arange(len(live))
    first = [int(rank[one.first : one.last + 1].min()) for one in ranges]
    return sorted(range(len(ranges)), key=lambda i: (first[i], -ranges[i].bytes))


def place(ranges: Sequence[LiveRange], order: Iterable[int]) -> Packing:
    """Places arrays in an order, each in the smallest gap that holds it between those it meets, else behind them."""
    sizes, firsts, lasts = np.array(ranges, np.int64).reshape(-1, 3).T
    offsets = np.full(len(ranges), -1, np.int64)
    for i in order:
        met = np.flatnonzero((offsets >= 0) & (firsts <= ranges[i].last) & (ranges[i].first <= lasts))
        end, best, gap = 0, -1, None
        for j in met[np.argsort(offsets[met], kind="stable")]:
            room = int(offsets[j]) - end
            if room >= ranges[i].bytes and (gap is None or room < gap):
                best, gap = end, room
            end = max(end, int(offsets[j] + sizes[j]))
        offsets[i] = end if gap is None else best
    return Packing(int(max((offsets + sizes).tolist(), default=0)), tuple(offsets.tolist()))
