"""Preference pairs: a chosen and a rejected answer to one prompt, for DPO and alike. Legend: B batch, S sequence.

``preference_records`` says which records there are and how they become tokens. A run's own objectives take both
completions of a pair in one row instead (``preference_rows``).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxllm.data import shuffle
from jaxllm.data.batch import Batch
from jaxllm.data.chat_encoding import EncodedDocument
from jaxllm.data.dataset import ResumableDataset, TokenDataset
from jaxllm.data.sequence_packing import pack_one_per_row
from jaxllm.data.sources.documents import BadRecords
from jaxllm.data.sources.preference_records import PAIR_FIELDS as FIELDS
from jaxllm.data.sources.preference_records import encode_completion, preference_records, with_prompt
from jaxllm.data.token_files import TokenDocuments
from jaxllm.files import DataError, digest
from jaxllm.text import ChatTemplate, Tokenizer


class PreferenceBatch(NamedTuple):
    """Batch of preference pairs: row b of both is one pair, the same prompt with either answer. A pytree."""

    chosen: Batch
    rejected: Batch


@dataclass(frozen=True, eq=False)
class PreferenceDataset(ResumableDataset):
    """Preference data set: pairs in a shuffled, endless order that is addressed by step, with a data cursor.

    summary: one line for a log. bad: records that were skipped.
    """

    chosen: TokenDataset
    rejected: TokenDataset
    identity: dict[str, Any]
    summary: str
    bad: BadRecords

    @property
    def batch_size(self) -> int:
        """Pairs in a global batch."""
        return self.chosen.batch_size

    @property
    def pairs_per_epoch(self) -> int:
        """Pairs in one epoch."""
        return self.chosen.rows_per_epoch

    def batch_at(self, step: int, *, shard: int = 0, num_shards: int = 1) -> PreferenceBatch:
        """Pairs of `step`, or the rows of one of `num_shards` processes."""
        both = (one.batch_at(step, shard=shard, num_shards=num_shards) for one in (self.chosen, self.rejected))
        return PreferenceBatch(*both)


def load_preferences(
    source: str | tuple[str, ...],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    seq_len: int,
    batch_size: int,
    seed: int = 0,
    skip_bad_records: bool = False,
) -> PreferenceDataset:
    """Opens files of preference pairs: records with "prompt", "chosen" and "rejected".

    A pair with a side longer than `seq_len` + 1 tokens is skipped and counted: a truncated answer was not preferred.

    Args:
        source: JSONL, parquet, Arrow or webdataset files or URLs.
        template: the chat template; None concatenates texts.

    Raises DataError naming file and row for a record that cannot be used, unless those are skipped.
    """
    names = (source,) if isinstance(source, str) else source
    bad = BadRecords(skip_bad_records)
    sides: tuple[list[EncodedDocument], list[EncodedDocument]] = ([], [])
    too_long = 0
    for file, row, record in preference_records(names, bad):
        try:
            whole = with_prompt(record, file, row)
            pair = [encode_completion(whole, name, tokenizer, template, file, row) for name in FIELDS[1:]]
        except DataError as error:
            bad.report(error)
            continue
        if max(len(one.ids) for one in pair) > seq_len + 1:
            too_long += 1
            continue
        for side, one in zip(sides, pair, strict=True):
            side.append(one)
    if not sides[0]:
        raise DataError(f"{names[0]}: no pair fits a row of {seq_len} tokens; raise seq_len")
    documents = [_documents(side, name) for side, name in zip(sides, FIELDS[1:], strict=True)]
    identity = {
        "chosen": documents[0].content_hash,
        "rejected": documents[1].content_hash,
        "pairs": len(sides[0]),
        "tokenizer": tokenizer.fingerprint,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "seed": seed,
        "order": shuffle.NAME,
    }
    plans = [pack_one_per_row(one.starts, one.lengths, seq_len) for one in documents]
    datasets = [TokenDataset(d, p, batch_size, seed, identity) for d, p in zip(documents, plans, strict=True)]
    summary = f"{names[0]}: {len(sides[0]):,} pairs, {plans[0].padding:.1%} padding"
    summary += f"; {too_long:,} longer than a row are skipped" * bool(too_long)
    summary += f"; {bad.count:,} bad records skipped" * bool(bad.count)
    return PreferenceDataset(datasets[0], datasets[1], identity, summary, bad)


def _documents(side: list[EncodedDocument], name: str) -> TokenDocuments:
    lengths = np.array([len(one.ids) for one in side], np.int64)
    tokens = np.concatenate([one.ids for one in side]).astype(np.uint32)
    trained = np.concatenate([np.ones(len(one.ids)) if one.loss_mask is None else one.loss_mask for one in side])
    trained = trained.astype(np.uint8)
    parts = [tokens.tobytes().hex(), trained.tobytes().hex(), lengths.tolist()]
    return TokenDocuments(tokens, np.cumsum(lengths) - lengths, lengths, name, digest(parts), trained)
