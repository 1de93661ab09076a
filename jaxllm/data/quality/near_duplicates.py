"""Deduplication across a corpus by sorted files: memory is bounded by the settings below, not by the corpus.

A document is a duplicate if an *earlier* one, in the order of sources, files and rows, is equal to it or similar: so
the verdict on a document depends on no other verdict, and each can be found by itself. Equal texts have equal words.
Similar ones have a Jaccard similarity of their sets of word n-grams of `threshold` or more; pairs to compare are found
by MinHash (Broder 1997; the package rensa) and LSH bands (Indyk and Motwani 1998), and the similarity is computed from
the texts, not estimated.

Each input file gives records (key, id) sorted by key: runs of at most `RUN_RECORDS`, merged to one file. Keys are
uniform, so a task takes the same interval of keys out of every file, and finds the documents with equal keys there.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt64

from jaxllm.data.quality.word_shingles import words
from jaxllm.data.shuffle import splitmix64
from jaxllm.files import atomic

EXACT = np.dtype([("key", "<u8"), ("check", "<u8"), ("id", "<u8")])
BAND = np.dtype([("key", "<u8"), ("id", "<u8")])
PAIR = np.dtype([("id", "<u8"), ("other", "<u8")])
"""A document and an earlier one."""
RUN_RECORDS = 1 << 18
"""Records that a run is sorted from in memory."""
PARTITION_RECORDS = 1 << 19
"""Records that a task takes out of all runs, about."""
NEIGHBOURS = 4
"""Documents with an equal key that a document is compared with: the first, and the last before it, so many of each."""
MIN_RECALL = 0.99
"""Least probability that a pair at the threshold has an equal band."""
MINHASH_SEED = 42


def document_id(file: int, position: int) -> int:
    """Id of a document: ids are ordered as documents are."""
    return file << 32 | position


def band_rows(threshold: float, hashes: int) -> int:
    """Largest number of hashes in a band with which a pair at `threshold` has an equal band with `MIN_RECALL`."""
    good = [r for r in range(1, hashes + 1) if 1 - (1 - threshold**r) ** (hashes // r) >= MIN_RECALL]
    return max(good, default=1)


def exact_keys(text: str, listed: list[str]) -> tuple[int, int]:
    """Hash of 128 bits, in two halves, of a text's words: lower case, without punctuation and spacing.

    A text without words is hashed as it is.
    """
    raw = (" ".join(listed) if listed else text).encode()
    found = hashlib.blake2b(raw, digest_size=16).digest()
    return int.from_bytes(found[:8], "little"), int.from_bytes(found[8:], "little")


def word_ngrams(listed: list[str], count: int) -> frozenset[str]:
    """Set of the n-grams of a text's words; of fewer words, all of them as one; empty without words."""
    if len(listed) < count:
        return frozenset([" ".join(listed)] if listed else ())
    return frozenset(map(" ".join, zip(*(listed[place:] for place in range(count)), strict=False)))


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    """Jaccard similarity of two sets; 0 if both are empty."""
    shared = len(one & other)
    return shared / max(1, len(one) + len(other) - shared)


class BandKeys:
    """LSH band keys of texts: a 64-bit hash of each band of a MinHash signature."""

    def __init__(self, threshold: float, hashes: int, ngram_words: int):
        from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]

        self._kind: Any = RMinHash
        self._hashes, self._ngram_words = hashes, ngram_words
        self.rows = band_rows(threshold, hashes)
        self.bands = hashes // self.rows
        self._factors = splitmix64(np.arange(1, self.rows + 1, dtype=np.uint64)) | np.uint64(1)
        self._salts = splitmix64(np.arange(1, self.bands + 1, dtype=np.uint64) << np.uint64(32))

    def __call__(self, listed: list[str]) -> UInt64[np.ndarray, " bands"]:
        """Keys of a text by its words; none without words."""
        grams = word_ngrams(listed, self._ngram_words)
        if not grams:
            return np.empty(0, np.uint64)
        signature = self._kind(num_perm=self._hashes, seed=MINHASH_SEED)
        signature.update(list(grams))
        part = np.array(signature.digest(), np.uint64)[: self.bands * self.rows].reshape(self.bands, self.rows)
        return splitmix64((part * self._factors).sum(axis=1) + self._salts)


class SortedWriter:
    """Writer of the sorted file FOLDER/NAME.npy: runs that are sorted in memory, merged by intervals of their keys."""

    def __init__(self, folder: Path, name: str, kind: np.dtype):
        self._folder, self._name, self._kind = folder, name, kind
        self._held = np.empty(RUN_RECORDS, kind)
        self._count = self._runs = 0

    def add(self, *fields: Any) -> None:
        """Adds records: one array, or one value for all, for each field."""
        (count,) = np.broadcast_shapes((1,), *map(np.shape, fields))
        if self._count + count > RUN_RECORDS:
            self._flush()
        for name, values in zip(self._kind.names or (), fields, strict=True):
            self._held[name][self._count : self._count + count] = values
        self._count += count

    def close(self) -> None:
        """Writes the records held, and merges the runs."""
        self._flush()
        runs = sorted(self._folder.glob(f"{self._name}-*.npy"))
        total = sum(len(np.load(path, mmap_mode="r")) for path in runs)
        target = self._folder / f"{self._name}.npy"
        if len(runs) == 1:
            runs[0].rename(target)
            return
        if not total:
            np.save(target, np.empty(0, self._kind))
            return
        merged = np.lib.format.open_memmap(target, "w+", self._kind, (total,))
        place, count = 0, partition_count(total)
        for number in range(count):
            records = partition(runs, number, count)
            merged[place : place + len(records)] = records
            place += len(records)
        merged.flush()
        for path in runs:
            path.unlink()

    def _flush(self) -> None:
        if self._count:
            held = self._held[: self._count]
            names = self._kind.names or ()
            np.save(
                self._folder / f"{self._name}-{self._runs:05}.npy", held[np.lexsort([held[n] for n in names[::-1]])]
            )
            self._runs += 1
            self._count = 0


def save_sorted(path: Path, records: np.ndarray) -> None:
    """Writes records to a .npy file, atomically."""
    with atomic(path) as file:
        np.save(file, records)


def partition_count(records: int) -> int:
    """Number of tasks that the records of all runs are divided among."""
    return max(1, math.ceil(records / PARTITION_RECORDS))


def slice_of(path: Path, field: str, begin: int, end: int) -> np.ndarray:
    """Records of a sorted file whose field is in begin .. end - 1."""
    whole = np.load(path, mmap_mode="r")
    column = whole[field]
    first, last = (bisect.bisect_left(column, edge, key=int) for edge in (begin, end))
    return np.array(whole[first:last])


def partition(paths: Sequence[Path], number: int, count: int) -> np.ndarray:
    """Records of all runs in interval `number` of `count` of the keys, sorted."""
    begin, end = ((one << 64) // count for one in (number, number + 1))
    records = np.concatenate([slice_of(path, "key", begin, end) for path in paths])
    return records[np.lexsort([records[name] for name in (records.dtype.names or ())[::-1]])]


def exact_pairs(records: np.ndarray) -> np.ndarray:
    """(document, first document with the same words), sorted, of sorted records of exact keys."""
    if not len(records):
        return np.empty(0, PAIR)
    new = np.ones(len(records), bool)
    new[1:] = (records["key"][1:] != records["key"][:-1]) | (records["check"][1:] != records["check"][:-1])
    first = np.maximum.accumulate(np.where(new, np.arange(len(records)), 0))
    found = np.empty(int((~new).sum()), PAIR)
    found["id"], found["other"] = records["id"][~new], records["id"][first[~new]]
    return np.sort(found, order=["id", "other"])


def candidate_pairs(records: np.ndarray) -> np.ndarray:
    """(document, earlier document) with an equal band key, sorted, each once, of sorted records of band keys."""
    if not len(records):
        return np.empty(0, PAIR)
    place = np.arange(len(records))
    new = np.ones(len(records), bool)
    new[1:] = records["key"][1:] != records["key"][:-1]
    first = np.maximum.accumulate(np.where(new, place, 0))
    pieces = []
    for near in range(NEIGHBOURS):
        for other in (first + near, place - 1 - near):
            good = (other >= first) & (other < place)
            piece = np.empty(int(good.sum()), PAIR)
            piece["id"], piece["other"] = records["id"][good], records["id"][other[good]]
            pieces.append(piece)
    return unique_pairs(np.concatenate(pieces))


def unique_pairs(pairs: np.ndarray) -> np.ndarray:
    """Sorted pairs of two different documents, each once."""
    pairs = pairs[pairs["id"] != pairs["other"]]
    pairs = pairs[np.lexsort([pairs["other"], pairs["id"]])]
    keep = np.ones(len(pairs), bool)
    keep[1:] = (pairs["id"][1:] != pairs["id"][:-1]) | (pairs["other"][1:] != pairs["other"][:-1])
    return pairs[keep]


def pairs_of_file(paths: Iterable[Path], file: int) -> np.ndarray:
    """Pairs of the documents of one input file, sorted, each once, out of sorted files of pairs."""
    begin, end = document_id(file, 0), document_id(file + 1, 0)
    found = [slice_of(path, "id", begin, end) for path in paths]
    return unique_pairs(np.concatenate([np.empty(0, PAIR), *found]))


def similar_documents(
    pairs: np.ndarray, text_of: Callable[[int], str], threshold: float, ngram_words: int
) -> Iterator[tuple[int, int, float]]:
    """(document, earlier similar document, similarity) of each document that has one, of sorted candidate pairs."""

    @lru_cache(maxsize=512)
    def grams(number: int) -> frozenset[str]:
        return word_ngrams(words(text_of(number)), ngram_words)

    done = -1
    for number, other in pairs.tolist():
        if number != done and (share := jaccard(grams(number), grams(other))) >= threshold:
            done = number
            yield number, other, share
