"""Text to token ids and back: the interface of every tokenizer, and decoding as ids come.

Every tokenizer knows the bytes of each token (`token_bytes`), which gives exact streaming decode and exact
bits per byte. Special tokens have no bytes, and text never encodes to them: `"<|eos|>"` in a document is nine letters.
Only the text of a chat template is encoded with `specials=True`, which makes it one token there.
"""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import SupportsInt

import numpy as np
from jaxtyping import Int

from jaxllm.files import DataError


class Tokenizer(ABC):
    """What every tokenizer offers.

    kind: what it is, for people to read: "byte-level BPE".
    vocab_size: ids are 0 .. vocab_size - 1.
    bos_id, eos_id: begin and end of a document; None where the vocabulary has none.
    adds_bos: whether the model expects `start_id` before a prompt.
    prefix_space: whether text is encoded with a space before it, which decoding takes away.
    """

    kind: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool = True
    prefix_space: bool = False

    @abstractmethod
    def _ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids of each text, in which names of special tokens are text."""

    @abstractmethod
    def _marked_ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids of each text, in which names of special tokens are those tokens."""

    @cached_property
    @abstractmethod
    def token_bytes(self) -> list[bytes]:
        """The bytes each id stands for; empty for special tokens."""

    @cached_property
    @abstractmethod
    def special_names(self) -> dict[int, str]:
        """Names of the special tokens, by id."""

    @cached_property
    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 over everything that decides the ids: vocabulary, merges, splitting rules, specials."""

    @abstractmethod
    def save(self, folder: Path | str) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, which `load_tokenizer` and transformers both open."""

    @property
    def start_id(self) -> int | None:
        """What a document begins with: bos, or eos where there is no bos (the GPT-2 convention), else nothing."""
        return self.eos_id if self.bos_id is None else self.bos_id

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens at which generation ends: the end of a document, and in chat models the end of a turn."""
        return () if self.eos_id is None else (self.eos_id,)

    def encode(
        self, text: str, *, bos: bool = False, eos: bool = False, specials: bool = False
    ) -> Int[np.ndarray, " tokens"]:
        """int32 ids of `text`; `bos` puts `start_id` before them and `eos` the end-of-document token after them.

        `specials`: the text comes from a chat template, so the name of a special token in it is that token.

        Raises DataError for text that is not valid Unicode (a lone surrogate), or that the vocabulary cannot spell.
        """
        return self.encode_batch([text], bos=bos, eos=eos, specials=specials)[0]

    def encode_batch(
        self, texts: Sequence[str], *, bos: bool = False, eos: bool = False, specials: bool = False
    ) -> list[np.ndarray]:
        """`encode` of many texts, in parallel where the tokenizer can."""
        for index, text in enumerate(texts):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(f"text {index} is not valid Unicode: {error}") from None
        head = [self.start_id] if bos and self.start_id is not None else []
        tail = [self.eos_id] if eos and self.eos_id is not None else []
        ids = self._marked_ids(texts) if specials else self._ids(texts)
        if not head and not tail:
            return ids
        start, end = np.array(head, np.int32), np.array(tail, np.int32)
        return [np.concatenate([start, one, end]) for one in ids]

    def decode_bytes(self, ids: Iterable[SupportsInt], *, specials: bool = False) -> bytes:
        """The bytes of `ids`; `specials` spells special tokens out instead of leaving them away."""
        table = self._spelt_out if specials else self.token_bytes
        listed = ids.tolist() if isinstance(ids, np.ndarray) else [int(one) for one in ids]
        if listed and (min(listed) < 0 or max(listed) >= self.vocab_size):
            wrong = next(one for one in listed if not 0 <= one < self.vocab_size)
            raise ValueError(f"token id {wrong} is outside this tokenizer's vocabulary of {self.vocab_size}")
        return b"".join(map(table.__getitem__, listed))

    def decode(self, ids: Iterable[SupportsInt], *, specials: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, and a `prefix_space` is taken away."""
        raw = self.decode_bytes(ids, specials=specials)
        return (raw.removeprefix(b" ") if self.prefix_space else raw).decode("utf-8", errors="replace")

    @cached_property
    def token_lengths(self) -> Int[np.ndarray, " V"]:
        """int32 bytes per token: `token_lengths[targets].sum()` is the text that a loss over `targets` covers."""
        return np.array([len(one) for one in self.token_bytes], np.int32)

    @cached_property
    def _spelt_out(self) -> list[bytes]:
        return [
            self.special_names[index].encode() if index in self.special_names else plain
            for index, plain in enumerate(self.token_bytes)
        ]


class StreamDecoder:
    """Decodes a stream of ids to text as it comes, holding back the bytes of a character until it is whole.

    The pieces joined, with `flush()` at the end, equal `tokenizer.decode` of all the ids.

    continues: the stream goes on from other text, so a space at its beginning is kept (see `Tokenizer.prefix_space`).
    spelt: special tokens whose names are given.
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = False, spelt: Iterable[int] = ()):
        self._tokenizer, self._spelt = tokenizer, frozenset(spelt)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strips = tokenizer.prefix_space and not continues
        self._at_start = True

    def push(self, ids: SupportsInt | Iterable[SupportsInt]) -> str:
        """The text that became complete with these ids; may be empty."""
        new = ids if isinstance(ids, Iterable) else [ids]
        if self._spelt:
            raw = b"".join(self._tokenizer.decode_bytes([i], specials=int(i) in self._spelt) for i in new)
        else:
            raw = self._tokenizer.decode_bytes(new)
        if raw and self._at_start:
            self._at_start = False
            raw = raw.removeprefix(b" ") if self._strips else raw
        return self._utf8.decode(raw)

    def flush(self) -> str:
        """The end of the stream: an unfinished character becomes U+FFFD. The decoder can then be used again."""
        self._at_start = True
        return self._utf8.decode(b"", final=True)
