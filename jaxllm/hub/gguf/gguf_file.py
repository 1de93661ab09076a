"""GGUF files, memory-mapped.

A file is the magic ``GGUF``, a version, the counts of tensors and of metadata entries, the entries, the tensors' names,
shapes, formats and offsets, and after padding to a multiple of ``general.alignment`` their data
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Opening reads the metadata only, and of a tensor only the
requested rows are read and decoded. Damage of any kind is a ``HubError``: every length is checked against the rest of
the file before it is used.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from jaxllm.hub.errors import HubError
from jaxllm.hub.gguf import ggml_formats
from jaxllm.hub.gguf.gguf_codes import CODE_KINDS, GgufCodes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NESTING = 4
SPLIT = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")

SCALAR_TYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Metadata types that are numbers or bools, by their number in the file."""
STRING, ARRAY = 8, 9


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """A tensor of a mapped file, decoded when requested: ``np.asarray(tensor)``, or some rows of it, ``tensor[2:8]``.

    Attributes:
        name: name in the file.
        shape: row-major shape, the reverse of GGML's.
        kind: GGML's name of its number format.
        dtype: dtype of its values: float32, or that of a plain format.
    """

    name: str
    shape: tuple[int, ...]
    _kind: ggml_formats.GgmlFormat
    _map: mmap.mmap
    _offset: int

    @property
    def kind(self) -> str:
        """GGML's name of its number format."""
        return self._kind.name

    @property
    def dtype(self) -> np.dtype:
        """Dtype of its decoded values."""
        return self._kind.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.size // self._kind.values * self._kind.layout.itemsize

    @property
    def values(self) -> int:
        """Number of values in a block."""
        return self._kind.values

    @property
    def stored(self) -> GgufCodes | None:
        """Its codes, if it is a matrix in a quantised format."""
        return GgufCodes(self) if self.kind in CODE_KINDS and self.ndim == 2 else None

    def blocks(self) -> np.ndarray:
        """Its blocks, with the fields of their format; a read-only view of the file."""
        return self._bytes(0, self.size).view(self._kind.layout)

    def decode_blocks(self, blocks: np.ndarray, out: np.ndarray) -> None:
        """Decodes blocks of its format into float32 ``out`` [n, values]."""
        assert self._kind.decode is not None
        self._kind.decode(blocks, out)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """All values; a plain format gives a read-only view of the file unless a copy is requested."""
        if self._kind.decode is None:
            view = self._bytes(0, self.size).view(self.dtype).reshape(self.shape)
            return np.array(view, dtype, copy=copy)
        if copy is False:
            raise ValueError(f"{self.name} is {self.kind}: its values are made when asked for, they cannot be a view.")
        return self._read(0, self.size, np.dtype(dtype or self.dtype)).reshape(self.shape)

    def __getitem__(self, index: slice | tuple[slice, ...]) -> np.ndarray:
        """A new array of a part, by one slice per dimension; of the first dimension only the requested rows are read.

        The pages of the file are released afterwards, so reading all of a large tensor in parts needs little memory.
        """
        rows, rest = split_index(index, self)
        row = self.size // len(self)
        if row % self._kind.values:  # one dimension: blocks lie across what would be rows
            return np.asarray(self)[rows.start : rows.stop]
        part = self._read(rows.start * row, rows.stop * row, self.dtype).reshape(len(rows), *self.shape[1:])
        return part[(slice(None), *rest)]

    def _read(self, begin: int, end: int, dtype: np.dtype) -> np.ndarray:
        """Values ``begin`` to ``end``, which lie on block boundaries, in a new flat array."""
        data = self._bytes(begin, end)
        if self._kind.decode is None:
            out = data.view(self.dtype).astype(dtype)
        else:
            floats = dtype if dtype.kind == "f" or dtype.name == "bfloat16" else np.dtype(np.float32)
            out = np.empty(end - begin, floats)
            ggml_formats.dequantize(self._kind, data, out)
            out = out.astype(dtype, copy=False)
        self._let_go(begin, end)
        return out

    def _span(self, begin: int, end: int) -> tuple[int, int]:
        size = self._kind.layout.itemsize
        return self._offset + begin // self._kind.values * size, self._offset + end // self._kind.values * size

    def _bytes(self, begin: int, end: int) -> np.ndarray:
        first, last = self._span(begin, end)
        return np.frombuffer(self._map, np.uint8, last - first, first)

    def _let_go(self, begin: int, end: int) -> None:
        """Releases the span's pages from this process; a later access reads them from the file again."""
        first, last = self._span(begin, end)
        first -= first % mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def split_index(index: slice | tuple[slice, ...], tensor: Any) -> tuple[range, tuple[slice, ...]]:
    """Rows to read, and the slices to take of them, for an index of slices."""
    rows, *rest = index if isinstance(index, tuple) else (index,)
    begin, end, step = rows.indices(len(tensor))
    if step != 1:
        raise IndexError(f"{tensor.name}: rows are read in steps of one, not {step}.")
    return range(begin, max(begin, end)), tuple(rest)


@dataclass(frozen=True, eq=False)
class Gguf:
    """An open GGUF model.

    Attributes:
        path: the file, or its first part.
        metadata: plain values by key: numbers, bools, strings and lists of them.
        tensors: tensors by name.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def open_gguf(path: Path | str) -> Gguf:
    """Opens a GGUF file, or all parts of a split one when given any of them.

    Raises:
        HubError: not such a file, cut short or damaged (says where), an unsupported version, byte order or number
            format,
            a part missing.
    """
    path = Path(path)
    match = SPLIT.fullmatch(path.name)
    if match is None:
        metadata, tensors = _open_part(path)
        if (count := metadata.get("split.count", 0)) not in (0, 1):
            raise HubError(
                f"{path} is one of {count} parts; keep them in one directory under their names, as in "
                f"{path.stem}-00001-of-00003.gguf for the first of three."
            )
        return Gguf(path, metadata, tensors)
    count = int(match["parts"])
    names = [path.with_name(f"{match['stem']}-{part + 1:05d}-of-{match['parts']}.gguf") for part in range(count)]
    if path not in names:
        raise HubError(f"{path.name} says that it is part {int(match['part'])} of {count}; there is no such part.")
    if missing := [name.name for name in names if not name.exists()]:
        raise HubError(f"{path.parent} lacks {missing[0]} ({len(missing)} of {count} parts missing); copy it there.")
    parts = [_open_part(name) for name in names]
    tensors: dict[str, GgufTensor] = {}
    for number, (name, (metadata, more)) in enumerate(zip(names, parts, strict=True)):
        found = metadata.get("split.no"), metadata.get("split.count")
        if found != (number, count):
            raise HubError(f"{name} has split.no, split.count = {found}, its name says {number, count}.")
        if twice := sorted(tensors.keys() & more.keys()):
            raise HubError(f"{name}: {twice[0]} is in an earlier part too.")
        tensors |= more
    metadata = parts[0][0]
    if metadata.get("split.tensors.count", len(tensors)) != len(tensors):
        raise HubError(f"{names[0]} promises {metadata['split.tensors.count']} tensors, the parts hold {len(tensors)}.")
    return Gguf(names[0], metadata, tensors)


def _open_part(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Metadata and tensors of one file."""
    try:
        with path.open("rb") as stream:
            head = stream.read(8)
            if head[:4] != MAGIC:
                raise HubError(f"{path} is not a GGUF file: it begins with {head[:4]!r}, not {MAGIC!r}.")
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise HubError(f"{path} cannot be read: {error.strerror}.") from error
    cursor = _Cursor(path, data, 4)
    version = cursor.number("<u4", "version")
    if version not in VERSIONS:
        if int.from_bytes(head[4:8], "big") in VERSIONS:
            raise HubError(f"{path} is a big-endian GGUF file; only little-endian ones are read. Convert it again.")
        raise HubError(f"{path} has GGUF version {version}; versions {' and '.join(map(str, VERSIONS))} are read.")
    tensor_count, entries = cursor.number("<u8", "count of tensors"), cursor.number("<u8", "count of metadata entries")
    cursor.check_count(tensor_count, 32, "tensors")
    cursor.check_count(entries, 13, "metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.string("key of a metadata entry")
        if key in metadata:
            raise HubError(f"{path} has the metadata entry {key!r} twice.")
        metadata[key] = cursor.value(cursor.number("<u4", f"type of {key}"), key)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise HubError(f"{path}: general.alignment = {alignment!r}; it is a power of two.")
    found = [_tensor_info(cursor) for _ in range(tensor_count)]
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in found:
        if name in tensors:
            raise HubError(f"{path} has the tensor {name!r} twice.")
        size = math.prod(shape) // kind.values * kind.layout.itemsize
        if offset % alignment:
            raise HubError(f"{path}: {name} begins at byte {offset} of the data, not a multiple of {alignment}.")
        if start + offset + size > len(data):
            raise HubError(
                f"{path} is cut short: {name}, {kind.name} {list(shape)}, ends at byte {start + offset + size}, "
                f"the file has {len(data)}."
            )
        tensors[name] = GgufTensor(name, shape, kind, data, start + offset)
    return metadata, tensors


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], ggml_formats.GgmlFormat, int]:
    """Name, shape, format and offset of the next tensor."""
    name = cursor.string("name of a tensor")
    dims = cursor.number("<u4", f"dimensions of {name}")
    if not 1 <= dims <= MAX_DIMS:
        raise HubError(f"{cursor.file}: {name} has {dims} dimensions; legal: 1 to {MAX_DIMS}.")
    shape = tuple(reversed([cursor.number("<u8", f"shape of {name}") for _ in range(dims)]))
    number, offset = cursor.number("<u4", f"format of {name}"), cursor.number("<u8", f"offset of {name}")
    if number not in ggml_formats.KINDS:
        known = ", ".join(kind.name for kind in ggml_formats.KINDS.values())
        label = ggml_formats.UNSUPPORTED_FORMATS.get(number, f"number {number}")
        raise HubError(f"{cursor.file}: {name} is in the format {label}, which is not read here; known: {known}.")
    kind = ggml_formats.KINDS[number]
    if 0 in shape or shape[-1] % kind.values:
        raise HubError(
            f"{cursor.file}: {name} has shape {list(shape)}; {kind.name} has rows of a multiple of {kind.values}."
        )
    return name, shape, kind, offset


class _Cursor:
    """Read position in the header of a mapped file; never moves past the end."""

    def __init__(self, file: Path, data: mmap.mmap, at: int):
        self.file, self.data, self.at, self.end = file, data, at, len(data)

    def _take(self, size: int, what: str) -> int:
        """Start of the next ``size`` bytes; moves past them."""
        if size > self.end - self.at:
            raise self._short(size, what)
        self.at += size
        return self.at - size

    def _short(self, size: int, what: str) -> HubError:
        return HubError(
            f"{self.file} is cut short or damaged: the {what} needs {size} bytes at byte {self.at}, "
            f"the file has {self.end}."
        )

    def check_count(self, count: int, size: int, what: str) -> None:
        """Refuses a count whose items, of at least ``size`` bytes each, the rest of the file cannot hold."""
        if count * size > self.end - self.at:
            raise HubError(
                f"{self.file} is cut short or damaged: it promises {count} {what} at byte {self.at}, "
                f"of at least {size} bytes each, and has {self.end - self.at} bytes left."
            )

    def number(self, dtype: str, what: str) -> Any:
        return self.numbers(dtype, 1, what)[0]

    def numbers(self, dtype: str, count: int, what: str) -> list[Any]:
        at = self._take(np.dtype(dtype).itemsize * count, what)
        return np.frombuffer(self.data, dtype, count, at).tolist()

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """Strings one after another; there can be hundreds of thousands, so the loop is lean."""
        data, at, end = self.data, self.at, self.end
        length_of: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        out = []
        try:
            for _ in range(count):
                first = at + 8
                last = first + length_of(data, at)[0]
                if last > end:
                    raise self._short(last - first, what)
                out.append(str(data[first:last], "utf-8"))
                self.at = at = last
        except struct.error:
            raise self._short(8, what) from None
        except UnicodeDecodeError as error:
            raise HubError(
                f"{self.file} is damaged: the {what} at byte {first} is not UTF-8 ({error.reason})."
            ) from None
        return out

    def value(self, type_: int, key: str, depth: int = 0) -> Any:
        """A metadata value of a given type."""
        if type_ in SCALAR_TYPES:
            return self.number(SCALAR_TYPES[type_], f"value of {key}")
        if type_ == STRING:
            return self.string(f"value of {key}")
        if type_ != ARRAY:
            raise HubError(f"{self.file} is damaged: {key} has the type {type_}; legal: 0 to 12.")
        if depth == MAX_NESTING:
            raise HubError(f"{self.file}: {key} is an array nested more than {MAX_NESTING} deep.")
        inner, count = self.number("<u4", f"type of {key}"), self.number("<u8", f"length of {key}")
        if inner in SCALAR_TYPES:
            self.check_count(count, np.dtype(SCALAR_TYPES[inner]).itemsize, f"values of {key}")
            return self.numbers(SCALAR_TYPES[inner], count, f"values of {key}")
        if inner == STRING:
            self.check_count(count, 8, f"values of {key}")
            return self.strings(count, f"values of {key}")
        self.check_count(count, 12, f"values of {key}")
        return [self.value(inner, key, depth + 1) for _ in range(count)]
