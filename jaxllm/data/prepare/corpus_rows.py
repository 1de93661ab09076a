"""Rows of a corpus file: the text of each row, or why it has none. No row is left out.

WARC files (`.warc`, `.wet`) have a document for each record of text: of WET files the extracted text; of WARC files
responses of plain text. HTML needs extraction first and is dropped by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.data.prepare.corpus_config import CorpusSource
from jaxllm.data.sources.records import ROW_READERS, check_unicode, parse_json_row
from jaxllm.data.sources.remote_files import KINDS, RemoteFile, decode_utf8, plain_suffix, read_chunks
from jaxllm.data.sources.text_files import TextFiles
from jaxllm.files import DataError, at

WEB_ARCHIVES = {".warc": "warc", ".wet": "warc"}
MOST_LINE_BYTES = 64 << 20
"""Bytes of a line of JSONL from which on it is dropped without being held in memory."""


class CorpusRow(NamedTuple):
    """Row of a corpus file: its number from 1, and its text; or the rule that drops it, and an explanation."""

    row: int
    text: str
    rule: str = ""
    why: str = ""


def corpus_format(name: str, source: CorpusSource) -> str:
    """Format of a file of a source. Raises DataError for a suffix of no known format."""
    if source.source_format != "auto":
        return source.source_format
    legal = {suffix: kind for suffix, kind in KINDS.items() if kind not in ("tokens", "corpus")} | WEB_ARCHIVES
    suffix = plain_suffix(RemoteFile(name))
    if suffix not in legal:
        raise DataError(f"{at(name)}: the suffix names no known format; legal: {', '.join(legal)} (and .gz, .zst), or "
                        f"set source_format of source {source.name!r}")  # fmt: skip
    return legal[suffix]


def read_rows_of(path: Path, name: str, kind: str, source: CorpusSource, most: int) -> Iterator[CorpusRow]:
    """Rows of a file, in order.

    Args:
        path: file to read, maybe a copy. name: its name in messages.
        most: characters from which on a document is too long.

    Raises DataError for a file that is damaged or of another format.
    """
    try:
        for one in READERS.get(kind, _records(kind))(path, source):
            if one.rule:
                yield one._replace(why=one.why.replace(str(path), name))
            elif not one.text.strip():
                yield one._replace(rule="no_text", why=f"{at(name, one.row)}: no text")
            elif len(one.text) > most:
                yield CorpusRow(one.row, "", "too_long", f"{at(name, one.row)}: {len(one.text):,} characters")
            else:
                yield one
    except DataError as error:
        raise DataError(str(error).replace(str(path), name)) from None


def _field(record: Any, source: CorpusSource, path: Path, row: int) -> CorpusRow:
    if isinstance(record, DataError):
        return CorpusRow(row, "", "unreadable", str(record))
    text = record.get(source.text_field)
    if text is None:
        listed = ", ".join(sorted(record))[:200]
        return CorpusRow(row, "", "no_text", f"{at(path, row)}: no field {source.text_field!r}, only {listed}")
    if not isinstance(text, str):
        return CorpusRow(row, "", "unreadable", f"{at(path, row)}: {source.text_field!r} is a {type(text).__name__}")
    try:
        return CorpusRow(row, check_unicode(text, source.text_field, path, row))
    except DataError as error:
        return CorpusRow(row, "", "unreadable", str(error))


def _jsonl(path: Path, source: CorpusSource) -> Iterator[CorpusRow]:
    for row, line in enumerate(bounded_lines(read_chunks(path), MOST_LINE_BYTES), start=1):
        if line is None:
            yield CorpusRow(row, "", "too_long", f"{at(path, row)}: a line of more than {MOST_LINE_BYTES:,} bytes")
        elif not line.strip():
            yield CorpusRow(row, "", "no_text", f"{at(path, row)}: a blank line")
        else:
            yield _field(parse_json_row(line, source.text_field, path, row), source, path, row)


def bounded_lines(chunks: Iterator[bytes], most: int) -> Iterator[bytes | None]:
    """Lines of bytes that come in chunks; None for a line of more than `most` bytes, which is never held whole.

    A byte-order mark at the start is removed.
    """
    held: list[bytes] = []
    size, first = 0, True
    for chunk in chunks:
        if first:
            chunk, first = chunk.removeprefix(b"\xef\xbb\xbf"), False
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            yield b"".join([*held, piece]) if size + len(piece) <= most else None
            held, size = [], 0
        size += len(rest)
        if size <= most:
            held.append(rest)
        else:
            held = []
    if size:
        yield b"".join(held) if size <= most else None


def _records(kind: str) -> Callable[[Path, CorpusSource], Iterator[CorpusRow]]:
    def read(path: Path, source: CorpusSource) -> Iterator[CorpusRow]:
        for row, record in ROW_READERS[kind](path, [source.text_field]):
            yield _field(record, source, path, row)

    return read


def _text(path: Path, source: CorpusSource) -> Iterator[CorpusRow]:
    for row, raw in TextFiles((path,), source.separator).pieces(path):
        try:
            yield CorpusRow(row, decode_utf8(raw, path, row))
        except DataError as error:
            yield CorpusRow(row, "", "unreadable", str(error))


def _web_archive(path: Path, source: CorpusSource) -> Iterator[CorpusRow]:
    try:
        from warcio.archiveiterator import ArchiveIterator
        from warcio.exceptions import ArchiveLoadFailed
    except ImportError:
        raise DataError(f"{at(path)}: web archives need the package warcio: pip install 'jaxllm[corpus]'") from None
    row = 0
    with path.open("rb") as file:
        try:
            for record in ArchiveIterator(file):
                row += 1
                kind = record.rec_type
                raw = record.content_stream().read()
                if kind not in ("conversion", "response", "resource"):
                    continue  # a request, or a note about the crawl: no document
                length = record.rec_headers.get_header("Content-Length")
                if kind == "conversion" and length is not None and len(raw) != int(length):
                    raise DataError(f"{at(path, row)}: the archive is truncated within this record")
                headers = record.http_headers if kind == "response" and record.http_headers else record.rec_headers
                mime = (headers.get_header("Content-Type") or "text/plain").split(";")[0].strip().lower()
                if mime != "text/plain":
                    yield CorpusRow(row, "", "not_plain_text", f"{at(path, row)}: {mime}; extract its text first (WET)")
                    continue
                try:
                    yield CorpusRow(row, decode_utf8(raw, path, row))
                except DataError:
                    yield CorpusRow(row, "", "unreadable", f"{at(path, row)}: not UTF-8")
        except (ArchiveLoadFailed, EOFError, OSError, AttributeError) as error:  # the last: a record without a URI
            raise DataError(f"{at(path, row + 1)}: damaged or truncated web archive ({error})") from None


READERS: dict[str, Callable[[Path, CorpusSource], Iterator[CorpusRow]]] = {
    "jsonl": _jsonl,
    "text": _text,
    "warc": _web_archive,
}
