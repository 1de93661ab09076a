"""Resumable data loader: batches of packed rows by step. Legend: B global batch, S sequence.

A training batch is a pure function of the step: `batch_at(step)` takes the rows at positions step * B ..
step * B + B - 1 of an endless sequence of shuffled epochs. There is no iterator state to lose. To resume, a run needs
only the step and a check that the data is unchanged: both are in the data cursor (`cursor`, `check_cursor`). The
number of processes does not change the data: each process takes its own rows of the same global batch.
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
    """Error: a checkpoint's data cursor does not belong to this data set. `differences` lists the reasons."""

    def __init__(self, differences: list[str]):
        super().__init__(
            "the data differs from what the checkpoint was trained on: " + "; ".join(differences) + ". "
            "Resume with the same data settings, or start a new run from the checkpoint's weights."
        )
        self.differences = differences


class ResumableDataset:
    """Base of data sources (``DataSource``): makes the data cursor that a checkpoint stores, and checks it on resume.

    identity: JSON values that determine every batch.
    batch_size: rows of the global batch.
    """

    identity: dict[str, Any]
    batch_size: int

    @property
    def files(self) -> list[dict[str, Any]]:
        """Documents read from each file: [{"file", "documents", "last_row"}], for messages; empty for token files."""
        return []

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the batches: text, tokenizer, packing, seq_len, batch_size, seed."""
        return digest(self.identity)

    def check_steps(self, steps: int) -> None:
        """Accepts any number of steps; data that ends raises DataError here."""

    def cursor(self, step: int) -> dict[str, Any]:
        """Data cursor at `step`: the JSON values that a checkpoint stores in order to resume there."""
        return {"step": step, "fingerprint": self.fingerprint, "identity": self.identity, "files": self.files}

    def check_cursor(self, saved: dict[str, Any]) -> int:
        """Step to resume from, out of a saved cursor. Raises CursorMismatch, which lists what differs."""
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
            f"{at(old['file'], old['last_row'])}: it had {old['documents']} documents up to this row, "
            + ("and is not read now" if new is None else f"now {new['documents']} up to row {new['last_row']}")
            for old, new in changed
        ]


@dataclass(frozen=True, eq=False)
class TokenDataset(ResumableDataset):
    """Training data set of one source: packed rows in a shuffled, endless order that is addressed by step.

    identity: JSON values that determine every batch; resuming compares them one by one.
    """

    documents: TokenDocuments
    plan: PackingPlan
    batch_size: int
    seed: int
    identity: dict[str, Any]

    @property
    def rows_per_epoch(self) -> int:
        """Packed rows in one epoch."""
        return self.plan.rows

    @property
    def tokens_per_step(self) -> int:
        """Positions in a batch, B * S, padding included."""
        return self.batch_size * self.plan.seq_len

    @property
    def files(self) -> list[dict[str, Any]]:
        """Documents read from each file, as in `ResumableDataset.files`."""
        return self.documents.about.get("files", [])

    def rows_at(self, step: int, *, shard: int = 0, num_shards: int = 1) -> Int[np.ndarray, " rows"]:
        """Row indices, int64, of the batch at `step`. An epoch has each row once; a batch may span two epochs."""
        first, count = batch_positions(step, self.batch_size, shard, num_shards)
        return shuffled_rows(first, count, self.plan.rows, self.seed)

    def batch_at(self, step: int, *, shard: int = 0, num_shards: int = 1) -> Batch:
        """Global batch of `step`, or the rows of one of `num_shards` processes (contiguous, in order of shard)."""
        rows = self.rows_at(step, shard=shard, num_shards=num_shards)
        return self.plan.gather(self.documents.tokens, rows, self.documents.loss_mask)


@dataclass(frozen=True, eq=False)
class HeldoutDataset:
    """Held-out data set: packed rows in order, each once; the last batch is completed with padding rows.

    parts: documents and packing plan of each source, one after another.
    target_tokens, target_bytes: totals over all targets, so that bits per byte = total nll / ln 2 / target_bytes.
    The end of a document is a target without bytes: its loss counts, as it does in `bigram_baseline`.
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
        """Tokens of each document."""
        return (one for documents, _ in self.parts for one in documents)

    @property
    def targets(self) -> Iterator[Integer[np.ndarray, " targets"]]:
        """Target tokens of each document: those that the loss mask includes."""
        return (one for documents, _ in self.parts for one in documents.targets())

    def batch_at(self, index: int, *, shard: int = 0, num_shards: int = 1) -> Batch:
        """Batch `index` of len(self), or the rows of one process. Raises IndexError outside that range."""
        if not 0 <= index < len(self):
            raise IndexError(f"held-out batch {index} does not exist; there are {len(self)}, counted from 0")
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
    """Gathers rows of several sources into one batch: row[b] of parts[part[b]]; row -1 is padding."""
    seq_len = parts[0][1].seq_len
    batch = Batch(*(np.full((len(row), seq_len), fill, np.int32) for fill in (0, -1, 0, 0)))
    for number in np.unique(part[row >= 0]).tolist():
        documents, plan = parts[number]
        there = np.flatnonzero((part == number) & (row >= 0))
        own = plan.gather(documents.tokens, row[there], documents.loss_mask)
        for whole, some in zip(batch.arrays, own.arrays, strict=True):
            whole[there] = some
    return batch


def batch_positions(step: int, batch_size: int, shard: int, num_shards: int) -> tuple[int, int]:
    """(first, count): positions of the endless sequence of rows that a shard takes at a step."""
    if step < 0:
        raise ValueError(f"step is {step}; steps count from 0")
    begin, end = shard_rows(batch_size, shard, num_shards)
    return step * batch_size + begin, end - begin


SHUFFLE_BLOCK = 1024
"""Positions that one call shuffles: a step needs only a few, and each call has a fixed cost."""


def shuffled_rows(first: int, count: int, rows: int, seed: int) -> Int[np.ndarray, " count"]:
    """Row indices, int64, at positions first .. first + count - 1 of the endless sequence of shuffled epochs.

    rows: rows of one epoch.
    """
    # Python integers: a long run with a large batch may exceed 2**63 positions.
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
    """Row indices at the positions of one block of an epoch."""
    places = np.arange(block * SHUFFLE_BLOCK, min(rows, (block + 1) * SHUFFLE_BLOCK))
    return shuffle.permute(places, rows, seed=seed, epoch=epoch)


def shard_rows(batch_size: int, shard: int, num_shards: int) -> tuple[int, int]:
    """(begin, end): rows of a batch that `shard` of `num_shards` takes. Raises ValueError if they do not divide."""
    if num_shards < 1 or batch_size % num_shards:
        divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        raise ValueError(
            f"a batch of {batch_size} sequences does not divide evenly over {num_shards} processes; "
            f"legal numbers of processes: {', '.join(map(str, divisors))}"
        )
    if not 0 <= shard < num_shards:
        raise ValueError(f"shard is {shard} of {num_shards}; shards count from 0")
    each = batch_size // num_shards
    return shard * each, (shard + 1) * each


def make_heldout(
    parts: Sequence[tuple[TokenDocuments, PackingPlan]], batch_size: int, tokenizer: Tokenizer
) -> HeldoutDataset:
    """Held-out data set of the given sources, with the tokens and bytes of its targets counted."""
    target_tokens = target_bytes = 0
    for documents, _ in parts:
        for targets in documents.targets():
            target_tokens += len(targets)
            target_bytes += int(tokenizer.token_lengths[targets].sum())
    return HeldoutDataset(tuple(parts), batch_size, target_tokens, target_bytes)


def _short(value: Any) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) == 64 else str(value)
