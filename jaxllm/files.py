"""File helpers: errors that name file and row, content hashes, atomic and durable writes, and the cache folder."""

import contextlib
import fcntl
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
    """Data that cannot be used; the message names the file, and the row where there is one."""


def at(file: object, row: int | None = None) -> str:
    """`file` or `file:row`, the beginning of every data error. Rows count from 1."""
    return f"{file}" if row is None else f"{file}:{row}"


def cache_root(cache_dir: str) -> Path:
    """Cache folder: `cache_dir`, else `$JAXLLM_CACHE`, else `~/.cache/jaxllm`. All its contents can be rebuilt."""
    chosen = cache_dir or os.environ.get("JAXLLM_CACHE") or "~/.cache/jaxllm"
    return Path(chosen).expanduser()


def digest(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form, as hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's contents, as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Waits until a file's contents, or a directory's entries, are on disk, where a power cut leaves them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path: Path) -> None:
    """Creates a directory and its parents, and waits until they are on disk; nothing if it exists."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in new:
        sync(folder.parent)


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Atomic write: context manager with a temporary file that replaces `path` only if the block succeeds.

    Readers see the old file or the whole new one, never a part, after a power cut too; processes may race to write the
    same path.
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
def exclusive(directory: Path) -> Iterator[None]:
    """File lock: of all threads and processes that name the same directory, one at a time runs its block.

    The locked file in it stays. Where it cannot be made or locked, as in a read-only directory and on some network
    mounts, blocks run unguarded.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            fcntl.flock(stack.enter_context((directory / ".lock").open("a")), fcntl.LOCK_EX)
        yield


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Atomic creation of a directory: a temporary one, renamed to `path` only if the block succeeds, else deleted.

    Its contents are on disk before it has its name, and the name is when this returns: it survives a power cut as a
    whole.

    Raises:
        FileExistsError: `path` exists.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists; choose another name, or move it away")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for inner in (*temporary.rglob("*"), temporary):
            sync(inner)
        temporary.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def release(arrays: Iterable[Any]) -> None:
    """Releases the resident pages of memory-mapped files; they are read from disk again when needed.

    Otherwise every byte of a mapped file that was ever read counts as memory of this process.
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
    """Writes a JSON value to a file, atomically."""
    with atomic(path) as file:
        file.write((json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """JSON value in a file.

    Raises:
        DataError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{at(path)}: no such file") from None
    except ValueError as error:
        raise DataError(f"{at(path)}: not valid JSON ({error})") from None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON lines file; empty if there is no file; a last line that a kill cut short is left out."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows
