"""Torch archives read as data: the zip files of ``torch.save``, without torch and without running what they contain.

The pickle in such a file is a program for a small machine. Here only its data instructions are followed: a name of a
class or function becomes a ``Global``, and a call of one becomes a ``Record`` of the name and its arguments. Nothing is
imported or called, so a file can do no harm; what is no plain data stays a record.
"""

from __future__ import annotations

import functools
import io
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from jaxllm.checkpoint.errors import CheckpointError

DTYPES = {
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(jnp.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
"""Element types by the names of torch's storages."""


@dataclass(frozen=True)
class Global:
    """Name of a class or function in an archive, ``module.name``."""

    name: str


@dataclass
class Record:
    """Object of an archive that is no plain data: a call of ``name``, which is not made.

    Attributes:
        name: of the class or function.
        arguments: of the call.
        state: the object's fields by name, where the archive sets them.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = field(default_factory=dict)

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True)
class ArchiveTensor:
    """Tensor of an archive, not yet read: a call reads its values, and so does each index.

    Attributes:
        shape, dtype: of the values.
        read: reads them.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    def __call__(self) -> np.ndarray:
        return self.read()

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.read()[index]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(), dtype or self.dtype)


def read_archive(source: bytes | Path) -> Any:
    """Contents of a torch archive: dicts, lists, tuples, numbers, strings, ``ArchiveTensor`` and ``Record``.

    Args:
        source: the zip file, or its bytes.

    Raises:
        CheckpointError: it is not a torch archive.
    """
    try:
        with _opened(source) as archive:
            root = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            folder = root.removesuffix("data.pkl")
            order = f"{folder}byteorder"
            if order in archive.namelist() and archive.read(order) != b"little":
                raise CheckpointError("the torch archive was written on a big-endian machine, which is not supported.")
            data = archive.read(root)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise CheckpointError("this is not a zip archive of torch.save (of PyTorch 1.6 or later).") from error
    return read_pickled_data(data, functools.partial(_storage, source, folder))


def read_pickled_data(data: bytes, persistent: Callable[[Any], Any] = lambda found: found) -> Any:
    """Data of a pickle; see the module.

    Args:
        data: the pickle.
        persistent: makes the value of a persistent id, by which an archive's pickle refers to its other files.

    Raises:
        CheckpointError: the pickle has an instruction that plain data does not need.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        begin = marks.pop()
        found = stack[begin:]
        del stack[begin:]
        return found

    for code, argument, _ in _instructions(data):
        name = code.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            return stack.pop()
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("NONE", "NEWTRUE", "NEWFALSE"):
            stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
        elif name in _LITERALS:
            stack.append(argument)
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name == "GLOBAL":
            stack.append(Global(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            last = stack.pop()
            stack.append(Global(f"{stack.pop()}.{last}"))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("TUPLE", "LIST", "DICT", "FROZENSET"):
            found = since_mark()
            stack.append(_OF_MARKED[name](found))
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            found = [stack.pop()] if name == "APPEND" else since_mark()
            if isinstance(stack[-1], set):
                stack[-1].update(found)
            elif isinstance(stack[-1], list):
                stack[-1].extend(found)
        elif name in ("SETITEM", "SETITEMS"):
            found = [stack.pop(-2), stack.pop()] if name == "SETITEM" else since_mark()
            into = stack[-1] if isinstance(stack[-1], dict) else {}
            into.update(zip(found[::2], found[1::2], strict=True))
        elif name in ("REDUCE", "NEWOBJ", "NEWOBJ_EX"):
            arguments = stack.pop() if name != "NEWOBJ_EX" else (stack.pop(), stack.pop())[1]
            stack.append(_called(stack.pop(), arguments))
        elif name == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], Record):
                stack[-1].state = state
        elif name == "BINPERSID":
            stack.append(persistent(stack.pop()))
        elif name == "POP":
            stack.pop()
        else:
            raise CheckpointError(f"the pickle has the instruction {name}, which plain data does not need.")
    raise CheckpointError("the pickle ends before its last instruction.")


_NUMBERS = ("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "FLOAT")
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "BINSTRING", "SHORT_BINSTRING", "STRING")
_LITERALS = frozenset((*_NUMBERS, *_TEXTS, "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"))
_OF_MARKED: dict[str, Callable[[list[Any]], Any]] = {
    "TUPLE": tuple,
    "LIST": list,
    "FROZENSET": frozenset,
    "DICT": lambda found: dict(zip(found[::2], found[1::2], strict=True)),
}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}


def _instructions(data: bytes) -> Iterator[tuple[Any, Any, int | None]]:
    try:
        yield from pickletools.genops(data)
    except ValueError as error:
        raise CheckpointError(f"the pickle is damaged: {error}") from error


def _called(of: Any, arguments: Any) -> Any:
    """Record of a call; ordered dictionaries and tensors become what they are."""
    name = of.name if isinstance(of, Global) else repr(of)
    if name == "collections.OrderedDict":
        return dict(*arguments)
    if name == "torch._utils._rebuild_tensor_v2":
        storage, first, shape, strides = arguments[:4]
        if isinstance(storage, _Storage):
            read = functools.partial(_values, storage, first, tuple(shape), tuple(strides))
            return ArchiveTensor(tuple(shape), storage.dtype, read)
    if name == "torch._utils._rebuild_parameter":
        return arguments[0]
    if name == "torch.Size":
        return tuple(arguments[0])
    return Record(name, tuple(arguments))


@dataclass(frozen=True)
class _Storage:
    dtype: np.dtype
    read: Callable[[], bytes]


def _opened(source: bytes | Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BytesIO(source) if isinstance(source, bytes) else source)


def _storage(source: bytes | Path, folder: str, found: Any) -> Any:
    """Storage of a persistent id, ``("storage", class, key, device, elements)``."""
    kind = found[1].name.rsplit(".", 1)[-1] if isinstance(found[1], Global) else str(found[1])
    if kind not in DTYPES:
        raise CheckpointError(f"a tensor of the archive has storage {kind}; supported: {', '.join(DTYPES)}.")

    def read() -> bytes:
        with _opened(source) as archive:
            return archive.read(f"{folder}data/{found[2]}")

    return _Storage(DTYPES[kind], read)


def _values(storage: _Storage, first: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    flat = np.frombuffer(storage.read(), storage.dtype)[first:]
    inside = sum(stride * (size - 1) for stride, size in zip(strides, shape, strict=True))
    if 0 not in shape and inside >= len(flat):
        raise CheckpointError(f"a tensor of shape {shape} is larger than its storage in the archive.")
    steps = [stride * storage.dtype.itemsize for stride in strides]
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, shape, steps, writeable=False)).reshape(shape)
