"""Token files: tokenised documents in memory-mapped files.

A token file is `NAME.bin` and `NAME.bin.json`. The .bin has the tokens of all documents one after another,
little-endian uint16 or uint32, and after them the document offsets, int64: document d is
tokens[offsets[d]:offsets[d + 1]]. For conversations the loss mask follows: one byte per token, 1 for a target. The
.json contains

    {"format": "jaxllm-tokens", "version": 1, "dtype": "uint16", "tokens": 812345, "documents": 399,
     "vocab_size": 2048, "tokenizer": "<fingerprint>", "sha256": "<of the .bin>"}

`write_tokens` writes both. For a file from another tool, add the .json: "documents" may be left out (no offsets: the
file is one document), and so may "sha256" (not checked). Optional keys: "masked" (true if a loss mask follows) and
"about" (provenance of the tokens, see `jaxllm.data.tokenise`).
"""

import hashlib
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Integer, UInt8

from jaxllm.data.chat_encoding import EncodedDocument
from jaxllm.data.sharded_tokens import ShardedTokens
from jaxllm.data.sources.documents import heldout_mask
from jaxllm.data.sources.remote_files import how_to_make
from jaxllm.files import DataError, at, atomic, digest, file_sha256, read_json, write_json
from jaxllm.text import Tokenizer

_CHUNK = 1 << 22  # tokens checked at a time


@dataclass(frozen=True, eq=False)
class TokenDocuments:
    """Tokenised documents: an index over one memory-mapped token array, of which only what is read is in memory.

    tokens: uint16 or uint32. starts, lengths: int64, first index and number of tokens of each document.
    name: name in messages. content_hash: changes when any token or the choice of documents changes.
    loss_mask: 1 for each token that is a target; None if all are. about: provenance of the tokens.
    """

    tokens: Integer[np.ndarray, " tokens"] | ShardedTokens
    starts: Int[np.ndarray, " documents"]
    lengths: Int[np.ndarray, " documents"]
    name: str
    content_hash: str
    loss_mask: UInt8[np.ndarray, " tokens"] | None = None
    about: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Integer[np.ndarray, " tokens"]]:
        return (self.tokens[start : start + length] for start, length in zip(self.starts, self.lengths, strict=True))

    @property
    def total(self) -> int:
        """Total tokens in all documents."""
        return int(self.lengths.sum())

    def encoded(self) -> Iterator[EncodedDocument]:
        """Documents with their loss masks."""
        for start, length in zip(self.starts, self.lengths, strict=True):
            mask = None if self.loss_mask is None else self.loss_mask[start : start + length].astype(bool)
            yield EncodedDocument(self.tokens[start : start + length], mask)

    def targets(self) -> Iterator[Integer[np.ndarray, " targets"]]:
        """Target tokens of each document: those that the loss mask includes."""
        for one in self.encoded():
            yield one.ids[1:] if one.loss_mask is None else one.ids[1:][one.loss_mask[1:]]

    def truncate(self, length: int) -> "TokenDocuments":
        """Same documents, each truncated to its first `length` tokens."""
        return replace(self, lengths=np.minimum(self.lengths, length))

    def hold_out(self, fraction: float) -> tuple["TokenDocuments", "TokenDocuments | None"]:
        """(training, held-out) documents, chosen by content hash as in `sources.documents.hold_out`.

        A single document is split instead: its last `fraction` of tokens is held out.
        """
        if fraction == 0:
            return self, None
        if len(self.starts) == 1:
            first = int(self.lengths[0] * (1 - fraction))
            starts = np.concatenate([self.starts, self.starts + first])
            halves = replace(self, starts=starts, lengths=np.array([first, int(self.lengths[0]) - first]))
            mask = np.array([False, True])
        else:
            halves = self
            hashes = [int.from_bytes(hashlib.blake2b(one.tobytes(), digest_size=8).digest(), "big") for one in self]
            mask = heldout_mask(np.array(hashes, np.uint64), self.lengths, fraction, self.name)
        return halves._select(~mask), halves._select(mask)

    def _select(self, mask: np.ndarray) -> "TokenDocuments":
        starts, lengths = self.starts[mask], self.lengths[mask]
        choice = hashlib.sha256(starts.tobytes() + lengths.tobytes()).hexdigest()
        return replace(self, starts=starts, lengths=lengths, content_hash=digest([self.content_hash, choice]))


def sidecar(path: Path) -> Path:
    """Path of the .json file that describes a token file."""
    return path.with_name(path.name + ".json")


def write_tokens(
    path: Path | str,
    documents: Iterable[Integer[np.ndarray, " tokens"] | EncodedDocument],
    tokenizer: Tokenizer,
    *,
    about: dict[str, Any] | None = None,
) -> None:
    """Writes a token file. Documents should be encoded as by `Tokenizer.encode_documents`.

    Atomic commit: the .json is written last, and a file without it is not a token file.

    documents: tokens, or tokens with a loss mask; either all have a mask or none has.
    about: JSON values to store with the file: the provenance of the tokens.

    Raises ValueError if only some documents have a loss mask.
    """
    path = Path(path)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    offsets, hasher, masked = array("q", [0]), hashlib.sha256(), 0
    with atomic(path) as file, tempfile.TemporaryFile() as masks:

        def put(raw: bytes) -> None:
            hasher.update(raw)
            file.write(raw)

        for document in documents:
            ids, trained = document if isinstance(document, EncodedDocument) else (document, None)
            put(np.ascontiguousarray(ids, np.dtype(dtype).newbyteorder("<")).tobytes())
            offsets.append(offsets[-1] + len(ids))
            if trained is not None:
                masked += 1
                masks.write(trained.astype(np.uint8).tobytes())
        if masked not in (0, len(offsets) - 1):
            raise ValueError(f"{masked} of {len(offsets) - 1} documents have a loss mask; give one to all or to none")
        put(np.asarray(offsets, "<i8").tobytes())
        masks.seek(0)
        while chunk := masks.read(_CHUNK):
            put(chunk)
    description = {
        "format": "jaxllm-tokens",
        "version": 1,
        "dtype": dtype,
        "tokens": offsets[-1],
        "documents": len(offsets) - 1,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "sha256": hasher.hexdigest(),
    }
    write_json(sidecar(path), description | ({"masked": True} if masked else {}) | ({"about": about} if about else {}))


def open_tokens(path: Path | str, tokenizer: Tokenizer, *, name: str | None = None) -> TokenDocuments:
    """Opens a token file and checks all of it in one pass: size, hash, offsets, vocabulary.

    Raises DataError naming the file (and document row) for a missing or invalid sidecar, a truncated or altered file,
    tokens of another tokenizer, or ids outside the vocabulary.
    """
    path = Path(path)
    about = _description(path, tokenizer)
    dtype, count, documents = np.dtype(about["dtype"]).newbyteorder("<"), about["tokens"], about.get("documents")
    masked = about.get("masked", False)
    expected = count * dtype.itemsize + (0 if documents is None else 8 * (documents + 1)) + masked * count
    size = path.stat().st_size
    if size != expected:
        raise DataError(
            f"{at(path)}: {size} bytes, but {sidecar(path).name} describes {expected}; the file is truncated or altered"
        )
    found = file_sha256(path)
    if about.get("sha256", found) != found:
        raise DataError(f"{at(path)}: does not match the sha256 in {sidecar(path).name}; the file is damaged")
    tokens = np.memmap(path, dtype, "r", shape=(count,))
    if documents is None:
        offsets = np.array([0, count], np.int64)
    else:
        offsets = np.fromfile(path, "<i8", documents + 1, offset=count * dtype.itemsize).astype(np.int64)
        if offsets[0] != 0 or offsets[-1] != count or (np.diff(offsets) < 0).any():
            raise DataError(f"{at(path)}: the document offsets do not run from 0 up to {count}")
    for begin in range(0, count, _CHUNK):
        wrong = np.flatnonzero(tokens[begin : begin + _CHUNK] >= tokenizer.vocab_size)
        if wrong.size:
            place = begin + int(wrong[0])
            row = int(np.searchsorted(offsets, place, side="right"))
            raise DataError(
                f"{at(path, row)}: token {place} is {tokens[place]}, outside the tokenizer's vocabulary of "
                f"{tokenizer.vocab_size}; the file was made with another tokenizer"
            )
    trained = np.memmap(path, np.uint8, "r", expected - count, (count,)) if masked else None
    described = about.get("about", {})
    return TokenDocuments(tokens, offsets[:-1], np.diff(offsets), name or str(path), found, trained, described)


def _description(path: Path, tokenizer: Tokenizer) -> dict:
    file = sidecar(path)
    if not path.is_file():
        raise DataError(f"{at(path)}: no such file{how_to_make(path)}")
    if not file.is_file():
        raise DataError(
            f"{at(path)}: no {file.name} beside it, which describes its format (see jaxllm.data.token_files)"
        )
    about = read_json(file)
    needed = {"format": str, "dtype": str, "tokens": int, "tokenizer": str}
    if not isinstance(about, dict) or any(not isinstance(about.get(key), kind) for key, kind in needed.items()):
        raise DataError(f"{at(file)}: needs {', '.join(f'{key} ({kind.__name__})' for key, kind in needed.items())}")
    if about["format"] != "jaxllm-tokens" or about.get("version") != 1:
        raise DataError(
            f"{at(file)}: format {about['format']!r} version {about.get('version')}; legal: 'jaxllm-tokens' 1"
        )
    if about["dtype"] not in ("uint16", "uint32"):
        raise DataError(f"{at(file)}: dtype {about['dtype']!r}; legal: uint16, uint32")
    if not isinstance(about.get("documents", 0), int) or about["tokens"] < 1:
        raise DataError(f"{at(file)}: holds no tokens, or 'documents' is not a number")
    if about.get("masked", False) and (about["masked"] is not True or "documents" not in about):
        raise DataError(f"{at(file)}: 'masked' must be true if loss masks follow the offsets, else left out")
    if about["tokenizer"] != tokenizer.fingerprint:
        raise DataError(
            f"{at(path)}: made with another tokenizer (fingerprint {about['tokenizer'][:12]}, vocabulary "
            f"{about.get('vocab_size', 'unknown')}) than the one given ({tokenizer.fingerprint[:12]}, vocabulary "
            f"{tokenizer.vocab_size}); set `tokenizer` to the one it was made with"
        )
    return about
