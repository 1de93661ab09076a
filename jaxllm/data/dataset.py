"""Batches of packed rows, by number. Legend: B global batch, S sequence.

Training batches are a pure function of the step: `batch_at(step)` asks a seeded shuffle which rows stand at places
step * B .. step * B + B - 1 of the endless sequence of epochs. There is no iterator state to lose, so a resumed run
needs the step and the assurance that the data is the same (`cursor`, `check_cursor`), and the number of processes
never matters: each takes its own rows of the same global batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int, Integer

from jaxllm.data import shuffle
from jaxllm.data.batch import Batch
from jaxllm.data.sequence_packing import PackingPlan
from jaxllm.data.token_files import TokenDocuments
from jaxllm.files import at, digest
from jaxllm.text import Tokenizer


class CursorMismatch(ValueError):
    """A checkpoint's data cursor does not belong to this dataset. `differences` says why, one sentence each."""

    def __init__(self, differences: list[str]):
        super().__init__(
            "the data is not what the checkpoint was trained on: " + "; ".join(differences) + ". "
            "Resume with the same data settings, or start a new run from the checkpoint's weights."
        )
        self.differences = differences


class ResumableDataset:
    """What a checkpoint keeps of a data set, and how it is told that the data is the same."""

    identity: dict[str, Any]
    batch_size: int

    @property
    def files(self) -> list[dict[str, Any]]:
        """What each file gave: [{"file", "documents", "last_row"}], for messages; empty for token files."""
        return []

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over all that decides the batches: text, tokenizer, packing, seq_len, batch_size, seed."""
        return digest(self.identity)

    def cursor(self, step: int) -> dict[str, Any]:
        """What a checkpoint stores to resume at `step`: JSON."""
        return {"step": step, "fingerprint": self.fingerprint, "identity": self.identity, "files": self.files}

    def check_cursor(self, saved: dict[str, Any]) -> int:
        """The step to go on from. Raises CursorMismatch, which says in words what differs."""
        if saved.get("fingerprint") == self.fingerprint:
            return int(saved["step"])
        before = saved.get("identity", {})
        names = [*self.identity, *(name for name in before if name not in self.identity)]
        found = [
            f"{name} was {_short(before.get(name))}, is now {_short(self.identity.get(name))}"
            for name in names
            if before.get(name) != self.identity.get(name)
        ]
        raise CursorMismatch(
            [*found, *self._changed_files(saved.get("files", []))] or ["its fingerprint does not match"]
        )

    def _changed_files(self, before: list[dict[str, Any]]) -> list[str]:
        now = {one["file"]: one for one in self.files}
        changed = [(one, now.get(one["file"])) for one in before if now.get(one["file"]) != one] if now else []
        return [
            f"{at(old['file'], old['last_row'])}: it gave {old['documents']} documents up to this row, "
            + ("and is not read now" if new is None else f"now {new['documents']} up to row {new['last_row']}")
            for old, new in changed
        ]


@dataclass(frozen=True, eq=False)
class TokenDataset(ResumableDataset):
    """Packed training rows in a shuffled, endless, index-addressable order.

    identity: JSON values that decide every batch; resuming compares them one by one.
    """

    documents: TokenDocuments
    plan: PackingPlan
    batch_size: int
    seed: int
    identity: dict[str, Any]

    @property
    def rows_per_epoch(self) -> int:
        return self.plan.rows

    @property
    def tokens_per_step(self) -> int:
        """Places in a batch, B * S, padding included."""
        return self.batch_size * self.plan.seq_len

    @property
    def files(self) -> list[dict[str, Any]]:
        return self.documents.about.get("files", [])

    def check_steps(self, steps: int) -> None:
        """A single source goes on for ever."""

    def rows_at(self, step: int, *, shard: int = 0, num_shards: int = 1) -> Int[np.ndarray, " rows"]:
        """int64 row numbers of the batch at `step`. Every epoch holds each row once; a batch may straddle two."""
        first, count = batch_positions(step, self.batch_size, shard, num_shards)
        return shuffled_rows(first, count, self.plan.rows, self.seed)

    def batch_at(self, step: int, *, shard: int = 0, num_shards: int = 1) -> Batch:
        """The global batch of `step`, or its rows for one of `num_shards` processes (contiguous, in order of shard)."""
        rows = self.rows_at(step, shard=shard, num_shards=num_shards)
        return self.plan.gather(self.documents.tokens, rows, self.documents.loss_mask)


@dataclass(frozen=True, eq=False)
class HeldoutDataset:
    """Packed held-out rows, in order, each once; the last batch is filled up with padding rows.

    parts: documents and plan of each source, one after another.
    target_tokens, target_bytes: of all targets together, so that bits per byte = total nll / ln 2 / target_bytes.
    The end of a document is a target without bytes: its cost is in the sum, as it is in `baseline`.
    """

    parts: tuple[tuple[TokenDocuments, PackingPlan], ...]
    batch_size: int
    target_tokens: int
    target_bytes: int

    def __len__(self) -> int:
        """Number of batches."""
        return -(-sum(plan.rows for _, plan in self.parts) // self.batch_size)

    @property
    def documents(self) -> Iterator[Integer[np.ndarray, " tokens"]]:
        """The tokens of each document."""
        return (one for documents, _ in self.parts for one in documents)

    @property
    def targets(self) -> Iterator[Integer[np.ndarray, " targets"]]:
        """Of each document the tokens that are targets."""
        return (one for documents, _ in self.parts for one in documents.targets())

    def batch_at(self, index: int, *, shard: int = 0, num_shards: int = 1) -> Batch:
        """Batch `index` of len(self), or a process's rows of it."""
        if not 0 <= index < len(self):
            raise IndexError(f"held-out batch {index}; there are {len(self)}, counted from 0")
        begin, end = shard_rows(self.batch_size, shard, num_shards)
        rows = index * self.batch_size + np.arange(begin, end)
        starts = np.cumsum([0, *(plan.rows for _, plan in self.parts)])
        part = np.searchsorted(starts, rows, side="right") - 1
        return gather(self.parts, part, np.where(rows < starts[-1], rows - starts[part], -1))

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch_at(index) for index in range(len(self)))


def gather(
    parts: Sequence[tuple[TokenDocuments, PackingPlan]], part: Int[np.ndarray, " B"], row: Int[np.ndarray, " B"]
) -> Batch:
    """Rows of several sources as one batch: row[b] of parts[part[b]]; row -1 is padding."""
    seq_len = parts[0][1].seq_len
    batch = Batch(*(np.full((len(row), seq_len), fill, np.int32) for fill in (0, -1, 0, 0)))
    for number in np.unique(part[row >= 0]).tolist():
        documents, plan = parts[number]
        there = np.flatnonzero((part == number) & (row >= 0))
        for whole, some in zip(batch, plan.gather(documents.tokens, row[there], documents.loss_mask), strict=True):
            whole[there] = some
    return batch


def batch_positions(step: int, batch_size: int, shard: int, num_shards: int) -> tuple[int, int]:
    """First place of the endless sequence, and how many, that a shard takes at a step."""
    if step < 0:
        raise ValueError(f"step is {step}; steps count from 0")
    begin, end = shard_rows(batch_size, shard, num_shards)
    return step * batch_size + begin, end - begin


SHUFFLE_BLOCK = 1024
"""Places that are shuffled in one go; a step takes few, and each call has a price."""


def shuffled_rows(first: int, count: int, rows: int, seed: int) -> Int[np.ndarray, " count"]:
    """int64 row numbers at `count` places from `first` on, in the endless sequence of shuffled epochs of `rows`."""
    # Python integers: a long run of a large batch may pass 2**63 places.
    epoch, place = divmod(first, rows)
    out = np.empty(count, np.int64)
    done = 0
    while done < count:
        block, offset = divmod(place, SHUFFLE_BLOCK)
        found = _shuffled_block(rows, seed, epoch, block)[offset : offset + count - done]
        out[done : done + len(found)] = found
        done, place = done + len(found), place + len(found)
        if place == rows:
            epoch, place = epoch + 1, 0
    return out


@lru_cache(maxsize=64)
def _shuffled_block(rows: int, seed: int, epoch: int, block: int) -> Int[np.ndarray, " places"]:
    """Row numbers at the places of one block of an epoch."""
    places = np.arange(block * SHUFFLE_BLOCK, min(rows, (block + 1) * SHUFFLE_BLOCK))
    return shuffle.permute(places, rows, seed=seed, epoch=epoch)


def shard_rows(batch_size: int, shard: int, num_shards: int) -> tuple[int, int]:
    """First row and the one past the last that `shard` of `num_shards` takes of a batch."""
    if num_shards < 1 or batch_size % num_shards:
        divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        raise ValueError(
            f"a batch of {batch_size} sequences does not divide over {num_shards} processes; "
            f"legal numbers of processes: {', '.join(map(str, divisors))}"
        )
    if not 0 <= shard < num_shards:
        raise ValueError(f"shard {shard} of {num_shards}; shards count from 0")
    each = batch_size // num_shards
    return shard * each, (shard + 1) * each


def make_heldout(
    parts: Sequence[tuple[TokenDocuments, PackingPlan]], batch_size: int, tokenizer: Tokenizer
) -> HeldoutDataset:
    """Counts what the targets cover and makes the dataset."""
    target_tokens = target_bytes = 0
    for documents, _ in parts:
        for targets in documents.targets():
            target_tokens += len(targets)
            target_bytes += int(tokenizer.token_lengths[targets].sum())
    return HeldoutDataset(tuple(parts), batch_size, target_tokens, target_bytes)


def _short(value: Any) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) == 64 else str(value)
