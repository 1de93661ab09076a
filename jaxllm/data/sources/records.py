"""Record files: JSON lines, parquet, Arrow and webdataset archives. A record is an object with its text in a field.

A record is:
- in JSONL: a row with an object. Blank rows are skipped.
- in parquet and Arrow (IPC files, IPC streams, output of `datasets.Dataset.save_to_disk`): a row of the table.
- in webdataset: the files of an archive that share a name up to its first dot: the fields of NAME.json, and NAME.txt as
  "text". Files with other suffixes are skipped.
"""

import dataclasses
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import IO, Any, cast

from jaxllm.data.sources.documents import BadRecords, Document, Documents, conversation_json
from jaxllm.data.sources.remote_files import (
    COMPRESSED,
    File,
    content_sha256,
    decode_utf8,
    display_name,
    read_chunks,
    read_lines,
)
from jaxllm.files import DataError, at, digest

Row = tuple[int, Any]
"""(number of the record from 1, the record or the DataError that it caused)."""

_ROWS = 1024  # table rows in memory at a time


@dataclass(frozen=True)
class RecordFiles(Documents):
    """Documents from record files of one format: "jsonl", "parquet", "arrow" or "webdataset".

    field: the field with the text, or with `chat` the messages; a conversation's tools are in the field "tools".
    """

    files: tuple[File, ...]
    kind: str
    field: str = "text"
    chat: bool = False
    bad: BadRecords = dataclasses.field(default_factory=BadRecords, compare=False)

    @property
    def name(self) -> str:
        """Name in messages."""
        return display_name(self.files)

    @cached_property
    def content_hash(self) -> str:
        """Hash of the files' bytes and of the settings that determine the documents."""
        more = [["chat"]] * self.chat + [["skip"]] * self.bad.skip
        return digest([self.kind, self.field, [content_sha256(file) for file in self.files], *more])

    def __iter__(self) -> Iterator[Document]:
        self.bad.clear()
        read = self._conversation if self.chat else self._text
        for file in self.files:
            found = False
            for row, record in self._records(file, [self.field, "tools"] if self.chat else [self.field]):
                try:
                    text = read(record, file, row)
                except DataError as error:
                    self.bad.report(error)
                    continue
                if text.strip():
                    found = True
                    yield Document(text, file, row)
            if not found:
                raise DataError(f"{at(file)}: contains no text")

    def records(self, fields: Sequence[str]) -> Iterator[tuple[File, int, dict[str, Any]]]:
        """(file, row, record) of all files; from tables only the columns `fields` are read, the first is required.

        Raises DataError for a file without records.
        """
        self.bad.clear()
        for file in self.files:
            found = False
            for row, record in self._records(file, list(fields)):
                found = True
                yield file, row, record
            if not found:
                raise DataError(f"{at(file)}: contains no records")

    def _records(self, file: File, columns: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        for row, record in ROW_READERS[self.kind](file, columns):
            if isinstance(record, DataError):
                self.bad.report(record)
            else:
                yield row, record

    def _field(self, record: dict[str, Any], file: File, row: int) -> Any:
        if self.field in record:
            return record[self.field]
        close = get_close_matches(self.field, list(record), n=1)
        hint = f"; did you mean text_field={close[0]!r}?" if close else ""
        raise DataError(f"{at(file, row)}: no field {self.field!r}, only {sorted(record)}{hint}")

    def _text(self, record: dict[str, Any], file: File, row: int) -> str:
        text = self._field(record, file, row)
        if not isinstance(text, str):
            raise DataError(f"{at(file, row)}: {self.field!r} is a {type(text).__name__}; it must be text")
        return check_unicode(text, self.field, file, row)

    def _conversation(self, record: dict[str, Any], file: File, row: int) -> str:
        messages = self._field(record, file, row)
        check_messages(messages, self.field, file, row)
        tools = record.get("tools")
        if isinstance(tools, str):  # tables store tools as JSON, because each tool has different fields
            try:
                tools = json.loads(tools)
            except ValueError:
                raise DataError(f"{at(file, row)}: 'tools' is text that is not JSON") from None
        if tools is not None and not isinstance(tools, list):
            raise DataError(f"{at(file, row)}: 'tools' is a {type(tools).__name__}; it must be a list")
        return check_unicode(conversation_json(messages, tools or None), self.field, file, row)


def jsonl_files(files: tuple[File, ...], field: str = "text") -> RecordFiles:
    """JSONL source: one JSON object per row, with its text in `field`."""
    return RecordFiles(files, "jsonl", field)


def check_messages(messages: Any, name: str, file: File, row: int) -> None:
    """Raises DataError unless `messages` is a list of objects, each with a role and with content or tool calls."""
    if not isinstance(messages, list) or not messages:
        what = "an empty list" if messages == [] else f"a {type(messages).__name__}"
        raise DataError(f"{at(file, row)}: {name!r} is {what}; it must be a list of messages")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{at(file, row)}: message {number} is not an object with a 'role'")
        if message.get("content") is None and not message.get("tool_calls"):
            raise DataError(f"{at(file, row)}: message {number} has neither 'content' nor 'tool_calls'")


def check_unicode(text: str, name: str, file: File, row: int) -> str:
    """Returns the text. Raises DataError if it is not valid Unicode (a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{at(file, row)}: {name!r} is not valid Unicode (a lone surrogate)") from None
    return text


def jsonl_rows(file: File, columns: list[str]) -> Iterator[Row]:
    """Rows of a JSONL file; `columns` only names the required field in messages, because a row is parsed whole."""
    for row, line in enumerate(read_lines(file), start=1):
        if line.strip():
            yield row, parse_json_row(line, columns[0], file, row)


def parse_json_row(line: bytes, column: str, file: File, row: int) -> Any:
    """Record of a line of a JSONL file, or the DataError that it causes; `column` is named in messages."""
    try:
        record = json.loads(decode_utf8(line.rstrip(), file, row))
    except json.JSONDecodeError as error:
        return DataError(f"{at(file, row)}: not valid JSON ({error.msg} at column {error.colno})")
    except RecursionError:
        return DataError(f"{at(file, row)}: JSON nested too deep")
    except DataError as error:
        return error
    if isinstance(record, dict):
        return record
    return DataError(f"{at(file, row)}: a {type(record).__name__}; a row must be an object with {column!r}")


def parquet_rows(file: File, columns: list[str]) -> Iterator[Row]:
    """Rows of a parquet file; only `columns` are read."""
    arrow = _pyarrow(file)
    from pyarrow import parquet

    def batches(opened: Any) -> Iterator[Any]:
        table = parquet.ParquetFile(opened)
        names = table.schema_arrow.names
        _check_column(columns[0], names, file)
        return table.iter_batches(batch_size=_ROWS, columns=[name for name in columns if name in names])

    yield from _table_rows(file, batches, arrow)


def arrow_rows(file: File, columns: list[str]) -> Iterator[Row]:
    """Rows of an Arrow IPC file or stream; only `columns` are read."""
    arrow = _pyarrow(file)
    from pyarrow import ipc

    def batches(opened: Any) -> Iterator[Any]:
        magic = opened.read(6)
        opened.seek(0)
        if magic == b"ARROW1":
            reader = ipc.open_file(opened)
            pieces: Any = (reader.get_batch(n) for n in range(reader.num_record_batches))
        else:
            reader = pieces = ipc.open_stream(opened)
        _check_column(columns[0], reader.schema.names, file)
        for piece in pieces:
            yield piece.select([name for name in columns if name in piece.schema.names])

    yield from _table_rows(file, batches, arrow)


def _table_rows(file: File, batches: Callable[[Any], Iterator[Any]], arrow: Any) -> Iterator[Row]:
    row = 0
    with file.open("rb") as opened:
        try:
            for batch in batches(opened):
                for start in range(0, batch.num_rows, _ROWS):
                    for record in batch.slice(start, _ROWS).to_pylist():
                        row += 1
                        yield row, {name: _without_nulls(value) for name, value in record.items()}
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"{at(file, row + 1)}: damaged, truncated, or not of this format ({why})") from None


def _without_nulls(value: Any) -> Any:
    """Removes null fields of nested objects: tables give every object every field, null if it has no value."""
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _check_column(name: str, names: list[str], file: File) -> None:
    if name not in names:
        close = get_close_matches(name, names, n=1)
        hint = f"; did you mean text_field={close[0]!r}?" if close else ""
        raise DataError(f"{at(file)}: no column {name!r}, only {sorted(names)}{hint}")


def _pyarrow(file: File) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            f"{at(file)}: parquet and Arrow files need the package pyarrow: pip install 'jaxllm[data]'"
        ) from None
    return pyarrow


class _Stream:
    """File object over the decompressed bytes of a file, for tarfile to read."""

    def __init__(self, file: File):
        self._chunks, self._held = read_chunks(file), b""

    def read(self, size: int) -> bytes:
        while len(self._held) < size and (chunk := next(self._chunks, b"")):
            self._held += chunk
        out, self._held = self._held[:size], self._held[size:]
        return out


def webdataset_rows(file: File, columns: list[str]) -> Iterator[Row]:
    """Samples of a webdataset archive, streamed; `columns` is ignored."""
    sample, key, row = {}, None, 0
    seen: set[str] = set()
    source = cast(IO[bytes], _Stream(file))
    try:
        with tarfile.open(fileobj=source, mode="r|" if file.suffix in COMPRESSED else "r|*") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                folder, _, base = member.name.rpartition("/")
                stem, _, ending = base.partition(".")
                name = f"{folder}/{stem}" if folder else stem
                if name != key:
                    if key is not None:
                        yield row, sample
                    if name in seen:
                        raise DataError(f"{at(file, row + 1)}: the files of sample {name!r} are not adjacent")
                    seen.add(name)
                    sample, key, row = {}, name, row + 1
                content = cast(IO[bytes], archive.extractfile(member)).read() if ending in ("txt", "json") else b""
                if isinstance(sample, dict):
                    sample = _with_member(sample, ending, content, file, row)
        if key is not None:
            yield row, sample
    except tarfile.TarError as error:
        raise DataError(f"{at(file, row + 1)}: damaged or truncated archive ({error})") from None


def _with_member(sample: dict[str, Any], ending: str, content: bytes, file: File, row: int) -> Any:
    """Sample with one more file of the archive; a DataError if that file cannot be used."""
    try:
        if ending == "txt":
            return sample | {"text": decode_utf8(content, file, row)}
        if ending == "json":
            fields = json.loads(decode_utf8(content, file, row))
            if not isinstance(fields, dict):
                return DataError(f"{at(file, row)}: the .json is a {type(fields).__name__}; it must be an object")
            return fields | sample
    except json.JSONDecodeError as error:
        return DataError(f"{at(file, row)}: not valid JSON ({error.msg} at column {error.colno})")
    except DataError:
        return DataError(f"{at(file, row)}: not UTF-8")
    return sample


ROW_READERS: dict[str, Callable[[File, list[str]], Iterator[Row]]] = {
    "jsonl": jsonl_rows,
    "parquet": parquet_rows,
    "arrow": arrow_rows,
    "webdataset": webdataset_rows,
}
