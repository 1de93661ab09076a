"""Documents in a fixed order, which of them are held out, and what happens to those that cannot be used.

Documents with no text carry nothing and are passed over. Everything else that is not a document is an error that names
file and row, rows counted from 1, unless bad records are to be skipped; then they are counted and listed.
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
    """A text and where it begins (`row`: line of a text file, row of a table, sample of an archive; from 1).

    Of a conversation the text is JSON: {"messages": [...], "tools": [...]}, see `jaxllm.data.chat_encoding`.
    """

    text: str
    file: File
    row: int


class BadRecords:
    """What cannot be used: an error at once, or with `skip` counted and listed.

    count: of the last time the documents were read through. listed: the first hundred messages.
    """

    LISTED = 100

    def __init__(self, skip: bool = False):
        self.skip = skip
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self.listed: list[str] = []

    def report(self, error: DataError) -> None:
        """Raises `error`, or notes it."""
        if not self.skip:
            raise error
        self.count += 1
        if len(self.listed) < self.LISTED:
            self.listed.append(str(error))


class Documents(ABC):
    """Documents in a fixed order, read anew by each iteration and never all in memory."""

    name: str
    bad: BadRecords

    @abstractmethod
    def __iter__(self) -> Iterator[Document]: ...

    @property
    @abstractmethod
    def content_hash(self) -> str:
        """Changes when any document does."""


@dataclass(frozen=True, eq=False)
class SelectedDocuments(Documents):
    """The documents of `parent` at the places where `mask` is true."""

    parent: Documents
    mask: np.ndarray

    @property
    def name(self) -> str:
        return self.parent.name

    @property
    def bad(self) -> BadRecords:
        return self.parent.bad

    @cached_property
    def content_hash(self) -> str:
        return digest(["chosen", self.parent.content_hash, hashlib.sha256(self.mask.tobytes()).hexdigest()])

    def __iter__(self) -> Iterator[Document]:
        return (document for document, wanted in zip(self.parent, self.mask, strict=True) if wanted)


@dataclass(frozen=True)
class DocumentSlice(Documents):
    """Characters `begin` to `end` of a single document."""

    parent: Documents
    begin: int
    end: int

    @property
    def name(self) -> str:
        return self.parent.name

    @property
    def bad(self) -> BadRecords:
        return self.parent.bad

    @cached_property
    def content_hash(self) -> str:
        return digest(["part", self.parent.content_hash, self.begin, self.end])

    def __iter__(self) -> Iterator[Document]:
        for document in self.parent:
            row = document.row + document.text.count("\n", 0, self.begin)
            yield Document(document.text[self.begin : self.end], document.file, row)


def conversation_json(messages: Any, tools: Any = None) -> str:
    """The text of a document that is a conversation."""
    record = {"messages": messages} if tools is None else {"messages": messages, "tools": tools}
    return json.dumps(record, ensure_ascii=False)


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
    """Mask of the documents to hold out: smallest hashes first, until they make `fraction` of the bytes."""
    order = np.argsort(hashes, kind="stable")
    reached = np.cumsum(sizes[order]) >= fraction * sizes.sum()
    mask = hashes <= hashes[order[int(np.argmax(reached))]]  # with all their equals
    if mask.all():
        raise DataError(f"{name}: holding out {fraction:.0%} leaves no document to train on; set heldout_fraction=0")
    return mask
