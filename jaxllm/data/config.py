"""What to train on, and how it becomes batches."""

from dataclasses import dataclass
from typing import Literal

from jaxllm.config import runtime_only
from jaxllm.data import corpus
from jaxllm.data.sources.chitchat import NAME as CHITCHAT
from jaxllm.data.sources.text_files import SEPARATOR

Format = Literal["auto", "text", "jsonl", "parquet", "arrow", "webdataset", "tokens"]
FORMATS = ("auto", "text", "jsonl", "parquet", "arrow", "webdataset", "tokens")
CONTENTS = ("text", "chat")
PACKINGS = ("concat", "documents")
WHEN_EXHAUSTED = ("error", "renormalise")
TEXT_FIELD = "text"


@dataclass(frozen=True)
class SourceConfig:
    """One source of a mixture; the fields that `DataConfig` has too mean the same."""

    name: str
    """What to call it in messages and in the cursor; no two are alike."""
    source: str | tuple[str, ...] = corpus.NAME
    """As data.source."""
    weight: float = 1.0
    """Rows of it in proportion to those of the others; exact at every step. A whole number or a short decimal."""
    max_epochs: float | None = None
    """How often it may be read in all; None is without end."""
    source_format: Format = "auto"
    """As data.source_format."""
    content: Literal["text", "chat"] = "text"
    """As data.content."""
    separator: str | None = SEPARATOR
    """As data.separator."""
    text_field: str = TEXT_FIELD
    """As data.text_field."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a source of data.mixture has no name; give each one of its own")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"mixture source {self.name!r}: weight is {self.weight}; it must be a positive number")
        if self.max_epochs is not None and not 0 < self.max_epochs < float("inf"):
            raise ValueError(
                f"mixture source {self.name!r}: max_epochs is {self.max_epochs}; legal: a positive number, or None"
            )
        check_names(self, f"mixture source {self.name!r}: ")


@dataclass(frozen=True)
class DataConfig:
    """What to train on, and how it becomes batches."""

    source: str | tuple[str, ...] = corpus.NAME
    """"shakespeare" (the bundled corpus), "chitchat" (conversations of the package chitchat-dataset), or files or URLs:
    text (.txt .md), JSONL (.jsonl .ndjson), parquet, Arrow (.arrow, or the folder of a saved Hugging Face data set),
    webdataset (.tar), one token file (.bin). With .gz or .zst behind, they are decompressed."""
    source_format: Format = "auto"
    """What kind of file the source is; auto goes by the ending of the name."""
    content: Literal["text", "chat"] = "text"
    """text: every token is a target. chat: conversations through the model's chat template, trained on what the
    assistant says."""
    separator: str | None = SEPARATOR
    """Text files: the line that ends a document; "" is the blank-line rule, None makes each file one document."""
    text_field: str = TEXT_FIELD
    """Files of records: the field that holds the text; of conversations the messages, "messages" where this is left."""
    mixture: tuple[SourceConfig, ...] = ()
    """Several sources by exact shares, in place of `source`."""
    when_exhausted: Literal["error", "renormalise"] = "error"
    """A mixture's source that reaches its max_epochs: error refuses the run before it begins; renormalise goes on with
    the others, their weights in proportion."""
    skip_bad_records: bool = False
    """Records that cannot be used: an error that names file and row, or with True counted, listed and left out."""
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
    workers: int = runtime_only(0)
    """Processes that tokenise; 0 is the run's own. The tokens are the same for any number."""

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
            raise ValueError("data.packing is 'concat', which cuts conversations in two; set data.packing='documents'")
        if self.mixture:
            self._check_mixture()
        elif self.when_exhausted != "error":
            raise ValueError("data.when_exhausted is set, but has no meaning without data.mixture; leave it out")

    def _check_mixture(self) -> None:
        own = ("source", "source_format", "content", "separator", "text_field", "heldout")
        for name in own:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                where = "; set heldout_fraction" if name == "heldout" else "; set it in the mixture's sources"
                raise ValueError(f"data.{name} and data.mixture are both set{where}")
        names = [one.name for one in self.mixture]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two sources of data.mixture are called {twice[0]!r}; give each a name of its own")

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The mixture's, or the single one."""
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
    """Raises ValueError for a source without a name, or a kind that is none."""
    if not config.source:
        names = f"{corpus.NAME!r}, {CHITCHAT!r}, or paths of files"
        raise ValueError(f"{where}source is empty; legal: {names}")
    for name, legal in (("source_format", FORMATS), ("content", CONTENTS)):
        if getattr(config, name) not in legal:
            raise ValueError(f"{where}{name} is {getattr(config, name)!r}; legal: {', '.join(legal)}")
