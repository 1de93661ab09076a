"""Tokenizer interface, and streaming decoding of token ids to text.

Every tokenizer knows the bytes of each token (`token_bytes`), which makes streaming decoding and bits per byte exact.
Special tokens have no bytes, and text never encodes to them: `"<|eos|>"` in a document is seven characters. Prompts and
rendered chat templates are encoded with `specials=True`, where the name of a special token is that token; in the
content of a conversation it is text (`encode_with_content`).
"""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import SupportsInt

import numpy as np
from jaxtyping import Int

from jaxllm.files import DataError

MARKS = tuple(map(chr, (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xE100))))
"""Characters that stand for characters of content while a conversation is encoded: noncharacters first."""


class Tokenizer(ABC):
    """Abstract tokenizer.

    Attributes:
        kind: human-readable kind, such as "byte-level BPE".
        vocab_size: size of the vocabulary; ids are 0 .. vocab_size - 1.
        bos_id, eos_id: ids of the tokens that begin and end a document; None where the vocabulary has none.
        adds_bos: whether the model expects `start_id` before a prompt.
        prefix_space: whether encoding prepends a space to the text, which decoding removes.
    """

    kind: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool = True
    prefix_space: bool = False

    @abstractmethod
    def _ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids (int32) of each text; names of special tokens are encoded as text."""

    @abstractmethod
    def _marked_ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids (int32) of each text; names of special tokens are encoded as those tokens."""

    @cached_property
    @abstractmethod
    def token_bytes(self) -> list[bytes]:
        """Bytes of each id; empty for special tokens."""

    @cached_property
    @abstractmethod
    def special_names(self) -> dict[int, str]:
        """Names of the special tokens by id."""

    @abstractmethod
    def _content_ids(self, text: str, content: Collection[int]) -> np.ndarray:
        """Token ids (int32) of a text; see `encode_with_content`."""

    @cached_property
    def control_names(self) -> frozenset[str]:
        """Names of control tokens, which content must not become: here, those of the special tokens."""
        return frozenset(self.special_names.values())

    @cached_property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash (sha256) over everything that determines the ids: vocabulary, merges, pre-tokenizer, special tokens."""

    @abstractmethod
    def save(self, folder: Path | str) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, which `load_tokenizer` and transformers both open."""

    @property
    def start_id(self) -> int | None:
        """Id that begins a document: bos, or eos where there is no bos (the GPT-2 convention), or None."""
        return self.eos_id if self.bos_id is None else self.bos_id

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end generation: end of document, and for chat models end of turn."""
        return () if self.eos_id is None else (self.eos_id,)

    def encode(
        self, text: str, *, bos: bool = False, eos: bool = False, specials: bool = False
    ) -> Int[np.ndarray, " tokens"]:
        """Encodes a text as token ids, int32 [tokens].

        Args:
            text: text to encode.
            bos: prepend `start_id`.
            eos: append `eos_id`.
            specials: encode names of special tokens as those tokens, for prompts and rendered chat templates.

        Raises:
            DataError: the text is not valid Unicode (a lone surrogate), or the vocabulary cannot spell it.
        """
        return self.encode_batch([text], bos=bos, eos=eos, specials=specials)[0]

    def encode_batch(
        self, texts: Sequence[str], *, bos: bool = False, eos: bool = False, specials: bool = False
    ) -> list[np.ndarray]:
        """Encodes many texts like `encode`, in parallel where the tokenizer can."""
        for index, text in enumerate(texts):
            _check_unicode(index, text)
        head = [self.start_id] if bos and self.start_id is not None else []
        tail = [self.eos_id] if eos and self.eos_id is not None else []
        ids = self._marked_ids(texts) if specials else self._ids(texts)
        if not head and not tail:
            return ids
        start, end = np.array(head, np.int32), np.array(tail, np.int32)
        return [np.concatenate([start, one, end]) for one in ids]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes documents to train on, see `encode`: each begins as a prompt does, and ends with `eos_id`.

        A model that only ever saw text behind `start_id` answers a prompt without it wrongly.
        """
        return self.encode_batch(texts, bos=self.adds_bos, eos=True)

    def encode_with_content(self, text: str, content: Collection[int]) -> Int[np.ndarray, " tokens"]:
        """Encodes a rendered chat template like `encode` with `specials`, but no control token has a part in content.

        Args:
            text: rendered text.
            content: positions of characters of content, at least one of each name that content has a part in, and each
                the first or the last character of some control token's name.

        Raises:
            DataError: see `encode`; or the text has one of the noncharacters that stand for these characters meanwhile.
        """
        _check_unicode(0, text)
        if unusable := set(text) & set(self._content_marks.values()):
            raise DataError(f"the text has U+{ord(min(unusable)):04X}, a noncharacter, beside a control token's name")
        return self._content_ids(text, content)

    @cached_property
    def _content_marks(self) -> dict[str, str]:
        """Characters that stand for the first and last characters of control tokens' names, by these."""
        edges = sorted({name[at] for name in self.control_names if name for at in (0, -1)})
        if len(edges) > len(MARKS):
            raise DataError(f"control tokens' names begin and end with {len(edges)} characters; at most {len(MARKS)}")
        return dict(zip(edges, MARKS, strict=False))

    def _with_marks(self, text: str, content: Collection[int]) -> str:
        """The text with the characters at these positions replaced by their marks."""
        marked = list(text)
        for place in content:
            marked[place] = self._content_marks[text[place]]
        return "".join(marked)

    def decode_bytes(self, ids: Iterable[SupportsInt], *, specials: bool = False) -> bytes:
        """Bytes of `ids`; `specials` includes the names of special tokens, which are omitted otherwise.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        table = self._spelt_out if specials else self.token_bytes
        listed = ids.tolist() if isinstance(ids, np.ndarray) else [int(one) for one in ids]
        if listed and (min(listed) < 0 or max(listed) >= self.vocab_size):
            wrong = next(one for one in listed if not 0 <= one < self.vocab_size)
            raise ValueError(f"token id {wrong} is outside this tokenizer's vocabulary of {self.vocab_size}")
        return b"".join(map(table.__getitem__, listed))

    def decode(self, ids: Iterable[SupportsInt], *, specials: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, and a `prefix_space` is removed."""
        raw = self.decode_bytes(ids, specials=specials)
        return (raw.removeprefix(b" ") if self.prefix_space else raw).decode("utf-8", errors="replace")

    def prompt_text(self, ids: Sequence[int]) -> str:
        """Text of a prompt, for an echo: names of special tokens are part of it, but not of the one that begins it."""
        return self.decode(ids[1:] if self.is_begun(ids) else ids, specials=True)

    def is_begun(self, ids: Sequence[int]) -> bool:
        """Whether a prompt begins with the token that begins a document, where that is put before every text."""
        return len(ids) > 0 and ids[0] == self.start_id and (self.adds_bos or len(ids) == 1)

    @cached_property
    def token_lengths(self) -> Int[np.ndarray, " V"]:
        """Bytes per token, int32 [V]: `token_lengths[targets].sum()` bytes are covered by a loss over `targets`."""
        return np.array([len(one) for one in self.token_bytes], np.int32)

    @cached_property
    def _spelt_out(self) -> list[bytes]:
        return [
            self.special_names[index].encode() if index in self.special_names else plain
            for index, plain in enumerate(self.token_bytes)
        ]


def _check_unicode(index: int, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"text {index} is not valid Unicode: {error}") from None


class StreamDecoder:
    """Streaming decoder from token ids to text; holds back incomplete UTF-8 characters.

    The concatenated outputs, with that of `flush()`, equal `tokenizer.decode` of all the ids.

    Args:
        tokenizer: tokenizer of the ids.
        continues: the stream continues other text, so a leading space is kept (see `Tokenizer.prefix_space`).
        spelt: ids of special tokens whose names are part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = False, spelt: Iterable[int] = ()):
        self._tokenizer, self._spelt = tokenizer, frozenset(spelt)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strips = tokenizer.prefix_space and not continues
        self._at_start = True

    def push(self, ids: SupportsInt | Iterable[SupportsInt]) -> str:
        """Text that these ids complete; may be empty."""
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
        """Ends the stream; an incomplete character becomes U+FFFD. The decoder can be used again afterwards."""
        self._at_start = True
        return self._utf8.decode(b"", final=True)
