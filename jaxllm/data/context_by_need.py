"""Context parallelism by need: each document of a batch takes as many devices as it needs (ByteScale).

A device has a slot of so many tokens in each micro-step. Before a batch goes to the devices, the host places its
documents in slots (Hybrid Data Parallelism, arXiv:2502.21231): one that fits a slot stays whole on one device, a longer
one is split over a ring of neighbouring devices. All rings of a micro-step have the same size, so a micro-step of
short documents sends no keys and values at all.

- Ring sizes are the divisors of the axis ``context``, up to the smallest that holds the longest row: a bounded number
  of ways to run, all of them in the one compiled step.
- Longest documents come first, and fill the rings of a micro-step; what is left of their slots has short documents.
- The others are packed in slots of further micro-steps, tightly or evenly. Of several ways, the one that takes the
  least time is chosen: a micro-step takes what its busiest device does, the quadratic work of its documents and the
  work of all tokens of a slot, padding included.

Legend: B rows of a batch, S tokens of a row, M micro-steps, R rows of devices (all axes that split batches), C devices
of ``context``, L tokens of a slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxllm.data.sequence_packing import best_fit
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


class SlotPlacement(NamedTuple):
    """Placement of the documents of a batch in slots.

    Attributes:
        source: index in the flattened batch of the token at each place of the micro-steps with tokens; -1 for padding.
        document: number of the document there, from 1; 0 for padding.
        rings: ring size of each micro-step with tokens.
        work: pairs of a query and a key that each device computes, [micro-steps, R*C].
    """

    source: Int[np.ndarray, "m R T"]
    document: Int[np.ndarray, "m R T"]
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
        token_pairs: pairs of a query and a key that cost as much as all else that a token costs.

    Raises:
        ShardingError: a row is longer than all devices of ``context`` hold; names the nearest legal settings.
    """

    rows: int
    devices: int
    slot: int
    seq_len: int
    tokens: int
    layout: Layout = "zigzag"
    token_pairs: float = 0.0

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
        documents are more than half full, those of the last micro-step apart; and there may be one micro-step more.
        """
        ratio = max((b / a for a, b in zip(self.sizes, self.sizes[1:], strict=False)), default=2.0)
        return int(max(ratio, 2.0) * self.tokens / (self.rows * self.devices * self.slot)) + len(self.sizes) + 1

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

    def place(self, lengths: Sequence[int]) -> SlotPlacement:
        """Places documents in slots.

        Args:
            lengths: tokens of each document, in the order of the flattened batch; negative for runs of padding, of
                so many tokens.
        """
        return self._placement(np.abs(np.asarray(lengths, np.int64)), *self._assigned(lengths))

    def loads(self, lengths: Sequence[int]) -> tuple[list[int], Int[np.ndarray, "m slots"]]:
        """Ring size of each micro-step with tokens, and pairs of a query and a key that each device computes in it.

        Args:
            lengths: as for ``place``.
        """
        _, rings, work = self._assigned(lengths)
        return [*rings, *[1] * (len(work) - len(rings))], work

    def _assigned(
        self, lengths: Sequence[int]
    ) -> tuple[list[tuple[int, int, np.ndarray]], list[int], Int[np.ndarray, "m slots"]]:
        """Slots of the documents: (slot, document, its tokens there); rings of the first micro-steps; work of all."""
        sizes = np.abs(np.asarray(lengths, np.int64))
        documents = np.flatnonzero(np.asarray(lengths) > 0)
        documents = documents[np.argsort(-sizes[documents], kind="stable")]
        each = self.rows * self.devices
        long, short = (
            documents[there].tolist() for there in (sizes[documents] > self.slot, sizes[documents] <= self.slot)
        )
        rings: list[int] = []
        parts: list[tuple[int, int, np.ndarray]] = []
        while long:
            ring = next(n for n in self.sizes if n * self.slot >= sizes[long[0]])
            first = each * len(rings)
            rings.append(ring)
            for group, d in enumerate(long[: each // ring]):
                split = self._split(int(sizes[d]), ring)
                parts += [(first + group * ring + r, d, tokens) for r, tokens in enumerate(split)]
            long = long[each // ring :]
        ringed = _Slots.of(each * len(rings), each, self.slot, [(at, tokens) for at, _, tokens in parts])
        ways = [
            way for longer in (False, True) for way in _places_of_short(sizes[short], ringed, each, self.slot, longer)
        ]
        at, slots = min(ways, key=lambda way: (way[1].longest + self.slot * self.token_pairs).sum())
        parts += [(slot, d, np.arange(int(sizes[d]))) for slot, d in zip(at.tolist(), short, strict=True)]
        return parts, rings, slots.work.reshape(-1, each)

    def _placement(
        self,
        sizes: Int[np.ndarray, " documents"],
        parts: list[tuple[int, int, np.ndarray]],
        rings: list[int],
        work: Int[np.ndarray, "m slots"],
    ) -> SlotPlacement:
        starts = np.concatenate([[0], np.cumsum(sizes)])
        shape = len(work), *self.shape[1:]
        source = np.full(math.prod(shape), -1, np.int64)
        document = np.zeros(len(source), np.int32)
        used = np.zeros(work.size, np.int64)
        for at, d, tokens in parts:
            first = at * self.slot + used[at]
            source[first : first + len(tokens)] = starts[d] + tokens
            document[first : first + len(tokens)] = d + 1
            used[at] += len(tokens)
        rings = [*rings, *[1] * (len(work) - len(rings))]
        return SlotPlacement(source.reshape(shape), document.reshape(shape), rings, work)

    def arrange(self, batch: Any) -> SlottedBatch:
        """A batch with its documents in slots: a function of the batch alone.

        Args:
            batch: the whole batch, ``jaxllm.data.Batch`` of [B S] host arrays.
        """
        lengths = document_lengths(batch.segment_ids)
        placed = self.place(lengths)
        real = placed.source >= 0

        def one(x: np.ndarray, fill: int) -> np.ndarray:
            return self._whole(np.where(real, x.reshape(-1)[placed.source], np.asarray(fill, x.dtype)), fill)

        rows = batch._replace(
            **{
                name: one(x, -1 if name == "targets" else 0)
                for name, x in batch._asdict().items()
                if x is not None and name != "segment_ids"
            },
            segment_ids=self._whole(placed.document, 0),
        )
        rings = np.array([self.sizes.index(n) for n in placed.rings], np.int32)
        return SlottedBatch(rows, self._whole(rings, 0), np.int32(len(placed.rings)))

    def _whole(self, x: np.ndarray, fill: int) -> np.ndarray:
        """Array of all M micro-steps, from one of those with tokens."""
        found = np.full((self.most, *x.shape[1:]), fill, x.dtype)
        found[: len(x)] = x
        return found

    def _split(self, length: int, size: int) -> list[np.ndarray]:
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


@dataclass
class _Slots:
    """Slots of the micro-steps so far.

    Attributes:
        room: tokens left in each.
        work: pairs of a query and a key that each has.
        each: slots of a micro-step.
    """

    room: Int[np.ndarray, " slots"]
    work: Int[np.ndarray, " slots"]
    each: int

    @classmethod
    def of(cls, slots: int, each: int, slot: int, parts: list[tuple[int, np.ndarray]]) -> _Slots:
        """So many slots with parts of documents: (slot, places within the document)."""
        found = cls(np.full(slots, slot, np.int64), np.zeros(slots, np.int64), each)
        for at, tokens in parts:
            found.room[at] -= len(tokens)
            found.work[at] += int((tokens + 1).sum())
        return found

    @property
    def longest(self) -> Int[np.ndarray, " micro_steps"]:
        """Work of the busiest slot of each micro-step."""
        return self.work.reshape(-1, self.each).max(axis=1)

    def least(self, tokens: int, longer: bool) -> int:
        """Slot with room for a short document whose micro-step gets the least longer; -1 if there is none.

        Args:
            longer: whether a micro-step may get longer at all.
        """
        after = self.work + tokens * (tokens + 1) // 2
        more = np.maximum(after - np.repeat(self.longest, self.each), 0)
        fits = np.flatnonzero((self.room >= tokens) & (longer | (more == 0)))
        if not len(fits):
            return -1
        best = fits[more[fits] == more[fits].min()]
        return int(best[np.argmin(after[best])])

    def add(self, at: int, tokens: int) -> None:
        """Adds a short document to a slot."""
        self.room[at] -= tokens
        self.work[at] += tokens * (tokens + 1) // 2


def _places_of_short(
    lengths: Int[np.ndarray, " documents"], ringed: _Slots, each: int, slot: int, longer: bool
) -> Iterator[tuple[Int[np.ndarray, " documents"], _Slots]]:
    """Ways to place short documents, the longest first: the slot of each, and all slots after it.

    What rings have left is filled first, as far as their micro-steps do not get longer, or as far as there is room.
    The others get micro-steps of their own: by best fit, or by least work in as many micro-steps or in one more. Slots
    of similar work come into one micro-step.
    """
    slots = replace(ringed, room=ringed.room.copy(), work=ringed.work.copy())
    at = np.full(len(lengths), -1, np.int64)
    for i, n in enumerate(lengths.tolist() if len(slots.work) else ()):
        if (there := slots.least(n, longer)) >= 0:
            slots.add(there, n)
            at[i] = there
    rest = np.flatnonzero(at < 0)
    tight = best_fit(lengths[rest], slot)
    fewest = each * -(-int(tight.max(initial=-1) + 1) // each)
    found = [(fewest, tight), *((own, _least_work(lengths[rest], own, slot)) for own in (fewest, fewest + each))]
    for own, rows in found:
        if rows is None:
            continue
        work = np.bincount(rows, lengths[rest] * (lengths[rest] + 1) // 2, own).astype(np.int64)
        ranked = np.argsort(-work, kind="stable")
        whole = at.copy()
        whole[rest] = len(slots.work) + np.argsort(ranked)[rows]
        room = slot - np.bincount(rows, lengths[rest], own).astype(np.int64)[ranked]
        yield whole, _Slots(np.append(slots.room, room), np.append(slots.work, work[ranked]), each)


def _least_work(lengths: Int[np.ndarray, " n"], slots: int, slot: int) -> Int[np.ndarray, " n"] | None:
    """Slot of each document, the longest first: the one with the least work that has room; None: one finds none."""
    rows = np.empty(len(lengths), np.int64)
    room, work = np.full(slots, slot, np.int64), np.zeros(slots, np.int64)
    for i, n in enumerate(lengths.tolist()):
        fits = np.flatnonzero(room >= n)
        if not len(fits):
            return None
        rows[i] = at = fits[np.argmin(work[fits])]
        room[at] -= n
        work[at] += n * (n + 1) // 2
    return rows


def document_lengths(segment_ids: Int[np.ndarray, "B S"]) -> list[int]:
    """Lengths of the runs of equal segment ids in the flattened rows; negative for padding."""
    b, s = segment_ids.shape
    cut = np.ones((b, s), bool)
    cut[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = np.flatnonzero(cut)
    lengths = np.diff(np.append(starts, b * s))
    return np.where(segment_ids.reshape(-1)[starts] > 0, lengths, -lengths).tolist()
