"""Data settings: sources, data mixture, tokenizer, sequence packing and batch shape."""

from dataclasses import dataclass
from typing import Literal

from jaxllm.config import runtime_only
from jaxllm.data import corpus
from jaxllm.data.sources.chitchat import NAME as CHITCHAT
from jaxllm.data.sources.text_files import SEPARATOR

Format = Literal["auto", "text", "jsonl", "parquet", "arrow", "webdataset", "tokens", "corpus"]
FORMATS = ("auto", "text", "jsonl", "parquet", "arrow", "webdataset", "tokens", "corpus")
CONTENTS = ("text", "chat", "preference", "unpaired_preference")
Content = Literal["text", "chat", "preference", "unpaired_preference"]
PACKINGS = ("concat", "documents")
WHEN_EXHAUSTED = ("error", "renormalise")
TEXT_FIELD = "text"


@dataclass(frozen=True)
class SourceConfig:
    """Settings of one source of a data mixture; fields that `DataConfig` also has mean the same."""

    name: str
    """Unique name of the source in messages and in the data cursor."""
    source: str | tuple[str, ...] = corpus.NAME
    """Same as data.source."""
    weight: float = 1.0
    """Share of rows relative to the other sources; exact at every step. A whole number or a short decimal."""
    max_epochs: float | None = None
    """Epochs after which the source is exhausted; None is no limit."""
    source_format: Format = "auto"
    """Same as data.source_format."""
    content: Content = "text"
    """Same as data.content."""
    separator: str | None = SEPARATOR
    """Same as data.separator."""
    text_field: str = TEXT_FIELD
    """Same as data.text_field."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a source of data.mixture has no name; give each source a unique name")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"mixture source {self.name!r}: weight is {self.weight}; it must be a positive number")
        if self.max_epochs is not None and not 0 < self.max_epochs < float("inf"):
            raise ValueError(
                f"mixture source {self.name!r}: max_epochs is {self.max_epochs}; legal: a positive number, or None"
            )
        check_names(self, f"mixture source {self.name!r}: ")


@dataclass(frozen=True)
class DataConfig:
    """Data settings of a run: what it trains on, and how that becomes batches."""

    source: str | tuple[str, ...] = corpus.NAME
    """"shakespeare" (the bundled corpus), "chitchat" (conversations of the package chitchat-dataset), or files or URLs:
    text (.txt .md), JSONL (.jsonl .ndjson), parquet, Arrow (.arrow, or the folder of a saved Hugging Face data set),
    webdataset (.tar), one token file (.bin), the manifest.json of a prepared corpus. Names that end in .gz or .zst are
    decompressed."""
    source_format: Format = "auto"
    """File format of the source; auto takes it from the suffix of the name."""
    content: Content = "text"
    """text: every token is a target. chat: conversations through the model's chat template, with a loss mask over the
    assistant's messages. preference: records with prompt, chosen and rejected, for preference objectives;
    unpaired_preference: records with prompt, completion and label, for the objective kto."""
    separator: str | None = SEPARATOR
    """Text files: the line that ends a document; "" is the blank-line rule, None makes each file one document."""
    text_field: str = TEXT_FIELD
    """Record files: the field with the text, or with a conversation's messages (then the default is "messages")."""
    mixture: tuple[SourceConfig, ...] = ()
    """Data mixture: several sources in exact proportions, in place of `source`."""
    when_exhausted: Literal["error", "renormalise"] = "error"
    """If a source of the mixture would exceed its max_epochs: error stops the run before it begins; renormalise
    continues with the other sources, their weights in the same proportion."""
    skip_bad_records: bool = False
    """Records that cannot be used: False raises an error with file and row; True counts, lists and skips them."""
    heldout: str | tuple[str, ...] = ()
    """Held-out files of the same format, for evaluation only. Empty: a part of the source is held out."""
    heldout_fraction: float | None = None
    """Share of the source to hold out; None is 0.05, or 0 with `heldout` files. The bundled corpus is split already."""
    tokenizer: str = "bpe:2048"
    """"byte", "bpe:SIZE" (trained on the source, then cached), the path of a saved tokenizer or its file, or "model":
    the tokenizer of the model that the run starts from."""
    seq_len: int = 256
    """Tokens per sequence."""
    batch_size: int = 16
    """Sequences per step, over all devices and processes."""
    packing: Literal["concat", "documents"] = "concat"
    """Sequence packing. concat: documents continue from row to row, without padding. documents: whole documents by
    best fit, the rest of a row is padding."""
    seed: int = 0
    """Seed of the shuffle; each epoch has a different order."""
    cache_dir: str = ""
    """Tokenizer cache: folder for tokens and trained tokenizers. Empty: $JAXLLM_CACHE, or ~/.cache/jaxllm."""
    workers: int = runtime_only(0)
    """Processes that tokenise; 0 uses the run's own process. The tokens are the same for any number."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} is {getattr(self, name)}; it must be at least 1")
        if self.workers < 0:
            raise ValueError(f"data.workers is {self.workers}; it must be 0 (none) or more")
        check_names(self, "data.")
        for name, legal in (("packing", PACKINGS), ("when_exhausted", WHEN_EXHAUSTED)):
            if getattr(self, name) not in legal:
                raise ValueError(f"data.{name} is {getattr(self, name)!r}; legal: {', '.join(legal)}")
        if self.heldout_fraction is not None and not 0 <= self.heldout_fraction < 1:
            raise ValueError(f"data.heldout_fraction is {self.heldout_fraction}; legal: from 0 up to, not including, 1")
        if self.heldout_fraction and self.heldout:
            raise ValueError("data.heldout and data.heldout_fraction are both set; set one of them")
        chats = [one.content == "chat" for one in self.sources]
        if any(chats) and self.packing != "documents":
            raise ValueError("data.packing is 'concat', which splits conversations; set data.packing='documents'")
        if any("preference" in one.content for one in self.sources):
            self._check_preferences()
        if self.mixture:
            self._check_mixture()
        elif self.when_exhausted != "error":
            raise ValueError("data.when_exhausted is set, but has no effect without data.mixture; leave it out")

    def _check_preferences(self) -> None:
        if self.mixture:
            raise ValueError("data.mixture has a source of preferences, which cannot be mixed; set data.source instead")
        if self.packing != "documents":
            raise ValueError("data.packing is 'concat', which splits pairs; set data.packing='documents'")

    def _check_mixture(self) -> None:
        own = ("source", "source_format", "content", "separator", "text_field", "heldout")
        for name in own:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                where = "; set heldout_fraction" if name == "heldout" else "; set it in the mixture's sources"
                raise ValueError(f"data.{name} and data.mixture are both set{where}")
        names = [one.name for one in self.mixture]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two sources of data.mixture are called {twice[0]!r}; give each a unique name")

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """Sources of the mixture, or the single source as a tuple of one."""
        if self.mixture:
            return self.mixture
        return (
            SourceConfig(
                "source",
                self.source,
                source_format=self.source_format,
                content=self.content,
                separator=self.separator,
                text_field=self.text_field,
            ),
        )


def check_names(config: SourceConfig | DataConfig, where: str) -> None:
    """Checks the source's name, format and content. Raises ValueError for an empty name or an unknown value."""
    if not config.source:
        names = f"{corpus.NAME!r}, {CHITCHAT!r}, or paths of files"
        raise ValueError(f"{where}source is empty; legal: {names}")
    for name, legal in (("source_format", FORMATS), ("content", CONTENTS)):
        if getattr(config, name) not in legal:
            raise ValueError(f"{where}{name} is {getattr(config, name)!r}; legal: {', '.join(legal)}")
