"""Context parallelism by need: each document of a batch takes as many devices as it needs (ByteScale).

A device has a slot of so many tokens in each micro-step. Before a batch goes to the devices, the host places its
documents in slots (Hybrid Data Parallelism, arXiv:2502.21231): one that fits a slot stays whole on one device, a longer
one is split over a ring of neighbouring devices. All rings of a micro-step have the same size, so a micro-step of
short documents sends no keys and values at all.

- Ring sizes are the divisors of the axis ``context``, up to the smallest that holds the longest row: a bounded number
  of ways to run, all of them in the one compiled step.
- Longest documents come first, and fill the rings of a micro-step; what is left of their slots has short documents.
- Short documents go, the longest first, where they raise the quadratic work of the busiest device least. A micro-step
  is added when one fits nowhere, so all but the last are more than half full.

Legend: B rows of a batch, S tokens of a row, M micro-steps, R rows of devices (all axes that split batches), C devices
of ``context``, L tokens of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from pallas_kernels.ring_attention.layout import Layout
from sharding import ShardingError


class SlottedBatch(NamedTuple):
    """Batch whose documents lie in slots: a pytree.

    Attributes:
        rows: the batch's arrays, [M R C*L]; micro-steps from ``count`` on are padding.
        rings: index of the ring size of each micro-step, int32 [M].
        count: micro-steps with tokens, int32.
    """

    rows: Any
    rings: Any
    count: Any


class Placement(NamedTuple):
    """Where the documents of a batch are.

    Attributes:
        source: index in the flattened batch of the token at each place, [M R C*L]; -1 for padding.
        document: number of the document there, from 1; 0 for padding.
        rings: ring size of each micro-step with tokens.
        work: pairs of a query and a key that each device computes, [micro-steps, R*C].
    """

    source: Int[np.ndarray, "M R T"]
    document: Int[np.ndarray, "M R T"]
    rings: list[int]
    work: Int[np.ndarray, "m slots"]

    @property
    def imbalance(self) -> float:
        """Time of the busiest devices over that of equal work, 1 or more: micro-steps end when all devices have."""
        return float(self.work.max(axis=1).sum() / max(self.work.mean(axis=1).sum(), 1))


@dataclass(frozen=True)
class ContextSlots:
    """Slots of the devices, and how documents are placed in them.

    Attributes:
        rows: R, rows of devices.
        devices: C, devices of the axis ``context``.
        slot: L, tokens of a device in a micro-step.
        seq_len: tokens of the longest document.
        tokens: of a batch, padding included.
        layout: of a document that is split: which of its tokens each device of its ring has.

    Raises:
        ShardingError: a row is longer than all devices of ``context`` hold; names the nearest legal settings.
    """

    rows: int
    devices: int
    slot: int
    seq_len: int
    tokens: int
    layout: Layout = "zigzag"

    def __post_init__(self) -> None:
        held = self.slot * self.devices
        if self.seq_len > held:
            needed = -(-self.seq_len // self.slot)
            raise ShardingError(
                f'parallel.context = "by_need": rows of {self.seq_len:,} tokens are longer than the {held:,} that '
                f"context={self.devices} devices of parallel.slot = {self.slot:,} tokens hold; the nearest that fit: "
                f"data.seq_len = {held}, context={needed}, or parallel.slot = {-(-self.seq_len // self.devices)}."
            )

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Ring sizes, ascending: divisors of C up to the smallest that holds the longest document."""
        divisors = [n for n in range(1, self.devices + 1) if self.devices % n == 0]
        return tuple(divisors[: 1 + next(i for i, n in enumerate(divisors) if n * self.slot >= self.seq_len)])

    @cached_property
    def most(self) -> int:
        """M, the most micro-steps of a batch, whatever its documents are.

        Documents of a ring fill more than the size before it does, the last ring of each size apart; slots of short
        documents are more than half full, those of the last micro-step apart.
        """
        ratio = max((b / a for a, b in zip(self.sizes, self.sizes[1:], strict=False)), default=2.0)
        return int(max(ratio, 2.0) * self.tokens / (self.rows * self.devices * self.slot)) + len(self.sizes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of each array of a slotted batch, [M R C*L]."""
        return self.most, self.rows, self.devices * self.slot

    def describe(self) -> str:
        """Lines that list the ways in which the compiled step runs a micro-step."""
        lines = [
            f"context by need: slots of {self.slot:,} tokens on {self.rows * self.devices} devices, at most "
            f"{self.most} micro-steps a step"
        ]
        low = 0
        for size in self.sizes:
            high = min(size * self.slot, self.seq_len)
            where = "on one device, nothing is sent" if size == 1 else f"over rings of {size} devices"
            lines.append(f"  rows of {low + 1:,} to {high:,} tokens: {where}")
            low = high
        return "\n".join(lines)

    def place(self, lengths: Sequence[int]) -> Placement:
        """Places documents in slots.

        Args:
            lengths: tokens of each document, in the order of the flattened batch; 0 or less for runs of padding, of
                so many tokens.
        """
        sizes = np.abs(np.asarray(lengths, np.int64))
        starts = np.concatenate([[0], np.cumsum(sizes)])
        documents = np.flatnonzero(np.asarray(lengths) > 0)
        documents = documents[np.argsort(-sizes[documents], kind="stable")]
        slots = _OpenSlots(self.rows * self.devices, self.slot)
        rings, parts = [], []  # parts: (slot, document, its tokens there)
        long = [d for d in documents.tolist() if sizes[d] > self.slot]
        while long:
            size = next(n for n in self.sizes if n * self.slot >= sizes[long[0]])
            base = slots.open()
            rings.append(size)
            groups = self.rows * self.devices // size
            for group, d in enumerate(long[:groups]):
                for r, tokens in enumerate(self._split(int(sizes[d]), size)):
                    at = base + group * size + r
                    parts.append((at, d, tokens))
                    slots.add(at, len(tokens), int((tokens + 1).sum()))
            long = long[groups:]
        for d in documents[sizes[documents] <= self.slot].tolist():
            n = int(sizes[d])
            if (at := slots.best(n)) < 0:
                at = slots.open()
                rings.append(1)
            parts.append((at, d, np.arange(n)))
            slots.add(at, n, n * (n + 1) // 2)
        source = np.full(self.most * self.rows * self.devices * self.slot, -1, np.int64)
        document = np.zeros(len(source), np.int32)
        used = np.zeros(self.most * self.rows * self.devices, np.int64)
        for at, d, tokens in parts:
            first = at * self.slot + used[at]
            source[first : first + len(tokens)] = starts[d] + tokens
            document[first : first + len(tokens)] = d + 1
            used[at] += len(tokens)
        work = slots.work.reshape(-1, self.rows * self.devices)
        return Placement(source.reshape(self.shape), document.reshape(self.shape), rings, work)

    def arrange(self, batch: Any) -> SlottedBatch:
        """A batch with its documents in slots: a function of the batch alone.

        Args:
            batch: the whole batch, ``jaxllm.data.Batch`` of [B S] host arrays.
        """
        lengths = document_lengths(batch.segment_ids)
        placed = self.place(lengths)
        real = placed.source >= 0

        def one(x: np.ndarray, fill: int) -> np.ndarray:
            return np.where(real, x.reshape(-1)[placed.source], np.asarray(fill, x.dtype))

        rows = batch._replace(
            **{
                name: one(x, -1 if name == "targets" else 0)
                for name, x in batch._asdict().items()
                if x is not None and name != "segment_ids"
            },
            segment_ids=placed.document,
        )
        rings = np.zeros(self.most, np.int32)
        rings[: len(placed.rings)] = [self.sizes.index(n) for n in placed.rings]
        return SlottedBatch(rows, rings, np.int32(len(placed.rings)))

    def _split(self, length: int, size: int) -> list[Int[np.ndarray, " tokens"]]:
        """Tokens of a document on each device of its ring, ascending; at most L on each."""
        if self.layout == "striped":
            return [np.arange(r, length, size) for r in range(size)]
        each = [length // size + (r < length % size) for r in range(size)]
        if self.layout == "contiguous":
            ends = np.cumsum(each)
            return [np.arange(end - n, end) for end, n in zip(ends.tolist(), each, strict=True)]
        # Zigzag: a part from the front and a part from the back, so that all devices compute equally many pairs.
        front = np.concatenate([[0], np.cumsum([n // 2 for n in each])])
        back = length - np.concatenate([[0], np.cumsum([n - n // 2 for n in each])])
        return [
            np.concatenate([np.arange(front[r], front[r + 1]), np.arange(back[r + 1], back[r])]) for r in range(size)
        ]


class _OpenSlots:
    """Slots of the micro-steps so far: their room and work, and the most work of a slot of each micro-step."""

    def __init__(self, each: int, slot: int):
        self._each, self._slot = each, slot
        self.room, self.work, self._most = (np.zeros(0, np.int64) for _ in range(3))

    def open(self) -> int:
        """Adds the slots of a micro-step; returns the first."""
        first = len(self.room)
        self.room = np.concatenate([self.room, np.full(self._each, self._slot)])
        self.work = np.concatenate([self.work, np.zeros(self._each, np.int64)])
        self._most = np.concatenate([self._most, np.zeros(self._each, np.int64)])
        return first

    def add(self, at: int, tokens: int, work: int) -> None:
        """Adds a part of a document to a slot."""
        self.room[at] -= tokens
        self.work[at] += work
        step = slice(at - at % self._each, at - at % self._each + self._each)
        self._most[step] = np.maximum(self._most[step], self.work[at])

    def best(self, tokens: int) -> int:
        """Slot with room for a short document whose micro-step becomes the least longer; -1 if none has."""
        fits = np.flatnonzero(self.room >= tokens)
        if not len(fits):
            return -1
        after = self.work[fits] + tokens * (tokens + 1) // 2
        longer = np.maximum(after - self._most[fits], 0)
        best = np.flatnonzero(longer == longer.min())
        return int(fits[best[np.argmin(after[best])]])


def document_lengths(segment_ids: Int[np.ndarray, "B S"]) -> list[int]:
    """Lengths of the runs of equal segment ids in the flattened rows; negative for padding."""
    b, s = segment_ids.shape
    cut = np.ones((b, s), bool)
    cut[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = np.flatnonzero(cut)
    lengths = np.diff(np.append(starts, b * s))
    return np.where(segment_ids.reshape(-1)[starts] > 0, lengths, -lengths).tolist()
