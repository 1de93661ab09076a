"""Data files, local or remote: their names, formats and decompressed bytes.

A file is a local path or a URL that fsspec opens ("s3://bucket/a.jsonl.zst"). `.gz` and `.zst` are decompressed while
the file is read. A truncated compressed file is an error, never a shorter file.
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.data import corpus
from jaxllm.files import DataError, at

KINDS = {
    ".txt": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".tar": "webdataset",
    ".bin": "tokens",
    ".json": "corpus",
}
FORMATS = tuple(dict.fromkeys(KINDS.values()))
COMPRESSED = (".gz", ".zst")
CHUNK = 1 << 20


@dataclass(frozen=True)
class RemoteFile:
    """Remote file: a URL with those methods of `Path` that reading needs."""

    url: str

    @property
    def name(self) -> str:
        """Last part of the URL's path."""
        return self.url.rsplit("/", 1)[-1]

    @property
    def suffix(self) -> str:
        """Suffix of the name, such as `.gz`."""
        return Path(self.name).suffix

    def open(self, mode: str = "rb") -> Any:
        """Opens the remote file: a seekable file object. Raises DataError if it cannot be opened."""
        system, path = self._system()
        try:
            return system.open(path, mode)
        except OSError as error:
            raise DataError(f"{at(self)}: cannot be opened ({type(error).__name__}: {error})") from None

    def size(self) -> int:
        """Size in bytes. Raises DataError if the file does not exist or cannot be reached."""
        system, path = self._system()
        try:
            return int(system.size(path) or 0)
        except FileNotFoundError:
            raise DataError(f"{at(self)}: no such file") from None
        except Exception as error:  # every file system of fsspec raises different errors
            raise DataError(f"{at(self)}: cannot be reached ({type(error).__name__}: {error})") from None

    def __str__(self) -> str:
        return self.url

    def _system(self) -> tuple[Any, str]:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise DataError(f"{at(self)}: a URL needs the package fsspec: pip install 'jaxllm[data]'") from None
        try:
            return url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise DataError(f"{at(self)}: fsspec cannot open it ({error})") from None


File = Path | RemoteFile


def how_to_make(file: Path) -> str:
    """Ending of an error about a missing file: the command that makes a token file; "" for other files."""
    made = f"jaxllm data tokenize TEXT.txt --out {file} --tokenizer bpe:8192"
    return f". A token file is made from text: `{made}`" if file.suffix == ".bin" else ""


def find_files(names: Sequence[str]) -> tuple[File, ...]:
    """Files for paths and URLs; the folder of a saved Hugging Face data set stands for its Arrow files.

    Raises DataError, naming the file, if one does not exist or is empty.
    """
    found: list[File] = []
    for name in names:
        if "://" in name:
            remote = RemoteFile(name)
            if remote.size() == 0:
                raise DataError(f"{at(remote)}: is empty")
            found.append(remote)
            continue
        path = Path(name).expanduser()
        for file in _saved_dataset(path) if path.is_dir() else (path,):
            if not file.is_file():
                raise DataError(
                    f"{at(file)}: no such file; legal: a file, or {corpus.NAME!r} for the bundled corpus"
                    + how_to_make(file)
                )
            if file.stat().st_size == 0:
                raise DataError(f"{at(file)}: is empty")
            found.append(file)
    return tuple(found)


def _saved_dataset(folder: Path) -> tuple[Path, ...]:
    """Arrow files of a folder that `datasets.Dataset.save_to_disk` wrote."""
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(str(one.parent) for one in sorted(folder.glob("*/state.json")))
        raise DataError(f"{at(folder)}: contains several splits; name one: {splits}")
    state = folder / "state.json"
    if not state.is_file():
        raise DataError(f"{at(folder)}: is a folder; name the files in it, for example {folder}/*.jsonl in a shell")
    try:
        names = [one["filename"] for one in json.loads(state.read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{at(state)}: does not list the data set's files under '_data_files'") from None
    if not names:
        raise DataError(f"{at(folder)}: a data set without rows")
    return tuple(folder / name for name in names)


def file_format(files: Sequence[File], requested: str) -> str:
    """Format of files, one of `FORMATS`: the requested one, or for `auto` the one of their suffixes.

    Raises DataError for an unknown suffix, or for files of several formats.
    """
    if requested != "auto":
        return requested
    kinds = {}
    for file in files:
        suffix = plain_suffix(file)
        if suffix not in KINDS:
            raise DataError(
                f"{at(file)}: the suffix names no known format. Set source_format to {', '.join(FORMATS[:-1])} or "
                f"{FORMATS[-1]}, or rename the file to end in one of {', '.join(KINDS)}"
            )
        kinds[KINDS[suffix]] = file
    if len(kinds) > 1:
        raise DataError(f"source mixes file formats: {', '.join(f'{file} is {kind}' for kind, file in kinds.items())}")
    return next(iter(kinds))


def plain_suffix(file: File) -> str:
    """Suffix of the name without that of compression: `.jsonl` for `a.jsonl.gz`."""
    return Path(Path(file.name).stem).suffix if file.suffix in COMPRESSED else file.suffix


def content_sha256(file: File) -> str:
    """SHA-256 of the file's bytes as stored, in hexadecimal."""
    with file.open("rb") as opened:
        hasher = hashlib.sha256()
        while chunk := opened.read(CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


def read_chunks(file: File) -> Iterator[bytes]:
    """Decompressed bytes of a file in chunks. Raises DataError for a compressed file that is damaged or truncated."""
    with file.open("rb") as opened:
        try:
            if file.suffix == ".gz":
                with gzip.GzipFile(fileobj=opened) as unpacked:
                    yield from iter(lambda: unpacked.read(CHUNK), b"")
            elif file.suffix == ".zst":
                yield from _unpacked_zst(file, opened)
            else:
                yield from iter(lambda: opened.read(CHUNK), b"")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{at(file)}: damaged or truncated gzip ({error})") from None


def _unpacked_zst(file: File, opened: Any) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{at(file)}: .zst needs the package zstandard: pip install 'jaxllm[data]'") from None
    unpacker = zstandard.ZstdDecompressor().decompressobj()
    try:
        while chunk := opened.read(CHUNK):
            while chunk:  # a file may have several frames
                yield unpacker.decompress(chunk)
                chunk = b""
                if unpacker.eof:
                    chunk = unpacker.unused_data
                    unpacker = zstandard.ZstdDecompressor().decompressobj()
                    if not chunk and not (chunk := opened.read(CHUNK)):
                        return
    except zstandard.ZstdError as error:
        raise DataError(f"{at(file)}: damaged zstd ({error})") from None
    raise DataError(f"{at(file)}: truncated zstd; the last frame has no end")


def read_lines(file: File) -> Iterator[bytes]:
    """Lines of a file with their line ends; a byte-order mark at the start is removed."""
    for number, line in enumerate(_split(read_chunks(file)) if file.suffix in COMPRESSED else _read(file)):
        yield line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line


def _read(file: File) -> Iterator[bytes]:
    with file.open("rb") as opened:
        yield from opened


def _split(pieces: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest


def decode_utf8(raw: bytes, file: File, row: int) -> str:
    """Decodes UTF-8. Raises DataError naming the row of the first invalid byte; the text begins at `row`."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        row += raw.count(b"\n", 0, error.start)
        raise DataError(f"{at(file, row)}: not UTF-8 (byte 0x{raw[error.start]:02x})") from None


def display_name(files: Sequence[File]) -> str:
    """Name of one or several files in messages."""
    if isinstance(files[0], Path) and files[0].parent == corpus.path("train").parent:
        return corpus.NAME
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
