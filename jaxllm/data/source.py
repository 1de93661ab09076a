"""Where documents come from: text files, JSONL files, the bundled corpus; and which of them are held out.

What a document is:
- text (`.txt`, `.md`): a line that holds only the separator (default `<|endoftext|>`) ends a document, so a file
  without one is one document. Separator "" is the blank-line rule: one or more blank lines end a document. None: a
  file is a document, whatever is in it.
- JSONL (`.jsonl`, `.ndjson`): each row is an object, its text under `text_field`. Blank rows are passed over.

Documents with no text carry nothing and are passed over. Everything else that is not a document is an error that names
file and row; rows count from 1.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxllm.data import corpus
from jaxllm.files import DataError, at, digest, file_sha256

KINDS = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".bin": "tokens"}
SEPARATOR = corpus.SEPARATOR


class Document(NamedTuple):
    """A text and where it begins (`row`: line of the file, from 1)."""

    text: str
    file: Path
    row: int


class Documents(ABC):
    """Documents in a fixed order, read anew by each iteration and never all in memory."""

    name: str

    @abstractmethod
    def __iter__(self) -> Iterator[Document]: ...

    @property
    @abstractmethod
    def content_hash(self) -> str:
        """Changes when any document does."""


@dataclass(frozen=True)
class TextFiles(Documents):
    """Plain text files, UTF-8. See the module's docstring for `separator`."""

    files: tuple[Path, ...]
    separator: str | None = SEPARATOR

    @property
    def name(self) -> str:
        return _name(self.files)

    @cached_property
    def content_hash(self) -> str:
        return digest(["text", self.separator, [file_sha256(file) for file in self.files]])

    def __iter__(self) -> Iterator[Document]:
        for file in self.files:
            found = False
            for row, raw in self._pieces(file):
                text = _decoded(raw, file, row)
                if text.strip():
                    found = True
                    yield Document(text, file, row)
            if not found:
                raise DataError(f"{at(file)}: holds no text")

    def _pieces(self, file: Path) -> Iterator[tuple[int, bytes]]:
        if self.separator is None:
            yield 1, file.read_bytes().removeprefix(b"\xef\xbb\xbf")
            return
        mark, lines, first = self.separator.encode(), [], 1
        for row, line in enumerate(_lines(file), start=1):
            if line.strip() != mark:
                lines.append(line)
                continue
            if lines:
                yield first, b"".join(lines)
            lines, first = [], row + 1
        if lines:
            yield first, b"".join(lines)


@dataclass(frozen=True)
class JsonlFiles(Documents):
    """One JSON object per row, its text under `field`."""

    files: tuple[Path, ...]
    field: str = "text"

    @property
    def name(self) -> str:
        return _name(self.files)

    @cached_property
    def content_hash(self) -> str:
        return digest(["jsonl", self.field, [file_sha256(file) for file in self.files]])

    def __iter__(self) -> Iterator[Document]:
        for file in self.files:
            found = False
            for row, line in enumerate(_lines(file), start=1):
                if line.strip():
                    text = self._text(line, file, row)
                    if text.strip():
                        found = True
                        yield Document(text, file, row)
            if not found:
                raise DataError(f"{at(file)}: holds no text")

    def _text(self, line: bytes, file: Path, row: int) -> str:
        try:
            record = json.loads(_decoded(line.rstrip(), file, row))
        except json.JSONDecodeError as error:
            raise DataError(f"{at(file, row)}: not valid JSON ({error.msg} at column {error.colno})") from None
        if not isinstance(record, dict):
            raise DataError(f"{at(file, row)}: a {type(record).__name__}; a row must be an object with {self.field!r}")
        if self.field not in record:
            close = get_close_matches(self.field, list(record), n=1)
            hint = f"; did you mean text_field={close[0]!r}?" if close else ""
            raise DataError(f"{at(file, row)}: no field {self.field!r}, only {sorted(record)}{hint}")
        text = record[self.field]
        if not isinstance(text, str):
            raise DataError(f"{at(file, row)}: {self.field!r} is a {type(text).__name__}; it must be text")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError(f"{at(file, row)}: {self.field!r} is not valid Unicode (a lone surrogate)") from None
        return text


@dataclass(frozen=True, eq=False)
class Chosen(Documents):
    """The documents of `parent` at the places where `mask` is true."""

    parent: Documents
    mask: np.ndarray

    @property
    def name(self) -> str:
        return self.parent.name

    @cached_property
    def content_hash(self) -> str:
        return digest(["chosen", self.parent.content_hash, hashlib.sha256(self.mask.tobytes()).hexdigest()])

    def __iter__(self) -> Iterator[Document]:
        return (document for document, wanted in zip(self.parent, self.mask, strict=True) if wanted)


@dataclass(frozen=True)
class Part(Documents):
    """Characters `begin` to `end` of a single document."""

    parent: Documents
    begin: int
    end: int

    @property
    def name(self) -> str:
        return self.parent.name

    @cached_property
    def content_hash(self) -> str:
        return digest(["part", self.parent.content_hash, self.begin, self.end])

    def __iter__(self) -> Iterator[Document]:
        for document in self.parent:
            row = document.row + document.text.count("\n", 0, self.begin)
            yield Document(document.text[self.begin : self.end], document.file, row)


def bundled(split: str) -> Documents:
    """The bundled corpus, `train` or `heldout`. Raises DataError if the file is not the one that was published."""
    file = corpus.path(split)
    if not file.is_file() or file_sha256(file) != corpus.SHA256[split]:
        raise DataError(f"{at(file)}: the bundled corpus is missing or altered (sha256); install jaxllm again")
    return TextFiles((file,), corpus.SEPARATOR)


def check_files(files: Sequence[str]) -> tuple[Path, ...]:
    """The paths, each an existing file that is not empty; else DataError."""
    paths = tuple(Path(file).expanduser() for file in files)
    for path in paths:
        if path.is_dir():
            raise DataError(f"{at(path)}: is a folder; name the files in it, e.g. {path}/*.jsonl in a shell")
        if not path.is_file():
            raise DataError(f"{at(path)}: no such file; legal: a file, or {corpus.NAME!r} for the bundled corpus")
        if path.stat().st_size == 0:
            raise DataError(f"{at(path)}: is empty")
    return paths


def kind_of(files: Sequence[Path], asked: str) -> str:
    """`text`, `jsonl` or `tokens`: what was asked for or, with `auto`, what the names end with."""
    if asked != "auto":
        return asked
    kinds = {}
    for file in files:
        if file.suffix not in KINDS:
            raise DataError(
                f"{at(file)}: what kind of file is this? Set source_format to text, jsonl or tokens, "
                f"or end its name with one of {', '.join(KINDS)}"
            )
        kinds[KINDS[file.suffix]] = file
    if len(kinds) > 1:
        raise DataError(f"source mixes kinds of file: {', '.join(f'{file} is {kind}' for kind, file in kinds.items())}")
    return next(iter(kinds))


def hold_out(documents: Documents, fraction: float) -> tuple[Documents, Documents | None]:
    """(training, held-out) documents. Of several, those with the smallest content hashes; of one, its last part.

    Choosing by content keeps the choice when rows are reordered, and keeps equal documents on one side.
    Raises DataError when there is nothing left for one of the two.
    """
    if fraction == 0:
        return documents, None
    hashes, sizes, text = [], [], ""
    for document in documents:
        text = document.text
        raw = text.encode()
        hashes.append(int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big"))
        sizes.append(len(raw))
    if len(hashes) > 1:
        mask = smallest_hashes(np.array(hashes, np.uint64), np.array(sizes), fraction, documents.name)
        return Chosen(documents, ~mask), Chosen(documents, mask)
    wish = int(len(text) * (1 - fraction))
    cut = text.rfind("\n", 0, wish) + 1 or wish
    if not text[:cut].strip() or not text[cut:].strip():
        raise DataError(
            f"{documents.name}: too short to hold out {fraction:.0%}; set heldout_fraction=0 or name a file"
        )
    return Part(documents, 0, cut), Part(documents, cut, len(text))


def smallest_hashes(hashes: np.ndarray, sizes: np.ndarray, fraction: float, name: str) -> np.ndarray:
    """Mask of the documents to hold out: smallest hashes first, until they make `fraction` of the bytes."""
    order = np.argsort(hashes, kind="stable")
    reached = np.cumsum(sizes[order]) >= fraction * sizes.sum()
    mask = hashes <= hashes[order[int(np.argmax(reached))]]  # with all their equals
    if mask.all():
        raise DataError(f"{name}: holding out {fraction:.0%} leaves no document to train on; set heldout_fraction=0")
    return mask


def _name(files: tuple[Path, ...]) -> str:
    if files[0].parent == corpus.path("train").parent:
        return corpus.NAME
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def _lines(file: Path) -> Iterator[bytes]:
    """Lines with their ends as they are; a byte-order mark at the start is not text."""
    with file.open("rb") as opened:
        for number, line in enumerate(opened):
            yield line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line


def _decoded(raw: bytes, file: Path, row: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        row += raw.count(b"\n", 0, error.start)
        raise DataError(f"{at(file, row)}: not UTF-8 (byte 0x{raw[error.start]:02x})") from None
