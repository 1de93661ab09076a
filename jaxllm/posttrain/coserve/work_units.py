"""Work units of a fine-tuning step in chunks: forward passes of a row's chunks, backward passes, and the update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int

UnitKind = Literal["forward", "backward", "update"]


class WorkUnit(NamedTuple):
    """One run of a program, which is not interrupted.

    Attributes:
        kind: the program.
        row, token: first row and first token of the chunk; 0 for an update.
        fresh: the step's first forward or backward pass: sums and gradients begin with it.
        last: no later chunk of the row has a backward pass.
        tokens: tokens of the chunk, padding included; 0 for an update.
    """

    kind: UnitKind
    row: int = 0
    token: int = 0
    fresh: bool = False
    last: bool = False
    tokens: int = 0


def work_units(segment_ids: Int[np.ndarray, "B S"], rows: int, chunk: int) -> Iterator[WorkUnit]:
    """Units of a step in their order. Chunks of nothing but padding at the end of rows are left out, but for the first.

    Args:
        segment_ids: document number of each token of the batch, 0 for padding.
        rows: rows that are computed together.
        chunk: tokens of a chunk.
    """
    size = rows * chunk
    fresh = True
    for row in range(0, len(segment_ids), rows):
        used = np.flatnonzero(segment_ids[row : row + rows].any(axis=0))
        ends = range(0, int(used[-1]) + 1 if used.size else int(fresh), chunk)
        for token in ends:
            yield WorkUnit("forward", row, token, fresh and token == 0, token == ends[-1], size)
        for token in reversed(ends):
            yield WorkUnit("backward", row, token, fresh and token == ends[-1], token == ends[-1], size)
        fresh = False
    yield WorkUnit("update")


def padded_length(seq_len: int, chunk: int) -> int:
    """Length of rows that chunks divide."""
    return -(-seq_len // chunk) * chunk
