"""Document store: the texts of one input file that the rules kept, in an Arrow file that is read by position.

Batches of `BATCH` documents are compressed apart, so a document is read without those of other batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

BATCH = 64
"""Documents of a batch."""


def write_documents(path: Path, documents: Iterable[tuple[int, str]]) -> None:
    """Writes (row, text) of documents to an Arrow file."""
    import pyarrow
    from pyarrow import ipc

    schema = pyarrow.schema([("row", pyarrow.int64()), ("text", pyarrow.large_string())])
    with ipc.new_file(str(path), schema, options=ipc.IpcWriteOptions(compression="zstd")) as writer:
        rows: list[int] = []
        texts: list[str] = []

        def flush() -> None:
            columns = [pyarrow.array(rows, pyarrow.int64()), pyarrow.array(texts, pyarrow.large_string())]
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))
            rows.clear()
            texts.clear()

        for row, text in documents:
            rows.append(row)
            texts.append(text)
            if len(rows) == BATCH:
                flush()
        if rows:
            flush()


class DocumentStore:
    """Documents of a file that `write_documents` wrote, by batch."""

    def __init__(self, path: Path):
        from pyarrow import ipc, memory_map

        self._reader: Any = ipc.open_file(memory_map(str(path)))

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for number in range(self._reader.num_record_batches):
            yield from self.batch(number)

    def batch(self, number: int) -> list[tuple[int, str]]:
        """(row, text) of each document of a batch; document d is in batch d // BATCH."""
        batch = self._reader.get_batch(number)
        return list(zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True))
