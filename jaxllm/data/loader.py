"""Data loading: a `DataConfig` to a `Dataset`, through sources, tokenizer, tokenizer cache and sequence packing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from jaxllm.data import corpus, shuffle
from jaxllm.data.chat_encoding import ChatEncoder, Encoder, TextEncoder
from jaxllm.data.config import TEXT_FIELD, DataConfig, SourceConfig
from jaxllm.data.data_source import DataSource
from jaxllm.data.dataset import HeldoutDataset, TokenDataset, make_heldout
from jaxllm.data.mixture import NAME as MIXTURE_ORDER
from jaxllm.data.mixture import MixtureDataset, MixtureSource, exact_shares
from jaxllm.data.preference_rows import load_preference_rows
from jaxllm.data.prepare.corpus_manifest import open_corpus
from jaxllm.data.sequence_packing import PackingPlan, pack_concat, pack_documents
from jaxllm.data.sources.chitchat import NAME as CHITCHAT
from jaxllm.data.sources.chitchat import Chitchat, find_chitchat
from jaxllm.data.sources.documents import BadRecords, Documents, hold_out
from jaxllm.data.sources.preference_records import PREFERENCE_CONTENTS
from jaxllm.data.sources.records import RecordFiles
from jaxllm.data.sources.remote_files import File, file_format, find_files
from jaxllm.data.sources.text_files import TextFiles, bundled
from jaxllm.data.token_files import TokenDocuments, open_tokens
from jaxllm.data.tokenise import ProgressCallback, tokenise_documents
from jaxllm.files import DataError, at, cache_root
from jaxllm.text import ByteTokenizer, ChatTemplate, Tokenizer, load_template, load_tokenizer

HELDOUT_FRACTION = 0.05
PACKINGS = {"concat": pack_concat, "documents": pack_documents}
CHAT_FIELD = "messages"


@dataclass(frozen=True, eq=False)
class Dataset:
    """Data set of a run: training data, held-out data (None if nothing is held out), and their tokenizer.

    ``load_dataset`` makes one from settings. ``train`` may be any data source, such as prompts with advantages or
    preference pairs; ``train(config, data=Dataset(...))`` trains on it.
    """

    config: DataConfig
    train: DataSource
    heldout: HeldoutDataset | None
    tokenizer: Tokenizer
    summary: str
    """Text for a log: documents, tokens, bytes per token, rows, padding, skipped records; one line for each source."""


@dataclass(frozen=True, eq=False)
class _OpenedSource:
    """Source before tokenisation: documents, or a token file."""

    config: SourceConfig
    texts: tuple[Documents, Documents | None] | None
    files: tuple[File, ...] = ()
    kind: str = ""


def load_dataset(
    config: DataConfig,
    tokenizer: Tokenizer | None = None,
    template: ChatTemplate | None = None,
    *,
    progress: ProgressCallback | None = None,
    virtual_tokens: int = 0,
) -> Dataset:
    """Opens, tokenises (or takes from the tokenizer cache) and packs the sources of `config`.

    tokenizer: the tokenizer to use if `config.tokenizer` is "model".
    template: the chat template for conversations; None uses the one beside the tokenizer.
    progress: called with (documents, tokens) of a source while it is tokenised.
    virtual_tokens: places at the start of each row that are left free, see `PackingPlan`.

    Raises DataError naming file and row for data that cannot be used, ValueError for settings that conflict.
    """
    if config.content in PREFERENCE_CONTENTS:
        return _preferences(config, tokenizer, template, virtual_tokens)
    if config.mixture:
        exact_shares([one.weight for one in config.mixture])  # raises for illegal weights before anything is read
    rows = replace(config, seq_len=config.seq_len - virtual_tokens) if virtual_tokens else config
    opened = [_open(one, config) for one in config.sources]
    tokenizer = _open_tokenizer(config, opened, tokenizer)
    parts = [_tokens(one, rows, tokenizer, template, progress) for one in opened]
    plans = [(train, _pack(train, rows, virtual_tokens)) for train, _ in parts]
    common = {
        "tokenizer": tokenizer.fingerprint,
        "packing": config.packing,
        "seq_len": config.seq_len,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "order": shuffle.NAME,
    } | ({"virtual_tokens": virtual_tokens} if virtual_tokens else {})
    lines = [_summary(train, plan, config, tokenizer) for train, plan in plans]
    training: TokenDataset | MixtureDataset
    if config.mixture:
        training = _mixture(config, plans, common)
        total = sum(one.weight for one in config.mixture)
        named = zip(config.mixture, lines, strict=True)
        lines = [f"{one.name}: {one.weight / total:.1%} of {line}" for one, line in named]
        lines += [
            f"{name} ends in step {step}"
            for name, step in training.exhausted_sources()
            if config.when_exhausted != "error"
        ]
    else:
        train, plan = plans[0]
        training = TokenDataset(train, plan, config.batch_size, config.seed, _content(train) | common)
    held = [(one, _pack(one, rows, virtual_tokens)) for _, one in parts if one is not None]
    evaluation = make_heldout(held, config.batch_size, tokenizer) if held else None
    if evaluation is not None:
        if not evaluation.target_tokens:
            raise DataError(f"{held[0][0].name}: the held-out part has no target; hold out more, or raise seq_len")
        ratio = evaluation.target_bytes / evaluation.target_tokens
        documents, tokens = (sum(count) for count in zip(*((len(x.starts), x.total) for x, _ in held), strict=True))
        lines[-1] += f"; held out {documents:,} documents, {tokens:,} tokens, {ratio:.2f} bytes each"
    # A cached property serves a protocol's property; the type checker does not see it.
    return Dataset(config, training, evaluation, tokenizer, "\n".join(lines))  # pyright: ignore[reportArgumentType]


def _preferences(
    config: DataConfig, tokenizer: Tokenizer | None, template: ChatTemplate | None, virtual_tokens: int
) -> Dataset:
    own = SourceConfig("source", config.source, content=config.content)
    if as_tuple(config.source) == (corpus.NAME,):
        raise ValueError("data.content is 'preference', but the bundled corpus has no preferences; set data.source")
    _reject_ineffective(config.sources[0], config, "preferences", "separator", "text_field", "source_format")
    tokenizer = _open_tokenizer(config, [_OpenedSource(own, None)], tokenizer)
    found = load_preference_rows(config, tokenizer, template or _template(config), virtual_tokens=virtual_tokens)
    return Dataset(config, found.train, found.heldout, tokenizer, found.summary)


def open_documents(source: SourceConfig, *, skip_bad_records: bool = False) -> Documents:
    """All documents of a source as texts, none of them held out.

    Raises DataError for files that cannot be used, or that contain tokens.
    """
    config = DataConfig(
        source.source,
        source.source_format,
        source.content,
        source.separator,
        source.text_field,
        skip_bad_records=skip_bad_records,
        packing="documents",
        heldout_fraction=None if as_tuple(source.source) == (corpus.NAME,) else 0.0,
    )
    opened = _open(source, config)
    if opened.texts is None:
        raise DataError(f"{at(opened.files[0])}: contains tokens, not text; give the files it was tokenised from")
    return opened.texts[0]


def _mixture(
    config: DataConfig, plans: list[tuple[TokenDocuments, PackingPlan]], common: dict[str, Any]
) -> MixtureDataset:
    identity: dict[str, Any] = {}
    sources = []
    for one, (documents, plan) in zip(config.mixture, plans, strict=True):
        limit = None if one.max_epochs is None else float(one.max_epochs)
        settings = {"weight": float(one.weight), "max_epochs": limit}  # 2 and 2.0 are one setting
        identity |= {f"{one.name} {name}": value for name, value in (_content(documents) | settings).items()}
        sources.append(MixtureSource(one.name, documents, plan, one.weight, one.max_epochs))
    identity |= common | {"mixture": MIXTURE_ORDER, "when_exhausted": config.when_exhausted}
    renormalise = config.when_exhausted == "renormalise"
    return MixtureDataset(tuple(sources), config.batch_size, config.seed, identity, renormalise)


def _content(documents: TokenDocuments) -> dict[str, Any]:
    return {"content": documents.content_hash, "documents": len(documents.starts), "tokens": documents.total}


def _summary(documents: TokenDocuments, plan: PackingPlan, config: DataConfig, tokenizer: Tokenizer) -> str:
    """Log line about the training rows of a source."""
    line = (
        f"{documents.name}: {len(documents.starts):,} documents, {documents.total:,} tokens of "
        f"{tokenizer.vocab_size:,}, {plan.rows:,} rows of {config.seq_len} ({plan.padding:.1%} padding)"
    )
    if cut := documents.about.get("cut"):
        line += f"; {cut:,} conversations longer than a row are truncated to it"
    if skipped := documents.about.get("skipped"):
        count = skipped["unreadable"] + skipped["unencodable"]
        line += f"; {count:,} bad records skipped, the first: {skipped['listed'][0]}"
    return line


def _open(source: SourceConfig, config: DataConfig) -> _OpenedSource:
    names = as_tuple(source.source)
    bad = BadRecords(config.skip_bad_records)
    if names == (corpus.NAME,):
        split = ("heldout", "heldout_fraction")
        _reject_ineffective(
            source, config, "the bundled corpus", "source_format", "content", "separator", "text_field", *split
        )
        return _OpenedSource(source, (bundled("train"), bundled("heldout")))
    if names == (CHITCHAT,):
        _reject_ineffective(
            source, config, f"the chats of {CHITCHAT}", "source_format", "separator", "text_field", "heldout"
        )
        if source.content != "chat":
            raise ValueError(f"{CHITCHAT} contains conversations; set data.content='chat'")
        return _OpenedSource(source, hold_out(Chitchat(find_chitchat()), _fraction(config)))
    files = find_files(names)
    kind = file_format(files, source.source_format)
    if kind in ("tokens", "corpus"):
        _reject_ineffective(source, config, "a token file", "separator", "text_field", "content", "skip_bad_records")
        return _OpenedSource(source, None, files, kind)
    own = ("text files", "text_field", "content") if kind == "text" else (f"{kind.upper()} files", "separator")
    _reject_ineffective(source, config, *own)
    train = _documents(source, files, kind, bad)
    if config.heldout:
        return _OpenedSource(source, (train, _documents(source, _heldout_files(config, source, kind), kind, bad)))
    return _OpenedSource(source, hold_out(train, _fraction(config)))


def _documents(source: SourceConfig, files: tuple[File, ...], kind: str, bad: BadRecords) -> Documents:
    if kind == "text":
        return TextFiles(files, source.separator, BadRecords(bad.skip))
    chat = source.content == "chat"
    field = CHAT_FIELD if chat and source.text_field == TEXT_FIELD else source.text_field
    return RecordFiles(files, kind, field, chat, BadRecords(bad.skip))


def _tokens(
    opened: _OpenedSource,
    config: DataConfig,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    progress: ProgressCallback | None,
) -> tuple[TokenDocuments, TokenDocuments | None]:
    """Tokenised (training, held-out) documents of a source."""
    if opened.texts is None:

        def read(files: tuple[File, ...]) -> TokenDocuments:
            if opened.kind == "corpus":
                return open_corpus(_one_of(files), tokenizer, cache_root(config.cache_dir))
            return open_tokens(_single(files), tokenizer)

        train = read(opened.files)
        if config.heldout:
            return train, read(_heldout_files(config, opened.config, opened.kind))
        return train.hold_out(_fraction(config))
    if opened.config.content == "chat" and template is None:
        template = _template(config)
    encoder = make_encoder(opened.config.content, tokenizer, template)
    cache = cache_root(config.cache_dir)
    both = [
        one and tokenise_documents(one, encoder, cache, workers=config.workers, progress=progress)
        for one in opened.texts
    ]
    if encoder.has_loss_mask:
        both = [one and _truncate(one, config.seq_len) for one in both]
    train, heldout = both
    assert train is not None
    return train, heldout


def _truncate(documents: TokenDocuments, seq_len: int) -> TokenDocuments:
    """Truncates conversations to a row; the rest is dropped, because in another row its context would be missing."""
    cut = int((documents.lengths > seq_len + 1).sum())
    return replace(documents.truncate(seq_len + 1), about=documents.about | {"cut": cut})


def _template(config: DataConfig) -> ChatTemplate | None:
    """Chat template stored beside the tokenizer, or None."""
    named = config.tokenizer not in ("model", "byte") and not config.tokenizer.startswith("bpe:")
    return load_template(config.tokenizer) if named else None


def make_encoder(content: str, tokenizer: Tokenizer, template: ChatTemplate | None) -> Encoder:
    """Encoder for documents of a content type. Raises DataError for conversations without a chat template."""
    if content == "text":
        return TextEncoder(tokenizer)
    if template is None:
        raise DataError(
            "data.content is 'chat', but there is no chat template: start from a model that has one (init_from, with "
            "data.tokenizer='model'), or name a tokenizer's folder that contains a chat_template.jinja"
        )
    return ChatEncoder(tokenizer, template)


def _heldout_files(config: DataConfig, source: SourceConfig, kind: str) -> tuple[File, ...]:
    files = find_files(as_tuple(config.heldout))
    if (found := file_format(files, source.source_format)) != kind:
        raise DataError(
            f"{at(files[0])}: the held-out files are {found}, the source is {kind}; use one format for both"
        )
    return files


def _open_tokenizer(config: DataConfig, opened: list[_OpenedSource], given: Tokenizer | None) -> Tokenizer:
    if config.tokenizer == "model":
        if given is None:
            raise DataError("data.tokenizer is 'model', but the run starts from no model; set `init_from`, or name one")
        return given
    name, _, _ = config.tokenizer.partition(":")
    if name != "bpe":
        return resolve_tokenizer(config.tokenizer, None)
    for one in opened:
        if one.config.content in PREFERENCE_CONTENTS:
            raise DataError(f"data.tokenizer is {config.tokenizer!r}, which cannot be trained on preferences; name one")
        if one.texts is None:
            raise DataError(
                f"{at(one.files[0])}: contains tokens, so {config.tokenizer!r} cannot be trained on it; "
                "set `tokenizer` to 'byte' or the path of the tokenizer that made the tokens"
            )
    if len(opened) > 1 or opened[0].config.content == "chat":
        what = "a mixture" if len(opened) > 1 else "conversations"
        raise DataError(f"data.tokenizer is {config.tokenizer!r}, which cannot be trained on {what}; name a tokenizer")
    texts = opened[0].texts
    return resolve_tokenizer(config.tokenizer, lambda: cast(tuple[Documents, Any], texts)[0], config.cache_dir)


def resolve_tokenizer(name: str, documents: Callable[[], Documents] | None, cache_dir: str = "") -> Tokenizer:
    """Tokenizer for a setting: "byte", "bpe:SIZE" trained on `documents` and cached, or a path."""
    if name == "byte":
        return ByteTokenizer()
    kind, _, size = name.partition(":")
    if kind != "bpe" or documents is None:
        return load_tokenizer(name)
    if not size.isdecimal():
        raise ValueError(f"data.tokenizer is {name!r}; to train one give 'bpe:SIZE', for example 'bpe:2048'")
    from jaxllm.text.bpe_training import cached_bpe  # its library is slow to import

    train = documents()
    texts = (document.text for document in train)
    return cached_bpe(texts, int(size), content_hash=train.content_hash, where=train.name, cache=cache_root(cache_dir))


def _pack(documents: TokenDocuments, config: DataConfig, virtual_tokens: int) -> PackingPlan:
    plan = PACKINGS[config.packing](documents.starts, documents.lengths, config.seq_len)
    plan = replace(plan, seq_len=config.seq_len + virtual_tokens, virtual_tokens=virtual_tokens)
    if not plan.rows:
        raise DataError(f"{documents.name}: too short; no document has two tokens")
    return plan


def _fraction(config: DataConfig) -> float:
    return HELDOUT_FRACTION if config.heldout_fraction is None else config.heldout_fraction


def _one_of(files: tuple[File, ...]) -> File:
    if len(files) != 1:
        raise DataError(
            f"{at(files[-1])}: a second token file; a source is one token file or manifest, or several files of text "
            "or records"
        )
    return files[0]


def _single(files: tuple[File, ...]) -> Path:
    file = _one_of(files)
    if not isinstance(file, Path):
        raise DataError(f"{at(file)}: a token file is memory-mapped, so it must be a local file; copy it here")
    return file


def as_tuple(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """Tuple of names, from one name or several."""
    return (value,) if isinstance(value, str) else value


def _reject_ineffective(source: SourceConfig, config: DataConfig, what: str, *names: str) -> None:
    """Raises ValueError for settings that would have no effect."""
    for name in names:
        owner, default = (source, SourceConfig("default")) if hasattr(source, name) else (config, DataConfig())
        if config.mixture and owner is config and name == "heldout_fraction":
            continue  # it applies to the other sources
        if getattr(owner, name) != getattr(default, name):
            raise ValueError(f"data.{name} is set, but has no effect for {what}; leave it out")
