"""Sharded tokens: token files in a row, local or in object storage, read as one array of tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Integer

from jaxllm.data.prepare.object_cache import StoredFile, local_copy, read_range
from jaxllm.files import DataError, at, file_sha256

OPEN_SHARDS = 256
"""Shards that stay mapped."""


@dataclass(frozen=True)
class TokenShard:
    """Token file of a corpus: name relative to the manifest, sizes and hash."""

    file: str
    dtype: str
    tokens: int
    documents: int
    bytes: int
    sha256: str


class ShardedTokens:
    """Tokens of several shards as one array that is indexed by a slice or by an array of places.

    A shard is opened when it is first needed: fetched to the cache if it is remote, and its hash checked.
    """

    def __init__(self, shards: Sequence[TokenShard], base: str, cache: Path):
        self._shards, self._base, self._cache = list(shards), base, cache
        self._ends = np.cumsum([one.tokens for one in shards])
        self._open: OrderedDict[int, np.ndarray] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def view(self, _: type) -> ShardedTokens:
        """These tokens; numpy's arrays have this method."""
        return self

    def __getitem__(self, places: slice | np.ndarray | int) -> Any:
        if isinstance(places, slice):
            begin, end, step = places.indices(len(self))
            if step != 1:
                raise ValueError("tokens are read in steps of 1")
            return self._range(begin, max(begin, end))
        if isinstance(places, (int, np.integer)):
            return self._range(int(places), int(places) + 1)[0]
        shard = np.searchsorted(self._ends, places, side="right")
        out = np.empty(places.shape, self._shard(0).dtype)
        for number in np.unique(shard).tolist():
            there = shard == number
            out[there] = self._shard(number)[places[there] - self._first(number)]
        return out

    def _first(self, number: int) -> int:
        return int(self._ends[number]) - self._shards[number].tokens

    def _range(self, begin: int, end: int) -> Integer[np.ndarray, " tokens"]:
        number = int(np.searchsorted(self._ends, begin, side="right"))
        pieces = []
        while begin < end:
            first, stop = self._first(number), min(end, int(self._ends[number]))
            pieces.append(self._shard(number)[begin - first : stop - first])
            begin, number = stop, number + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, self._shard(0).dtype)

    def _shard(self, number: int) -> np.ndarray:
        if number not in self._open:
            self._open[number] = self._opened(self._shards[number])
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]

    def _opened(self, shard: TokenShard) -> np.ndarray:
        name = f"{self._base}/{shard.file}"
        # The cache knows a copy by its contents, so a copy of an altered shard is never taken for it.
        path = local_copy(StoredFile(name, shard.bytes, shard.sha256), self._cache)
        if file_sha256(path) != shard.sha256:
            if "://" in name:
                path.unlink()
            raise DataError(f"{at(name)}: does not match the sha256 in the manifest; the file is damaged or altered")
        return np.memmap(path, np.dtype(shard.dtype).newbyteorder("<"), "r", shape=(shard.tokens,)).view(np.ndarray)


def shard_offsets(shard: TokenShard, base: str) -> Int[np.ndarray, " documents_plus_one"]:
    """Document offsets of a shard, read from its end.

    Raises DataError naming the shard if it is missing, truncated or altered.
    """
    name = f"{base}/{shard.file}"
    if "://" not in name and (not Path(name).is_file() or Path(name).stat().st_size != shard.bytes):
        raise DataError(f"{at(name)}: missing or truncated; the manifest lists {shard.bytes:,} bytes")
    raw = read_range(name, shard.bytes - 8 * (shard.documents + 1), shard.bytes)
    offsets = np.frombuffer(raw, "<i8").astype(np.int64)
    if offsets[0] != 0 or offsets[-1] != shard.tokens or (np.diff(offsets) < 0).any():
        raise DataError(f"{at(name)}: the document offsets do not run from 0 up to {shard.tokens}; it was altered")
    return offsets
