"""Preference rows: pairs of completions packed into rows, for preference objectives.

The two completions of an example are neighbouring segments of one row: segments 1 and 2 are the row's first example,
segments 3 and 4 its second one. Several examples share a row where they fit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxllm.data import shuffle
from jaxllm.data.batch import Batch
from jaxllm.data.config import DataConfig
from jaxllm.data.data_source import DataSource
from jaxllm.data.dataset import HeldoutDataset, ResumableDataset, TokenDataset, make_heldout, shard_rows
from jaxllm.data.sequence_packing import PackingPlan, pack_documents
from jaxllm.data.sources.chitchat import NAME as CHITCHAT
from jaxllm.data.sources.chitchat import Chitchat, find_chitchat
from jaxllm.data.sources.documents import BadRecords, heldout_mask
from jaxllm.data.sources.preference_records import (
    PAIRED,
    UNPAIRED,
    Example,
    chitchat_pairs,
    labelled_examples,
    paired_examples,
    preference_records,
)
from jaxllm.data.token_files import TokenDocuments
from jaxllm.files import DataError, digest
from jaxllm.text import ChatTemplate, Tokenizer

SIGNS = np.array([0, 0, 1, -1], np.float32)
"""Sign of a token's label by its value in the loss mask: 1 for a target without label, 2 for good, 3 for bad."""


@dataclass(frozen=True, eq=False)
class FeedbackDataset(ResumableDataset):
    """Data set of labelled completions: batches with ``advantages`` of 1 on good completions, -1 on bad ones."""

    inner: TokenDataset

    @property
    def identity(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """JSON values that determine every batch."""
        return self.inner.identity

    @property
    def batch_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Rows of the global batch."""
        return self.inner.batch_size

    def batch_at(self, step: int, *, shard: int = 0, num_shards: int = 1) -> Batch:
        """Global batch of ``step``, or the rows of one of ``num_shards`` processes."""
        rows = self.inner.rows_at(step, shard=shard, num_shards=num_shards)
        return with_labels(self.inner.documents, self.inner.plan, rows)


@dataclass(frozen=True, eq=False)
class HeldoutFeedback(HeldoutDataset):
    """Held-out labelled completions, with ``advantages`` as ``FeedbackDataset`` has them."""

    def batch_at(self, index: int, *, shard: int = 0, num_shards: int = 1) -> Batch:
        """Batch ``index`` of len(self), or the rows of one process."""
        (documents, plan), (begin, end) = self.parts[0], shard_rows(self.batch_size, shard, num_shards)
        rows = index * self.batch_size + np.arange(begin, end)
        return with_labels(documents, plan, np.where(rows < plan.rows, rows, -1))

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch_at(index) for index in range(len(self)))


def with_labels(documents: TokenDocuments, plan: PackingPlan, rows: np.ndarray) -> Batch:
    """Rows of a plan, with the sign of each token's label as its advantage."""
    assert documents.loss_mask is not None
    batch = plan.gather(documents.tokens, rows, documents.loss_mask)
    values = plan.gather(documents.loss_mask, rows).targets
    return batch._replace(advantages=SIGNS[np.maximum(values, 0)])


@dataclass(frozen=True, eq=False)
class PreferenceRows:
    """Opened preference data: training rows, held-out rows (None if nothing is held out), and a line for a log."""

    train: DataSource
    heldout: HeldoutDataset | None
    summary: str


def load_preference_rows(
    config: DataConfig, tokenizer: Tokenizer, template: ChatTemplate | None, *, virtual_tokens: int = 0
) -> PreferenceRows:
    """Opens preference data and packs it.

    An example longer than a row is skipped and counted: a truncated completion was not judged.

    Args:
        config: ``content`` says which format; ``seq_len`` is the room for both completions with their prompts.
        tokenizer: of the model.
        template: chat template; None concatenates texts.
        virtual_tokens: places at the start of each row that are left free, see ``PackingPlan``.

    Raises:
        DataError: a record that cannot be used, unless those are skipped; nothing fits a row.
    """
    bad, room = BadRecords(config.skip_bad_records), config.seq_len - virtual_tokens
    train = _examples(config, config.source, tokenizer, template, bad)
    skipped = bad.count
    if config.heldout:
        heldout = _examples(config, config.heldout, tokenizer, template, bad)
        skipped += bad.count
    else:
        train, heldout = _split(train, 0.05 if config.heldout_fraction is None else config.heldout_fraction)
    whole = len(train)
    train, heldout = ([one for one in part if _width(one) <= room] for part in (train, heldout))
    name = _name(config)
    if not train:
        raise DataError(f"{name}: no example fits a row of data.seq_len = {config.seq_len} tokens; raise it")
    documents, plan = _packed(train, name, config.seq_len, virtual_tokens)
    identity = {
        "content": documents.content_hash,
        "examples": len(train),
        "kind": config.content,
        "tokenizer": tokenizer.fingerprint,
        "seq_len": config.seq_len,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "order": shuffle.NAME,
    } | ({"virtual_tokens": virtual_tokens} if virtual_tokens else {})
    training: Any = TokenDataset(documents, plan, config.batch_size, config.seed, identity)
    evaluation = None
    if heldout:
        evaluation = make_heldout(
            [_packed(heldout, name, config.seq_len, virtual_tokens)], config.batch_size, tokenizer
        )
    if config.content == UNPAIRED:
        training = FeedbackDataset(training)
        if evaluation is not None:
            evaluation = HeldoutFeedback(**{key: getattr(evaluation, key) for key in HELDOUT_FIELDS})
    noun = "pairs" if config.content == PAIRED else "labelled completions"
    summary = f"{name}: {len(train):,} {noun}, {plan.rows:,} rows of {config.seq_len} ({plan.padding:.1%} padding)"
    summary += f"; {whole - len(train):,} longer than a row are skipped" * (whole > len(train))
    summary += f"; {skipped:,} bad records skipped" * bool(skipped)
    summary += f"; held out {len(heldout):,}" * bool(heldout)
    return PreferenceRows(training, evaluation, summary)


HELDOUT_FIELDS = ("parts", "batch_size", "target_tokens", "target_bytes")


def _name(config: DataConfig) -> str:
    names = (config.source,) if isinstance(config.source, str) else config.source
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _examples(
    config: DataConfig,
    source: str | tuple[str, ...],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    bad: BadRecords,
) -> list[Example]:
    names = (source,) if isinstance(source, str) else source
    if names == (CHITCHAT,):
        if template is None:
            raise DataError(
                f"{CHITCHAT} contains conversations, which need a chat template: start from a model with one"
            )
        records = chitchat_pairs(Chitchat(find_chitchat()))
    else:
        records = preference_records(names, bad)
    encode = paired_examples if config.content == PAIRED else labelled_examples
    return encode(records, tokenizer, template, bad)


def _split(examples: list[Example], fraction: float) -> tuple[list[Example], list[Example]]:
    """(training, held-out) examples; those of one prompt go together."""
    if fraction == 0 or not examples:
        return examples, []
    keys = np.array([one.key for one in examples], np.uint64)
    mask = heldout_mask(keys, np.array([_width(one) for one in examples]), fraction, "preferences")
    return [x for x, out in zip(examples, mask, strict=True) if not out], [
        x for x, out in zip(examples, mask, strict=True) if out
    ]


def _width(example: Example) -> int:
    """Places of a row that an example takes."""
    return len(example.first.ids) + len(example.second.ids) - 2


def _packed(
    examples: list[Example], name: str, seq_len: int, virtual_tokens: int
) -> tuple[TokenDocuments, PackingPlan]:
    """Documents of examples, two each, and the plan that keeps both in one row."""
    sides = [(one, side) for one in examples for side in (one.first, one.second)]
    lengths = np.array([len(side.ids) for _, side in sides], np.int64)
    starts = np.cumsum(lengths) - lengths
    tokens = np.concatenate([side.ids for _, side in sides]).astype(np.uint32)
    values = {0: (1, 1), 1: (2, 1), -1: (3, 1)}
    mask = np.concatenate(
        [np.asarray(side.loss_mask, np.uint8) * np.uint8(values[one.label][side is one.second]) for one, side in sides]
    )
    content = digest([tokens.tobytes().hex(), mask.tobytes().hex(), lengths.tolist()])
    documents = TokenDocuments(tokens, starts, lengths, name, content, mask)
    widths = np.array([_width(one) for one in examples], np.int64)
    plan = pack_documents(np.arange(len(examples)), widths + 1, seq_len - virtual_tokens)
    both = (2 * plan.piece_start[:, None] + np.arange(2)).reshape(-1)
    paired = replace(
        plan,
        seq_len=seq_len,
        piece_start=starts[both],
        piece_length=lengths[both] - 1,
        row_offsets=2 * plan.row_offsets,
        virtual_tokens=virtual_tokens,
    )
    return documents, paired
