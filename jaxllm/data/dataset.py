"""Batches of packed rows, by number. Legend: B global batch, S sequence.

Training batches are a pure function of the step: `batch_at(step)` asks a seeded shuffle which rows stand at places
step * B .. step * B + B - 1 of the endless sequence of epochs. There is no iterator state to lose, so a resumed run
needs the step and the assurance that the data is the same (`cursor`, `check_cursor`), and the number of processes
never matters: each takes its own rows of the same global batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxllm.data import shuffle
from jaxllm.data.batch import Batch
from jaxllm.data.packing import Plan
from jaxllm.data.tokens import TokenDocuments
from jaxllm.files import digest
from jaxllm.text import Tokenizer


class CursorMismatch(ValueError):
    """A checkpoint's data cursor does not belong to this dataset. `differences` says why, one sentence each."""

    def __init__(self, differences: list[str]):
        super().__init__(
            "the data is not what the checkpoint was trained on: " + "; ".join(differences) + ". "
            "Resume with the same data settings, or start a new run from the checkpoint's weights."
        )
        self.differences = differences


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """Packed training rows in a shuffled, endless, index-addressable order.

    identity: JSON values that decide every batch; resuming compares them one by one.
    """

    documents: TokenDocuments
    plan: Plan
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

    def rows_at(self, step: int, *, shard: int = 0, num_shards: int = 1) -> Int[np.ndarray, " rows"]:
        """int64 row numbers of the batch at `step`. Every epoch holds each row once; a batch may straddle two."""
        if step < 0:
            raise ValueError(f"step is {step}; steps count from 0")
        begin, end = shard_rows(self.batch_size, shard, num_shards)
        # Python integers: a long run of a large batch may pass 2**63 places.
        epoch, place = divmod(step * self.batch_size + begin, self.plan.rows)
        ahead = place + np.arange(end - begin)
        epochs, places = epoch + ahead // self.plan.rows, ahead % self.plan.rows
        rows = np.empty(end - begin, np.int64)
        for one in np.unique(epochs).tolist():
            there = epochs == one
            rows[there] = shuffle.permute(places[there], self.plan.rows, seed=self.seed, epoch=one)
        return rows

    def batch_at(self, step: int, *, shard: int = 0, num_shards: int = 1) -> Batch:
        """The global batch of `step`, or its rows for one of `num_shards` processes (contiguous, in order of shard)."""
        return self.plan.gather(self.documents.tokens, self.rows_at(step, shard=shard, num_shards=num_shards))

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over all that decides the batches: text, tokenizer, packing, seq_len, batch_size, seed."""
        return digest(self.identity)

    def cursor(self, step: int) -> dict[str, Any]:
        """What a checkpoint stores to resume at `step`: JSON."""
        return {"step": step, "fingerprint": self.fingerprint, "identity": self.identity}

    def check_cursor(self, saved: dict[str, Any]) -> int:
        """The step to go on from. Raises CursorMismatch, which says in words what differs."""
        if saved.get("fingerprint") == self.fingerprint:
            return int(saved["step"])
        before = saved.get("identity", {})
        raise CursorMismatch(
            [
                f"{key} was {_short(before.get(key))}, is now {_short(now)}"
                for key, now in self.identity.items()
                if before.get(key) != now
            ]
            or ["its fingerprint does not match"]
        )


@dataclass(frozen=True, eq=False)
class HeldoutDataset:
    """Packed held-out rows, in order, each once; the last batch is filled up with padding rows.

    target_tokens, target_bytes: of all targets together, so that bits per byte = total nll / ln 2 / target_bytes.
    The end of a document is a target without bytes: its cost is in the sum, as it is in `baseline`.
    """

    documents: TokenDocuments
    plan: Plan
    batch_size: int
    target_tokens: int
    target_bytes: int

    def __len__(self) -> int:
        """Number of batches."""
        return -(-self.plan.rows // self.batch_size)

    def batch_at(self, index: int, *, shard: int = 0, num_shards: int = 1) -> Batch:
        """Batch `index` of len(self), or a process's rows of it."""
        if not 0 <= index < len(self):
            raise IndexError(f"held-out batch {index}; there are {len(self)}, counted from 0")
        begin, end = shard_rows(self.batch_size, shard, num_shards)
        rows = index * self.batch_size + np.arange(begin, end)
        return self.plan.gather(self.documents.tokens, np.where(rows < self.plan.rows, rows, -1))

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch_at(index) for index in range(len(self)))


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


def make_heldout(documents: TokenDocuments, plan: Plan, batch_size: int, tokenizer: Tokenizer) -> HeldoutDataset:
    """Counts what the targets cover and makes the dataset."""
    target_bytes = sum(int(tokenizer.token_lengths[document[1:]].sum()) for document in documents)
    return HeldoutDataset(documents, plan, batch_size, plan.pairs, target_bytes)


def _short(value: Any) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) == 64 else str(value)
