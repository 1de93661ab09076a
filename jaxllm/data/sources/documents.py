"""Documents: texts in a fixed order, their held-out split, and the handling of bad records.

Documents without text are skipped. Any other record that is not a document is an error that names the file and the row
(counted from 1), unless bad records are to be skipped; then they are counted and listed.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxllm.data.sources.remote_files import File
from jaxllm.files import DataError, digest


class Document(NamedTuple):
    """Text and its location (`row`: line of a text file, row of a table, sample of an archive; from 1).

    A conversation's text is JSON: {"messages": [...], "tools": [...]}, see `jaxllm.data.chat_encoding`.
    """

    text: str
    file: File
    row: int


class BadRecords:
    """Bad records: each is an error at once, or with `skip` is counted and listed.

    count: bad records of the last pass over the documents. listed: the first hundred messages.
    """

    LISTED = 100

    def __init__(self, skip: bool = False):
        self.skip = skip
        self.clear()

    def clear(self) -> None:
        """Forgets all records, before a new pass over the documents."""
        self.count = 0
        self.listed: list[str] = []

    def report(self, error: DataError) -> None:
        """Raises `error`, or with `skip` counts and lists it."""
        if not self.skip:
            raise error
        self.count += 1
        if len(self.listed) < self.LISTED:
            self.listed.append(str(error))


class Documents(ABC):
    """Documents in a fixed order: each iteration reads them again; they are never all in memory."""

    name: str
    bad: BadRecords

    @abstractmethod
    def __iter__(self) -> Iterator[Document]: ...

    @property
    @abstractmethod
    def content_hash(self) -> str:
        """Hash that changes when any document changes."""


@dataclass(frozen=True, eq=False)
class SelectedDocuments(Documents):
    """Documents of `parent` at the positions where `mask`, bool [documents], is True."""

    parent: Documents
    mask: np.ndarray

    @property
    def name(self) -> str:
        """Name in messages: that of the parent."""
        return self.parent.name

    @property
    def bad(self) -> BadRecords:
        """Bad records of the parent."""
        return self.parent.bad

    @cached_property
    def content_hash(self) -> str:
        """Hash of the parent's documents and of the mask."""
        return digest(["chosen", self.parent.content_hash, hashlib.sha256(self.mask.tobytes()).hexdigest()])

    def __iter__(self) -> Iterator[Document]:
        return (document for document, wanted in zip(self.parent, self.mask, strict=True) if wanted)


@dataclass(frozen=True)
class DocumentSlice(Documents):
    """Slice of a single document: its characters from `begin` up to `end`."""

    parent: Documents
    begin: int
    end: int

    @property
    def name(self) -> str:
        """Name in messages: that of the parent."""
        return self.parent.name

    @property
    def bad(self) -> BadRecords:
        """Bad records of the parent."""
        return self.parent.bad

    @cached_property
    def content_hash(self) -> str:
        """Hash of the parent's document and of the slice."""
        return digest(["part", self.parent.content_hash, self.begin, self.end])

    def __iter__(self) -> Iterator[Document]:
        for document in self.parent:
            row = document.row + document.text.count("\n", 0, self.begin)
            yield Document(document.text[self.begin : self.end], document.file, row)


def conversation_json(messages: Any, tools: Any = None) -> str:
    """Text of a document that is a conversation: JSON of its messages and tools."""
    record = {"messages": messages} if tools is None else {"messages": messages, "tools": tools}
    return json.dumps(record, ensure_ascii=False)


def hold_out(documents: Documents, fraction: float) -> tuple[Documents, Documents | None]:
    """Splits documents into (training, held-out); None is held out for a fraction of 0.

    Of several documents, those with the smallest content hashes are held out; of a single one, its last part. A choice
    by content does not change when rows are reordered, and it keeps equal documents on one side.
    Raises DataError if one of the two would be empty.
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
        mask = heldout_mask(np.array(hashes, np.uint64), np.array(sizes), fraction, documents.name)
        return SelectedDocuments(documents, ~mask), SelectedDocuments(documents, mask)
    wish = int(len(text) * (1 - fraction))
    cut = text.rfind("\n", 0, wish) + 1 or wish
    if not text[:cut].strip() or not text[cut:].strip() or text.startswith('{"messages": '):
        raise DataError(
            f"{documents.name}: too short to hold out {fraction:.0%}; set heldout_fraction=0 or name a file"
        )
    return DocumentSlice(documents, 0, cut), DocumentSlice(documents, cut, len(text))


def heldout_mask(hashes: np.ndarray, sizes: np.ndarray, fraction: float, name: str) -> np.ndarray:
    """Mask, bool [documents], of those to hold out: smallest hashes first, until they have `fraction` of the bytes."""
    order = np.argsort(hashes, kind="stable")
    reached = np.cumsum(sizes[order]) >= fraction * sizes.sum()
    mask = hashes <= hashes[order[int(np.argmax(reached))]]  # equal documents go together
    if mask.all():
        raise DataError(f"{name}: holding out {fraction:.0%} leaves no document to train on; set heldout_fraction=0")
    return mask
