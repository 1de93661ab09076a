"""Bad input files: an error that names file and row, or the row is skipped and counted on request."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from pyarrow import ipc, parquet

from jaxllm.data import CursorMismatch, DataConfig, DataError, load_dataset
from tests.proofs.harness import proof

Rows = list[Any]


def text_of(rng: random.Random) -> str:
    return " ".join(rng.choice(["sun", "mond", "étoile", "звезда", "x"]) for _ in range(rng.randint(1, 12)))


def write_jsonl(path: Path, rows: Rows) -> None:
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))


def write_packed(path: Path, rows: Rows) -> None:
    plain = path.with_suffix(".plain")
    write_jsonl(plain, rows)
    raw = plain.read_bytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else zstandard.compress(raw))
    plain.unlink()


def write_parquet(path: Path, rows: Rows) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)


def write_arrow(path: Path, rows: Rows) -> None:
    table = pyarrow.Table.from_pylist(rows)
    opened = ipc.new_stream(str(path), table.schema) if len(rows) % 2 else ipc.new_file(str(path), table.schema)
    with opened as writer:
        writer.write_table(table, max_chunksize=5)


def write_tar(path: Path, rows: Rows) -> None:
    with tarfile.open(path, "w") as archive:
        for number, row in enumerate(rows):
            raw = row if isinstance(row, bytes) else json.dumps(row).encode()
            member = tarfile.TarInfo(f"part/{number:05}.json")
            member.size = len(raw)
            archive.addfile(member, io.BytesIO(raw))


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    ".jsonl": write_jsonl,
    ".jsonl.gz": write_packed,
    ".jsonl.zst": write_packed,
    ".parquet": write_parquet,
    ".arrow": write_arrow,
    ".tar": write_tar,
}
BROKEN_JSON = [b'{"text": "cut', b"{'text': 'x'}", b"nonsense", b'{"text": "\xff"}', b'{"text": "a"} {"text": "b"}']
WRONG_RECORD = [{"txet": "x"}, {"text": 5}, {"text": ["x"]}, {"text": None}]


def opened(files: list[Path], folder: Path, **settings: Any) -> Any:
    return load_dataset(
        DataConfig(
            source=tuple(map(str, files)),
            tokenizer="byte",
            seq_len=16,
            batch_size=2,
            heldout_fraction=0.0,
            cache_dir=str(folder / "cache"),
            **settings,
        )
    )


@proof("data", count=120, sample=4)
def bad_rows(seed: int) -> None:
    """A row that is no record, or one of another schema, in any format: named by file and row; left out and counted
    when that is asked for, with exactly the others' text."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ending = rng.choice(list(WRITERS))
        shards = [[{"text": text_of(rng)} for _ in range(rng.randint(3, 30))] for _ in range(rng.randint(1, 3))]
        bad, row = rng.randrange(len(shards)), rng.randrange(3)
        if ending in (".parquet", ".arrow"):
            wrong: Any = {"text": None}
        else:
            wrong = rng.choice([*BROKEN_JSON, *WRONG_RECORD])
        good = [one["text"] for n, shard in enumerate(shards) for i, one in enumerate(shard) if (n, i) != (bad, row)]
        shards[bad][row] = wrong
        files = [folder / f"shard{n}{ending}" for n in range(len(shards))]
        for file, rows in zip(files, shards, strict=True):
            WRITERS[ending](file, rows)
        with pytest.raises(DataError, match=rf"shard{bad}{ending}:{row + 1}: "):
            opened(files, folder)
        dataset = opened(files, folder, skip_bad_records=True)
        assert [dataset.tokenizer.decode(one) for one in dataset.train.documents] == good
        assert "1 bad records skipped, the first: " in dataset.summary
        assert f"shard{bad}{ending}:{row + 1}: " in dataset.summary
        again = opened(files, folder, skip_bad_records=True)  # from the cache, it still says so
        assert again.summary == dataset.summary
        with pytest.raises(DataError, match=rf"shard{bad}{ending}:{row + 1}: "):
            opened(files, folder)  # and the cache of what was left out is not taken for the whole


@proof("data", count=120, sample=4)
def damaged_files(seed: int) -> None:
    """A file that is cut, empty, without text, of another kind or with other columns: an error that names it, also
    when bad records are skipped, for a part of a file is not a record."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ending = rng.choice(list(WRITERS))
        rows = [{"text": text_of(rng), "other": 1} for _ in range(rng.randint(8, 40))]
        first, second = folder / f"a{ending}", folder / f"b{ending}"
        WRITERS[ending](first, rows)
        damage = rng.choice(["cut", "empty", "no text", "other kind", "other columns"])
        if damage == "cut":
            WRITERS[ending](second, rows)
            raw = second.read_bytes()
            # Past the header, before the end: of lines and archives the middle of a record.
            place = raw.index(b'"text"', len(raw) // 3) + 3 if ending in (".jsonl", ".tar") else len(raw) * 2 // 3
            second.write_bytes(raw[:place])
        elif damage == "empty":
            second.write_bytes(b"")
        elif damage == "no text":
            WRITERS[ending](second, [{"text": " ", "other": 1}])
        elif damage == "other kind":
            second.write_bytes(b"\x00\x01 this is none of them \xff" * 40)
        else:
            WRITERS[ending](second, [{"body": text_of(rng), "other": 1}] * 3)
        skip = ending not in (".jsonl",) and rng.random() < 0.5
        with pytest.raises(DataError, match=rf"b{ending}"):
            opened([first, second], folder, skip_bad_records=skip)


@proof("data", count=60, sample=2)
def changed_between_resumes(seed: int) -> None:
    """A source that has shrunk, grown or changed since the checkpoint is refused; the message names the file and the
    documents it had and has. A moved or repacked source resumes."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shards = [[{"text": text_of(rng)} for _ in range(rng.randint(4, 20))] for _ in range(2)]
        files = [folder / f"shard{n}.jsonl" for n in range(2)]
        for file, rows in zip(files, shards, strict=True):
            write_jsonl(file, rows)
        saved = json.loads(json.dumps(opened(files, folder).train.cursor(7)))
        bad, count = (
            rng.randrange(2),
            len(shards[0]),
        )
        count = len(shards[bad])
        how = rng.choice(["shrunk", "grown", "gone", "changed", "moved"])
        if how == "moved":
            moved = [folder / f"other{n}.jsonl.zst" for n in range(2)]
            for file, rows in zip(moved, shards, strict=True):
                write_packed(file, rows)
            assert opened(moved, folder).train.check_cursor(saved) == 7
            return
        if how == "shrunk":
            shards[bad].pop(rng.randrange(count))
        elif how == "grown":
            shards[bad].append({"text": "one more"})
        elif how == "changed":
            shards[bad][rng.randrange(count)] = {"text": "something else entirely"}
        write_jsonl(files[bad], shards[bad])
        left = [file for n, file in enumerate(files) if how != "gone" or n != bad]
        with pytest.raises(CursorMismatch) as error:
            opened(left, folder).train.check_cursor(saved)
        said = str(error.value)
        assert "content was " in said
        if how == "gone":
            assert f"shard{bad}.jsonl:{count}: it had {count} documents up to this row, and is not read now" in said
        elif how != "changed":
            now = len(shards[bad])
            assert f"shard{bad}.jsonl:{count}: it had {count} documents up to this row, now {now} up to" in said
