"""From a `DataConfig` to a `Dataset`: which source, which tokenizer, which packing; then tokens, plan, batches."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxllm.data import corpus, shuffle
from jaxllm.data.dataset import HeldoutDataset, TokenDataset, make_heldout
from jaxllm.data.packing import Plan, pack_concat, pack_documents
from jaxllm.data.source import SEPARATOR, Documents, JsonlFiles, TextFiles, bundled, check_files, hold_out, kind_of
from jaxllm.data.tokens import TokenDocuments, open_tokens, tokenised
from jaxllm.files import DataError, at, cache_root
from jaxllm.text import ByteTokenizer, Tokenizer, load_tokenizer

HELDOUT_FRACTION = 0.05
PACKINGS = {"concat": pack_concat, "documents": pack_documents}


@dataclass(frozen=True)
class DataConfig:
    """What to train on, and how it becomes batches."""

    source: str | tuple[str, ...] = corpus.NAME
    """"shakespeare" (the bundled corpus), or files: text (.txt .md), JSONL (.jsonl .ndjson), one token file (.bin)."""
    source_format: Literal["auto", "text", "jsonl", "tokens"] = "auto"
    """What kind of file the source is; auto goes by the ending of the name."""
    separator: str | None = SEPARATOR
    """Text files: the line that ends a document; "" is the blank-line rule, None makes each file one document."""
    text_field: str = "text"
    """JSONL files: the field that holds the text."""
    heldout: str | tuple[str, ...] = ()
    """Files of the same kind to evaluate on, never trained on. Empty: a part of the source is held out."""
    heldout_fraction: float | None = None
    """Share of the source to hold out; None is 0.05, or none with `heldout` files. The bundled corpus has its split."""
    tokenizer: str = "bpe:2048"
    """"byte", "bpe:SIZE" (trained on the source, then cached), the path of a saved tokenizer or its file, or "model":
    that of the model a run begins from."""
    seq_len: int = 256
    """Tokens per sequence."""
    batch_size: int = 16
    """Sequences per step, over all devices and processes."""
    packing: Literal["concat", "documents"] = "concat"
    """concat: documents run on from row to row, no padding. documents: whole documents, best fit, the rest padding."""
    seed: int = 0
    """Seed of the shuffle; each epoch has an order of its own."""
    cache_dir: str = ""
    """Where tokens and trained tokenizers are kept. Empty: $JAXLLM_CACHE, or ~/.cache/jaxllm."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} is {getattr(self, name)}; it must be at least 1")
        for name, legal in (("packing", PACKINGS), ("source_format", ("auto", "text", "jsonl", "tokens"))):
            if getattr(self, name) not in legal:
                raise ValueError(f"data.{name} is {getattr(self, name)!r}; legal: {', '.join(legal)}")
        if not self.source:
            raise ValueError(f"data.source is empty; legal: {corpus.NAME!r}, or paths of files")
        if self.heldout_fraction is not None and not 0 <= self.heldout_fraction < 1:
            raise ValueError(f"data.heldout_fraction is {self.heldout_fraction}; legal: from 0 up to, not including, 1")
        if self.heldout_fraction and self.heldout:
            raise ValueError("data.heldout and data.heldout_fraction are both set; set one of them")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training rows, held-out rows (None when nothing is held out), and the tokenizer of both."""

    config: DataConfig
    train: TokenDataset
    heldout: HeldoutDataset | None
    tokenizer: Tokenizer
    summary: str
    """One line for a log: documents, tokens, bytes per token, rows, padding."""


def load_dataset(config: DataConfig, tokenizer: Tokenizer | None = None) -> Dataset:
    """Opens, tokenises (or takes from the cache) and packs what `config` names.

    tokenizer: the one to use where `config.tokenizer` is "model".

    Raises DataError naming file and row for data that cannot be used, ValueError for settings that do not go together.
    """
    train, heldout, tokenizer = _token_documents(config, tokenizer)
    plan = _pack(train, config)
    identity = {
        "content": train.content_hash,
        "documents": len(train.starts),
        "tokens": train.total,
        "tokenizer": tokenizer.fingerprint,
        "packing": config.packing,
        "seq_len": config.seq_len,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "order": shuffle.NAME,
    }
    training = TokenDataset(train, plan, config.batch_size, config.seed, identity)
    summary = (
        f"{train.name}: {len(train.starts):,} documents, {train.total:,} tokens of {tokenizer.vocab_size:,}, "
        f"{plan.rows:,} rows of {config.seq_len} ({plan.padding:.1%} padding)"
    )
    evaluation = None
    if heldout is not None:
        evaluation = make_heldout(heldout, _pack(heldout, config), config.batch_size, tokenizer)
        ratio = evaluation.target_bytes / evaluation.target_tokens
        summary += f"; held out {len(heldout.starts):,} documents, {heldout.total:,} tokens, {ratio:.2f} bytes each"
    return Dataset(config, training, evaluation, tokenizer, summary)


def _token_documents(
    config: DataConfig, given: Tokenizer | None
) -> tuple[TokenDocuments, TokenDocuments | None, Tokenizer]:
    """(training, held-out, tokenizer)."""
    cache = cache_root(config.cache_dir)
    if _listed(config.source) == (corpus.NAME,):
        _refuse(config, "the bundled corpus", "source_format", "separator", "text_field", "heldout", "heldout_fraction")
        texts = bundled("train"), bundled("heldout")
    else:
        files = check_files(_listed(config.source))
        kind = kind_of(files, config.source_format)
        if kind == "tokens":
            _refuse(config, "a token file", "separator", "text_field")
            return _token_files(config, files, given)
        _refuse(config, *(("text files", "text_field") if kind == "text" else ("JSONL files", "separator")))
        texts = _text_files(config, files, kind)
    train, heldout = texts
    tokenizer = _open_tokenizer(config, train, given)
    return tokenised(train, tokenizer, cache), heldout and tokenised(heldout, tokenizer, cache), tokenizer


def _text_files(config: DataConfig, files: tuple[Path, ...], kind: str) -> tuple[Documents, Documents | None]:
    def documents(files: tuple[Path, ...]) -> Documents:
        return TextFiles(files, config.separator) if kind == "text" else JsonlFiles(files, config.text_field)

    if config.heldout:
        return documents(files), documents(_heldout_files(config, kind))
    return hold_out(documents(files), _fraction(config))


def _token_files(
    config: DataConfig, files: tuple[Path, ...], given: Tokenizer | None
) -> tuple[TokenDocuments, TokenDocuments | None, Tokenizer]:
    if config.tokenizer.startswith("bpe:"):
        raise DataError(f"{at(files[0])}: holds tokens already, so {config.tokenizer!r} cannot be trained on it; "
                        "set `tokenizer` to 'byte' or the path of the tokenizer it was made with")  # fmt: skip
    tokenizer = _open_tokenizer(config, None, given)
    train = open_tokens(_single(files), tokenizer)
    if config.heldout:
        return train, open_tokens(_single(_heldout_files(config, "tokens")), tokenizer), tokenizer
    return *train.hold_out(_fraction(config)), tokenizer


def _heldout_files(config: DataConfig, kind: str) -> tuple[Path, ...]:
    files = check_files(_listed(config.heldout))
    if (found := kind_of(files, config.source_format)) != kind:
        raise DataError(f"{at(files[0])}: held-out files are {found}, the source is {kind}; they must be of one kind")
    return files


def _open_tokenizer(config: DataConfig, train: Documents | None, given: Tokenizer | None) -> Tokenizer:
    if config.tokenizer == "model":
        if given is None:
            raise DataError("data.tokenizer is 'model', but the run begins from no model; set `init_from`, or name one")
        return given
    name, _, size = config.tokenizer.partition(":")
    if config.tokenizer == "byte":
        return ByteTokenizer()
    if name != "bpe" or train is None:
        return load_tokenizer(config.tokenizer)
    if not size.isdecimal():
        raise ValueError(f"data.tokenizer is {config.tokenizer!r}; a trained one is 'bpe:SIZE', for example 'bpe:2048'")
    from jaxllm.text.bpe import cached_bpe  # the library it needs takes time to import

    texts = (document.text for document in train)
    cache = cache_root(config.cache_dir)
    return cached_bpe(texts, int(size), content_hash=train.content_hash, where=train.name, cache=cache)


def _pack(documents: TokenDocuments, config: DataConfig) -> Plan:
    plan = PACKINGS[config.packing](documents.starts, documents.lengths, config.seq_len)
    if not plan.rows:
        raise DataError(f"{documents.name}: too short; no token has one that follows it")
    return plan


def _fraction(config: DataConfig) -> float:
    return HELDOUT_FRACTION if config.heldout_fraction is None else config.heldout_fraction


def _single(files: tuple[Path, ...]) -> Path:
    if len(files) != 1:
        raise DataError(
            f"{at(files[-1])}: a second token file; a source is one token file, or several of text or JSONL"
        )
    return files[0]


def _listed(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def _refuse(config: DataConfig, what: str, *names: str) -> None:
    """Settings that would have no effect are errors, not silence."""
    default = DataConfig()
    changed = [name for name in names if getattr(config, name) != getattr(default, name)]
    if changed:
        raise ValueError(f"data.{changed[0]} is set, but has no meaning for {what}; leave it out")
