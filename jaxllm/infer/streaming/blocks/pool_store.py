"""Pool stores: where parts of the KV cache are while they are not on the device.

A step reads a part whole, since attention reads all that its sequences have, and writes back only the pages that it has
written to.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Int

from jaxllm.infer.streaming.weight_file import CacheUnavailableError

Pools = Any
"""Pools of a part: ``Slots`` of each layer group."""


class Part(NamedTuple):
    """Part of the KV cache.

    Attributes:
        unit: index of the unit of layers.
        batch: batch of the block.
    """

    unit: int
    batch: int


@runtime_checkable
class PoolStore(Protocol):
    """Store of one part."""

    tier: str

    def read(self) -> Pools:
        """The part as arrays of the host, which nobody changes while they are copied to the device.

        Raises:
            CacheUnavailableError: it cannot be read.
        """
        ...

    def write(self, pages: Sequence[Int[np.ndarray, " M"]], content: Pools) -> None:
        """Replaces pages.

        Args:
            pages: of each layer group.
            content: at least as many pages of each group, those of ``pages`` first.

        Raises:
            CacheUnavailableError: they cannot be written.
        """
        ...


class HostPools:
    """A part in host memory.

    Attributes:
        tier: "host".
    """

    tier = "host"

    def __init__(self, template: Pools):
        self._arrays = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), template)

    def read(self) -> Pools:
        """See ``PoolStore``."""
        return self._arrays

    def write(self, pages: Sequence[Int[np.ndarray, " M"]], content: Pools) -> None:
        """See ``PoolStore``."""
        for group, numbers in enumerate(pages):
            for mine, new in zip(jax.tree.leaves(self._arrays[group]), jax.tree.leaves(content[group]), strict=True):
                mine[:, numbers] = new[:, : len(numbers)]


class FilePools:
    """A part in a file, which has its whole size from the start and no name: it ends with the process.

    Attributes:
        tier: "disk".
    """

    tier = "disk"

    def __init__(self, template: Pools, directory: Path, what: str):
        """A file of zeros.

        Args:
            template: shapes of the arrays.
            directory: where it is.
            what: what it holds, for errors.

        Raises:
            CacheUnavailableError: the directory has no room for it.
        """
        self._template, self._what, self._directory = template, what, directory
        self._size = sum(_bytes_of(x) for x in jax.tree.leaves(template))
        path = directory / f".kv-{os.getpid()}-{id(self):x}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            weakref.finalize(self, os.close, self._file)
            path.unlink()
            if self._size:
                os.posix_fallocate(self._file, 0, self._size)
        except OSError as error:
            raise CacheUnavailableError(
                f"{directory}: {what} cannot be kept there ({self._size / 2**20:.0f} MiB): {error}. Give a directory "
                "with room for it, fewer pages, or more of the KV cache on the host."
            ) from error

    def read(self) -> Pools:
        """See ``PoolStore``."""
        try:
            leaves, begin = [], 0
            for leaf in jax.tree.leaves(self._template):
                array = np.empty(leaf.shape, leaf.dtype)
                _read_into(self._file, array, begin)
                leaves.append(array)
                begin += array.nbytes
        except OSError as error:
            raise self._unavailable("read", error) from error
        return jax.tree.unflatten(jax.tree.structure(self._template), leaves)

    def write(self, pages: Sequence[Int[np.ndarray, " M"]], content: Pools) -> None:
        """See ``PoolStore``."""
        begin = 0
        try:
            for group, own in enumerate(self._template):
                for leaf, new in zip(jax.tree.leaves(own), jax.tree.leaves(content[group]), strict=True):
                    of_page = _bytes_of(leaf) // max(1, leaf.shape[0] * leaf.shape[1])
                    for layer in range(leaf.shape[0]):
                        for at, page in enumerate(pages[group].tolist()):
                            place = begin + (layer * leaf.shape[1] + page) * of_page
                            _write_from(self._file, np.ascontiguousarray(new[layer, at]), place)
                    begin += _bytes_of(leaf)
        except OSError as error:
            raise self._unavailable("written", error) from error

    def _unavailable(self, done: str, error: OSError) -> CacheUnavailableError:
        return CacheUnavailableError(f"{self._what} in {self._directory} cannot be {done}: {error}. Check the disk.")


def _bytes_of(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _read_into(file: int, array: np.ndarray, begin: int) -> None:
    buffer, read = array.reshape(-1).view(np.uint8).data, 0
    while read < len(buffer):
        more = os.preadv(file, [buffer[read:]], begin + read)
        if not more:
            raise OSError(f"the file ends after {begin + read} bytes")
        read += more


def _write_from(file: int, array: np.ndarray, begin: int) -> None:
    buffer, written = array.reshape(-1).view(np.uint8).data, 0
    while written < len(buffer):
        written += os.pwrite(file, buffer[written:], begin + written)
