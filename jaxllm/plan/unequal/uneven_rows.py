"""Uneven rows and uneven shards of optimizer state for unequal replicas (Cephalo, arXiv:2411.01075).

How many micro-batches a device computes follows from its speed, and how much optimizer state it holds from the memory
that it has left: two choices that do not depend on each other.

Legend: U units.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

MOST_WEIGHT = 256
"""Largest sum of weights that are tried: a device with room for less than such a part of the state cannot take part."""


def split_rows(micro_batch: Sequence[float], fixed: Sequence[float], total: int) -> tuple[int, ...]:
    """Micro-batches of each unit, at least one, for which the last unit is ready soonest: exact. [U]

    Each micro-batch goes to the unit that would be ready first with it.

    Args:
        micro_batch: seconds of a micro-batch, by unit. [U]
        fixed: seconds of a unit beside them. [U]
        total: micro-batches of all units, at least U.

    Raises:
        ValueError: there are fewer micro-batches than units.
    """
    if total < len(micro_batch):
        raise ValueError(f"uneven rows: {total} micro-batches for {len(micro_batch)} units; give each one or more.")
    counts = [1] * len(micro_batch)
    ready = [(fixed[u] + 2 * micro_batch[u], u) for u in range(len(counts))]
    heapq.heapify(ready)
    for _ in range(total - len(counts)):
        _, unit = ready[0]
        counts[unit] += 1
        heapq.heapreplace(ready, (fixed[unit] + (counts[unit] + 1) * micro_batch[unit], unit))
    return tuple(counts)


def split_state(room: Sequence[float], state: float) -> tuple[float, ...] | None:
    """Shares of the optimizer state that units hold, as even as their memory allows; None where it does not fit. [U]

    Args:
        room: bytes that a device of each unit has left for it. [U]
        state: bytes of all of it, of one device of each unit together.
    """
    if sum(min(max(one, 0.0), state) for one in room) < state:
        return None
    if not state:
        return (1 / len(room),) * len(room)
    shares, left = [0.0] * len(room), 1.0
    ranked = sorted(range(len(room)), key=lambda u: room[u])
    for place, unit in enumerate(ranked):  # those with the least room first: what they cannot take, the others share
        shares[unit] = min(max(room[unit], 0.0) / state, left / (len(room) - place))
        left -= shares[unit]
    return tuple(shares)


def share_weights(room: Sequence[float], state: float) -> tuple[int, ...] | None:
    """Weights of the shares of ``split_state``, for ``parallel.state_shares``; None where no small ones fit. [U]

    The sum is the smallest with which the largest share is at most a twentieth larger than with any shares, or else the
    one up to ``MOST_WEIGHT`` whose largest share is smallest.

    Args:
        room, state: as for ``split_state``.
    """
    ideal = split_state(room, state)
    if ideal is None:
        return None
    best: tuple[float, tuple[int, ...]] | None = None
    for total in range(len(room), MOST_WEIGHT + 1):
        most = [total if not state else math.floor(total * min(max(one, 0.0) / state, 1.0)) for one in room]
        if min(most) < 1 or sum(most) < total:
            continue
        weights, left = [0] * len(room), total
        ranked = sorted(range(len(room)), key=lambda u: most[u])
        for place, unit in enumerate(ranked):
            weights[unit] = min(most[unit], left // (len(room) - place))
            left -= weights[unit]
        largest = max(weights) / total
        if best is None or largest < best[0]:
            best = largest, tuple(weights)
        if largest <= 1.05 * max(ideal):
            break
    return None if best is None else best[1]
