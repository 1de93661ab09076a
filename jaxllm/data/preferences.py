"""Preference pairs: a chosen and a rejected answer to one prompt, for DPO and alike. Legend: B batch, S sequence.

A record has "prompt", "chosen" and "rejected". Each is a text or a list of messages. With a chat template, a text is a
message of the user (prompt) or of the assistant (answers). Without one, the texts are concatenated between the
begin-of-text and end-of-text ids. The loss mask includes the tokens of the answers, not those of the prompt.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxllm.data import shuffle
from jaxllm.data.batch import Batch
from jaxllm.data.chat_encoding import ChatEncoder, EncodedDocument
from jaxllm.data.dataset import ResumableDataset, TokenDataset
from jaxllm.data.sequence_packing import pack_one_per_row
from jaxllm.data.sources.documents import BadRecords
from jaxllm.data.sources.records import RecordFiles, check_messages, check_unicode
from jaxllm.data.sources.remote_files import File, file_format, find_files
from jaxllm.data.token_files import TokenDocuments
from jaxllm.files import DataError, at, digest
from jaxllm.text import ChatTemplate, Tokenizer

FIELDS = ("prompt", "chosen", "rejected")


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
    files = find_files((source,) if isinstance(source, str) else source)
    kind = file_format(files, "auto")
    if kind not in ("jsonl", "parquet", "arrow", "webdataset"):
        raise DataError(f"{at(files[0])}: {kind} files hold no preference pairs; legal: jsonl, parquet, arrow, tar")
    bad = BadRecords(skip_bad_records)
    sides: tuple[list[EncodedDocument], list[EncodedDocument]] = ([], [])
    too_long = 0
    for file, row, record in _records(files, kind, bad):
        try:
            pair = _pair(record, tokenizer, template, file, row)
        except DataError as error:
            bad.report(error if str(error).startswith(at(file, row)) else DataError(f"{at(file, row)}: {error}"))
            continue
        if max(len(one.ids) for one in pair) > seq_len + 1:
            too_long += 1
            continue
        for side, one in zip(sides, pair, strict=True):
            side.append(one)
    if not sides[0]:
        raise DataError(f"{at(files[0])}: no pair fits a row of {seq_len} tokens; raise seq_len")
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
    summary = f"{files[0]}: {len(sides[0]):,} pairs, {plans[0].padding:.1%} padding"
    summary += f"; {too_long:,} longer than a row are skipped" * bool(too_long)
    summary += f"; {bad.count:,} bad records skipped" * bool(bad.count)
    return PreferenceDataset(datasets[0], datasets[1], identity, summary, bad)


def _records(files: tuple[File, ...], kind: str, bad: BadRecords) -> Iterator[tuple[File, int, dict[str, Any]]]:
    return RecordFiles(files, kind, FIELDS[0], bad=bad).records([*FIELDS, "tools"])


def _pair(
    record: dict[str, Any], tokenizer: Tokenizer, template: ChatTemplate | None, file: File, row: int
) -> list[EncodedDocument]:
    for name in FIELDS:
        if name not in record:
            raise DataError(f"{at(file, row)}: no field {name!r}, only {sorted(record)}")
        if isinstance(record[name], str):
            check_unicode(record[name], name, file, row)
        elif template is None:
            raise DataError(f"{at(file, row)}: {name!r} is a {type(record[name]).__name__}; without a chat template "
                            "it must be text")  # fmt: skip
        else:
            check_messages(record[name], name, file, row)
    if template is not None:
        encoder = ChatEncoder(tokenizer, template)
        prompt = _messages(record["prompt"], "user")
        return [
            encoder.encode_answer(prompt, _messages(record[name], "assistant"), record.get("tools"))
            for name in FIELDS[1:]
        ]
    prompt = tokenizer.encode(record["prompt"], bos=True)
    answers = (tokenizer.encode(record[name], eos=True) for name in FIELDS[1:])
    return [
        EncodedDocument(np.concatenate([prompt, answer]), np.arange(len(prompt) + len(answer)) >= len(prompt))
        for answer in answers
    ]


def _messages(value: str | list[dict[str, Any]], role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _documents(side: list[EncodedDocument], name: str) -> TokenDocuments:
    lengths = np.array([len(one.ids) for one in side], np.int64)
    tokens = np.concatenate([one.ids for one in side]).astype(np.uint32)
    trained = np.concatenate([np.ones(len(one.ids)) if one.loss_mask is None else one.loss_mask for one in side])
    trained = trained.astype(np.uint8)
    parts = [tokens.tobytes().hex(), trained.tobytes().hex(), lengths.tolist()]
    return TokenDocuments(tokens, np.cumsum(lengths) - lengths, lengths, name, digest(parts), trained)
