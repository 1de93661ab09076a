"""Text to token ids and back. One small interface; the byte tokenizer is here, BPE in `bpe.py`.

Every tokenizer knows the bytes of each token (`token_bytes`), which gives exact streaming decode and exact
bits per byte. Special tokens have no bytes, and text never encodes to them: `"<|eos|>"` in a document is nine letters.
"""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar, SupportsInt

import numpy as np
from jaxtyping import Int

from jaxllm.files import DataError, at, digest, read_json, write_json

CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILE = "tokenizer.json"


class Tokenizer(ABC):
    """What every tokenizer offers.

    vocab_size: ids are 0 .. vocab_size - 1.
    bos_id, eos_id: begin and end of a document; None where the vocabulary has none.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None

    @abstractmethod
    def _ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids of each text, without specials."""

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

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> Int[np.ndarray, " tokens"]:
        """int32 ids of `text`; `bos` puts `start_id` before them and `eos` the end-of-document token after them.

        Raises DataError for text that is not valid Unicode (a lone surrogate).
        """
        return self.encode_batch([text], bos=bos, eos=eos)[0]

    def encode_batch(self, texts: Sequence[str], *, bos: bool = False, eos: bool = False) -> list[np.ndarray]:
        """`encode` of many texts, in parallel where the tokenizer can."""
        for index, text in enumerate(texts):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(f"text {index} is not valid Unicode: {error}") from None
        head = [self.start_id] if bos and self.start_id is not None else []
        tail = [self.eos_id] if eos and self.eos_id is not None else []
        ids = self._ids(texts)
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
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, specials=specials).decode("utf-8", errors="replace")

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
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: SupportsInt | Iterable[SupportsInt]) -> str:
        """The text that became complete with these ids; may be empty."""
        new = ids if isinstance(ids, Iterable) else [ids]
        return self._utf8.decode(self._tokenizer.decode_bytes(new))

    def flush(self) -> str:
        """The end of the stream: an unfinished character becomes U+FFFD. The decoder can then be used again."""
        return self._utf8.decode(b"", final=True)


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


class ByteTokenizer(Tokenizer):
    """Each UTF-8 byte is its own id; 256 and 257 begin and end a document.

    The other ids up to 272 are reserved for special tokens of later training (and 272 divides over 16 devices).
    """

    BOS, EOS = "<|bos|>", "<|eos|>"
    SPECIALS: ClassVar[list[str]] = [BOS, EOS, *(f"<|reserved_{n}|>" for n in range(14))]

    vocab_size = 256 + len(SPECIALS)
    bos_id = 256
    eos_id = 257

    def _ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    @cached_property
    def token_bytes(self) -> list[bytes]:
        return [bytes([byte]) for byte in range(256)] + [b""] * len(self.SPECIALS)

    @cached_property
    def special_names(self) -> dict[int, str]:
        return {256 + n: name for n, name in enumerate(self.SPECIALS)}

    @cached_property
    def fingerprint(self) -> str:
        return digest(["byte", 1, self.SPECIALS])

    def save(self, folder: Path | str) -> None:
        folder = Path(folder)
        added = [
            {"id": 256 + n, "content": name, "special": True, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
            for n, name in enumerate(self.SPECIALS)
        ]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        write_json(
            folder / TOKENIZER_FILE,
            {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
            | {"normalizer": None, "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level}
            | {"model": {"type": "BPE", "vocab": {char: n for n, char in enumerate(byte_alphabet())}, "merges": []}},
        )
        write_config(folder, self.BOS, self.EOS, kind="byte")


def write_config(folder: Path, bos: str | None, eos: str | None, *, kind: str) -> None:
    """`tokenizer_config.json`, the neighbour that names the tokens which begin and end a document."""
    write_json(
        folder / CONFIG_FILE,
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos, "jaxllm_tokenizer": kind},
    )


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Opens a saved tokenizer: a folder that holds `tokenizer.json`, or that file itself.

    Raises DataError when there is none, when it is not a byte-complete BPE, or when no end-of-document token is known.
    """
    path = Path(path).expanduser()
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"{at(path)}: no tokenizer here; legal: 'byte', 'bpe:SIZE', or the path of a {TOKENIZER_FILE}")
    config_file = file.with_name(CONFIG_FILE)
    config = read_json(config_file) if config_file.is_file() else {}
    if config.get("jaxllm_tokenizer") == "byte":
        return ByteTokenizer()
    from jaxllm.text.bpe import BPETokenizer  # the library it needs takes time to import

    return BPETokenizer.from_file(file, config)
