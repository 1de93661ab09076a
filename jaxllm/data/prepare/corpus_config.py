"""Settings of a corpus: the TOML file that `jaxllm data prepare` reads.

    out = "prepared"
    tokenizer = "path/to/tokenizer"

    [[source]]
    name = "web"
    files = ["s3://bucket/web/*.jsonl.zst"]
    license = "ODC-By 1.0"

    [language]
    keep = ["en"]

    [quality]
    rules = ["gopher_repetition", "gopher_quality", "c4", "fineweb"]

    [blocklist]
    files = ["bad_words.txt"]

    [pii]

    [dedup]
    threshold = 0.8

    [decontamination]
    evals = ["evals/*.jsonl"]

A table that is absent turns its stage off. The order of sources is the order of the output.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jaxllm.config import ConfigError, from_dict
from jaxllm.data.sources.text_files import SEPARATOR

CorpusFormat = Literal["auto", "text", "jsonl", "parquet", "arrow", "webdataset", "warc"]
RULES = ("gopher_repetition", "gopher_quality", "c4", "fineweb")
Setting = bool | int | float | str


@dataclass(frozen=True)
class CorpusSource:
    """Source of a corpus: files that share a name, a licence and a share of training."""

    name: str
    """Unique name; the folder of its shards."""
    files: tuple[str, ...]
    """Paths and URLs, with * and ?; read in the order given, matches of one pattern sorted."""
    license: str
    """Licence of the texts, for the manifest."""
    about: str = ""
    """Origin of the texts, for the manifest."""
    source_format: CorpusFormat = "auto"
    """File format; auto takes it from the suffix of each name."""
    text_field: str = "text"
    """Field of a record that holds its text."""
    separator: str | None = SEPARATOR
    """Text files: the line that ends a document; "" is the blank-line rule."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name) or self.name == "tokenizer":
            raise ConfigError(
                f"source {self.name!r}: a name has letters, digits, '.', '_' and '-', and is not 'tokenizer'; it names "
                "the folder of its shards"
            )
        if not self.files:
            raise ConfigError(f"source {self.name!r}: files is empty; give paths or URLs")


@dataclass(frozen=True)
class LanguageRule:
    """Language rule: documents of other languages are dropped (py3langid, 97 languages, no network)."""

    keep: tuple[str, ...]
    """ISO 639-1 codes."""
    min_probability: float = 0.65
    """Least probability of a kept language; the rest is dropped as undecided."""


@dataclass(frozen=True)
class QualityRules:
    """Quality rules of published corpora, as datatrove implements them; applied in order."""

    rules: tuple[str, ...] = RULES
    """gopher_repetition, gopher_quality (arXiv:2112.11446), c4 (arXiv:1910.10683), fineweb (arXiv:2406.17557)."""
    words: Literal["whitespace", "datatrove"] = "whitespace"
    """whitespace: what whitespace separates. datatrove: its tokenizer for the language, for which spaCy is needed."""
    language: str = "en"
    """Language of datatrove's tokenizer, if `words` is datatrove."""
    gopher_repetition: dict[str, Setting] = field(default_factory=dict)
    """Arguments of datatrove's GopherRepetitionFilter that differ from the published ones."""
    gopher_quality: dict[str, Setting] = field(default_factory=dict)
    """Same for GopherQualityFilter."""
    c4: dict[str, Setting] = field(default_factory=dict)
    """Same for C4QualityFilter. FineWeb sets filter_no_terminal_punct = false."""
    fineweb: dict[str, Setting] = field(default_factory=dict)
    """Same for FineWebQualityFilter."""

    def __post_init__(self) -> None:
        for name in self.rules:
            if name not in RULES or self.rules.count(name) > 1:
                raise ConfigError(f"quality.rules: {name!r}; legal: each of {', '.join(RULES)} at most once")
        for name in RULES:
            if getattr(self, name) and name not in self.rules:
                raise ConfigError(f"quality.{name} is set, but {name!r} is not in quality.rules; add it there")


@dataclass(frozen=True)
class Blocklist:
    """Block list: a document with any of its words or phrases is dropped, as C4 does with its list of bad words."""

    files: tuple[str, ...]
    """Text files of this machine, one word or phrase a line; upper and lower case are the same."""

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError("blocklist.files is empty; give text files with one word or phrase a line")
        for name in self.files:
            if "://" in name:
                raise ConfigError(f"blocklist.files: {name!r} is a URL; copy the list to a file of this machine")


@dataclass(frozen=True)
class PIIMasks:
    """Masks of personal data in documents (datatrove's PIIFormatter)."""

    emails: bool = True
    """Replace e-mail addresses."""
    ips: bool = True
    """Replace public IPv4 addresses."""
    email_mask: str = "email@example.com"
    """Text in place of an e-mail address."""
    ip_mask: str = "192.0.2.1"
    """Text in place of an IP address; the default is reserved for documentation (RFC 5737)."""


@dataclass(frozen=True)
class DedupRule:
    """Deduplication over the whole corpus: a document is dropped if an earlier one is equal or similar."""

    threshold: float = 0.8
    """Jaccard similarity of sets of word n-grams from which on documents are near duplicates; 0 compares none."""
    ngram_words: int = 5
    """Words in an n-gram."""
    hashes: int = 128
    """MinHash functions; bands are chosen so that a pair at the threshold is compared with probability 0.99."""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"dedup.threshold is {self.threshold}; legal: 0 (exact duplicates only) up to 1")
        if self.ngram_words < 1 or not 16 <= self.hashes <= 4096:
            raise ConfigError(
                f"dedup: ngram_words is {self.ngram_words} (legal: 1 or more), hashes is {self.hashes} (16 to 4096)"
            )


@dataclass(frozen=True)
class DecontaminationRule:
    """Decontamination: documents that share a word n-gram with an item of an evaluation set are dropped."""

    evals: tuple[str, ...]
    """Files of the evaluation sets, one item a record."""
    text_field: str = "text"
    """Field of a record that holds an item's text."""
    ngram_words: int = 13
    """Words in an n-gram; of a shorter item, all its words."""

    def __post_init__(self) -> None:
        if not self.evals or self.ngram_words < 2:
            raise ConfigError("decontamination: name files in evals; ngram_words must be 2 or more")


@dataclass(frozen=True)
class CorpusConfig:
    """Settings of a corpus."""

    out: str
    """Folder for shards, manifest and report."""
    tokenizer: str
    """byte, or the path of a tokenizer."""
    source: tuple[CorpusSource, ...]
    """Sources, in the order of the output."""
    language: LanguageRule | None = None
    """Language rule; none keeps every language."""
    quality: QualityRules | None = None
    """Quality rules; none keeps every quality."""
    blocklist: Blocklist | None = None
    """Block list; none drops no words."""
    pii: PIIMasks | None = None
    """Masks of personal data; none masks nothing."""
    dedup: DedupRule | None = None
    """Deduplication; none keeps duplicates."""
    decontamination: DecontaminationRule | None = None
    """Decontamination; none searches for nothing."""
    max_characters: int = 10_000_000
    """Characters from which on a document is dropped as too long."""
    shard_tokens: int = 1 << 28
    """Tokens after which a shard ends, with the document that reaches it."""

    def __post_init__(self) -> None:
        if "://" in self.out:
            raise ConfigError(
                f"out is {self.out!r}; it must be a folder of this machine, or one that all workers share. Copy it to "
                "object storage when it is finished: training opens its manifest there"
            )
        names = [one.name for one in self.source]
        if not names:
            raise ConfigError("there is no [[source]]; give at least one, with name, files and license")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"two sources are called {twice[0]!r}; give each a unique name")
        if self.max_characters < 1 or self.shard_tokens < 1:
            raise ConfigError("max_characters and shard_tokens must be 1 or more")
        if self.tokenizer.startswith("bpe:") or self.tokenizer == "model":
            raise ConfigError(
                f"tokenizer is {self.tokenizer!r}; legal: byte, or the path of a tokenizer. To train one first: "
                "jaxllm data tokenize FILES --tokenizer bpe:SIZE --out F.bin"
            )


def read_corpus_config(path: Path) -> CorpusConfig:
    """Settings of a corpus from a TOML file. Relative paths in it are relative to the file's folder.

    Raises:
        ConfigError: not TOML, an unknown key (the closest known one is named), or an illegal value.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML ({error})") from None
    config = from_dict(CorpusConfig, values, str(path))
    base = path.resolve().parent

    def absolute(name: str) -> str:
        return name if "://" in name else str(base / Path(name).expanduser())

    source = tuple(dataclasses.replace(one, files=tuple(map(absolute, one.files))) for one in config.source)
    rule, words = config.decontamination, config.blocklist
    return dataclasses.replace(
        config,
        out=absolute(config.out),
        tokenizer=config.tokenizer if config.tokenizer == "byte" else absolute(config.tokenizer),
        source=source,
        blocklist=words and Blocklist(tuple(map(absolute, words.files))),
        decontamination=rule and dataclasses.replace(rule, evals=tuple(map(absolute, rule.evals))),
    )
