"""Files on disk: errors that name file and row, content hashes, atomic writes, and where the cache lives."""

import hashlib
import json
import mmap
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


class DataError(ValueError):
    """Data that cannot be used. The message names the file, and the row where there is one."""


def at(file: object, row: int | None = None) -> str:
    """`file` or `file:row`, as every data error begins. Rows count from 1."""
    return f"{file}" if row is None else f"{file}:{row}"


def cache_root(cache_dir: str) -> Path:
    """The cache folder: `cache_dir`, else `$JAXLLM_CACHE`, else `~/.cache/jaxllm`. Everything in it can be rebuilt."""
    chosen = cache_dir or os.environ.get("JAXLLM_CACHE") or "~/.cache/jaxllm"
    return Path(chosen).expanduser()


def digest(value: Any) -> str:
    """sha256 of a JSON value in its canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary neighbour of `path` for writing, and puts it in place only if the block succeeds.

    Readers see the old file or the whole new one, never a part, and processes may race to write the same path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A temporary neighbour to fill, which takes the name `path` only if the block succeeds; else nothing is left.

    Raises FileExistsError where there is something of that name.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists; choose another name, or move it away")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def release(arrays: Iterable[Any]) -> None:
    """Lets the system take back the pages of mapped files that were read; they are read again when they are needed.

    Otherwise every byte of a file that was ever looked at counts as memory of this process.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    for mapped in {id(m): m for array in arrays if (m := _map_under(array)) is not None}.values():
        mapped.madvise(mmap.MADV_DONTNEED)


def _map_under(array: Any) -> mmap.mmap | None:
    while array is not None and not isinstance(array, mmap.mmap):
        array = getattr(array, "base", None)
    return array


def write_json(path: Path, value: Any) -> None:
    with atomic(path) as file:
        file.write((json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Raises DataError when the file is missing or is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{at(path)}: no such file") from None
    except ValueError as error:
        raise DataError(f"{at(path)}: not valid JSON ({error})") from None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of JSON lines, none where there is no file; a last line cut short by a kill is left out."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows
