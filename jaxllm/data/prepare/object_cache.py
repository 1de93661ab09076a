"""Object cache: local copies of files in object storage, fetched by ranges, with retries and checks.

A copy is complete and unaltered or absent: the size must be that of the listing, and an MD5 sum where the storage gives
one (an S3 ETag of a single part) must match. Credentials and endpoints are those of fsspec: environment variables such
as AWS_ACCESS_KEY_ID and FSSPEC_S3_ENDPOINT_URL.
"""

from __future__ import annotations

import glob
import hashlib
import random
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.data.sources.remote_files import File, RemoteFile
from jaxllm.files import DataError, at, atomic, digest

RANGE_BYTES = 8 << 20
"""Bytes of one range request."""
ATTEMPTS = 5
"""Attempts for each request."""
TIMEOUT_SECONDS = 120.0
"""Seconds after which a request has failed."""
WAIT_SECONDS = 0.5
"""Seconds before the second attempt; doubled each time, with jitter."""


@dataclass(frozen=True)
class StoredFile:
    """File of a listing: name (path or URL), size in bytes, and version (ETag, or time of change in nanoseconds)."""

    name: str
    size: int
    version: str

    @property
    def file(self) -> File:
        """File to open."""
        return RemoteFile(self.name) if "://" in self.name else Path(self.name)


def list_files(patterns: tuple[str, ...], where: str) -> list[StoredFile]:
    """Files of paths and URLs with * and ?: in the order of the patterns, the matches of one sorted.

    Raises DataError naming the pattern that matches nothing, a file listed twice, or a storage that refuses.
    """
    found: dict[str, StoredFile] = {}
    for pattern in patterns:
        listed = _list_remote(pattern) if "://" in pattern else _list_local(pattern)
        if not listed:
            raise DataError(f"{where}: {pattern} matches no file")
        for one in listed:
            if one.name in found:
                raise DataError(f"{where}: {one.name} is listed twice; name each file once")
            found[one.name] = one
    return list(found.values())


def _list_local(pattern: str) -> list[StoredFile]:
    names = sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(pattern) else [pattern]
    stats = [(name, Path(name).stat()) for name in names if Path(name).is_file()]
    return [StoredFile(name, stat.st_size, str(stat.st_mtime_ns)) for name, stat in stats]


def _list_remote(pattern: str) -> list[StoredFile]:
    system, path = _file_system(pattern)
    if glob.has_magic(path):
        from fsspec.utils import glob_translate

        # Not `glob`, for which a folder that cannot be listed is one without files.
        folder = path[: re.search(r"[*?\[]", path).start()].rpartition("/")[0]  # pyright: ignore[reportOptionalMemberAccess]
        listed = request(lambda: system.find(folder, detail=True), pattern)
        matches = re.compile(glob_translate(path)).match
        infos = [listed[name] for name in sorted(listed) if matches(name)]
    else:
        infos = [request(lambda: system.info(path), pattern)]
    found = []
    for info in infos:
        if info["type"] == "file":
            version = info.get("ETag") or info.get("etag") or info.get("LastModified") or info.get("mtime") or ""
            found.append(StoredFile(str(system.unstrip_protocol(info["name"])), info["size"], str(version)))
    return found


def _file_system(url: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise DataError(f"{url}: cannot be opened ({error}); pip install 'jaxllm[corpus]'") from None


def request(call: Any, name: str) -> Any:
    """Result of one call to a storage: tried again after errors that may pass, or when it takes too long.

    Raises DataError naming the file and the last error: at once for missing files and refused credentials.
    """
    why: BaseException | None = None
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(WAIT_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
        try:
            return _within(call, TIMEOUT_SECONDS)
        except FileNotFoundError:
            raise DataError(f"{name}: no such file") from None
        except PermissionError as error:
            raise DataError(f"{name}: access is refused ({error}); check the credentials of the storage") from None
        except Exception as error:  # every file system of fsspec raises different errors
            if "credentials" in f"{type(error).__name__} {error}".lower():
                raise DataError(f"{name}: no access ({error}); set the credentials of the storage") from None
            why = error
    raise DataError(f"{name}: failed {ATTEMPTS} times; the last error is {type(why).__name__}: {why}")


def _within(call: Any, seconds: float) -> Any:
    """Result of a call on a thread of its own, so that one that hangs can be left behind."""
    result: list[Any] = []
    error: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as found:
            error.append(found)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:g} s")
    if error:
        raise error[0]
    return result[0]


def read_range(name: str, begin: int, end: int) -> bytes:
    """Bytes begin .. end - 1 of a local or remote file. Raises DataError if they cannot be read whole."""
    if "://" not in name:
        with Path(name).open("rb") as file:
            file.seek(begin)
            found = file.read(end - begin)
        if len(found) != end - begin:
            raise DataError(f"{at(name)}: truncated; {len(found)} of {end - begin} bytes at {begin}")
        return found
    system, path = _file_system(name)

    def whole() -> bytes:
        found = system.cat_file(path, start=begin, end=end)
        if len(found) != end - begin:
            raise OSError(f"truncated: {len(found)} of {end - begin} bytes at {begin}")
        return found

    return request(whole, name)


def local_copy(stored: StoredFile, cache: Path) -> Path:
    """Path of a file, or of its copy in the cache, which is fetched if it is not there.

    Raises DataError for an object that cannot be fetched whole, or that changed since it was listed.
    """
    if "://" not in stored.name:
        return Path(stored.name)
    suffixes = "".join(Path(stored.name).suffixes[-2:])
    path = cache / f"{digest([stored.name, stored.size, stored.version])[:32]}{suffixes}"
    if path.is_file() and path.stat().st_size == stored.size:
        return path
    md5 = hashlib.md5(usedforsecurity=False)
    with atomic(path) as file:
        for begin in range(0, stored.size, RANGE_BYTES):
            piece = read_range(stored.name, begin, min(stored.size, begin + RANGE_BYTES))
            md5.update(piece)
            file.write(piece)
        tag = stored.version.strip('"')
        if re.fullmatch(r"[0-9a-f]{32}", tag) and md5.hexdigest() != tag:
            raise DataError(f"{stored.name}: its bytes do not match its ETag {tag}; the object changed or is damaged")
    return path
