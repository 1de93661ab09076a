"""Plain-text source: documents from text files (`.txt`, `.md`).

A line with only the separator (default `<|endoftext|>`) ends a document, so a file without one is one document.
Separator "" is the blank-line rule: one or more blank lines end a document. With None each file is one document.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from jaxllm.data import corpus
from jaxllm.data.sources.documents import BadRecords, Document, Documents
from jaxllm.data.sources.remote_files import File, content_sha256, decode_utf8, display_name, read_chunks, read_lines
from jaxllm.files import DataError, at, digest, file_sha256

SEPARATOR = corpus.SEPARATOR


@dataclass(frozen=True)
class TextFiles(Documents):
    """Documents from plain-text files in UTF-8. The module's docstring explains `separator`."""

    files: tuple[File, ...]
    separator: str | None = SEPARATOR
    bad: BadRecords = field(default_factory=BadRecords, compare=False)

    @property
    def name(self) -> str:
        """Name in messages."""
        return display_name(self.files)

    @cached_property
    def content_hash(self) -> str:
        """Hash of the files' bytes and of the settings that determine the documents."""
        skips = ["skip"] if self.bad.skip else []
        return digest(["text", self.separator, [content_sha256(file) for file in self.files], *skips])

    def __iter__(self) -> Iterator[Document]:
        self.bad.clear()
        for file in self.files:
            found = False
            for row, raw in self.pieces(file):
                try:
                    text = decode_utf8(raw, file, row)
                except DataError as error:
                    self.bad.report(error)
                    continue
                if text.strip():
                    found = True
                    yield Document(text, file, row)
            if not found:
                raise DataError(f"{at(file)}: contains no text")

    def pieces(self, file: File) -> Iterator[tuple[int, bytes]]:
        """(first row, bytes) of each document of a file."""
        if self.separator is None:
            yield 1, b"".join(read_chunks(file)).removeprefix(b"\xef\xbb\xbf")
            return
        mark, held, first = self.separator.encode(), [], 1
        for row, line in enumerate(read_lines(file), start=1):
            if line.strip() != mark:
                held.append(line)
                continue
            if held:
                yield first, b"".join(held)
            held, first = [], row + 1
        if held:
            yield first, b"".join(held)


def bundled(split: str) -> Documents:
    """Bundled corpus, split `train` or `heldout`. Raises DataError if the file is missing or altered."""
    file = corpus.path(split)
    if not file.is_file() or file_sha256(file) != corpus.SHA256[split]:
        raise DataError(f"{at(file)}: the bundled corpus is missing or altered (sha256); install jaxllm again")
    return TextFiles((file,), corpus.SEPARATOR)
