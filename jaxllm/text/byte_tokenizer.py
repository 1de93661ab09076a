"""Byte tokenizer: every UTF-8 byte is a token. Needs no training and encodes any text."""

import re
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from jaxllm.files import digest, write_json
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.text.tokenizer_files import TOKENIZER_FILE, write_config


def byte_alphabet() -> list[str]:
    """Byte-level alphabet: the printable character that stands for each byte in a vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


class ByteTokenizer(Tokenizer):
    """Tokenizer whose ids are UTF-8 bytes; ids 256 and 257 are bos and eos.

    The other ids below 272 are reserved for special tokens of later training (and 272 divides over 16 devices).
    """

    BOS, EOS = "<|bos|>", "<|eos|>"
    SPECIALS: ClassVar[list[str]] = [BOS, EOS, *(f"<|reserved_{n}|>" for n in range(14))]

    kind = "bytes"
    vocab_size = 256 + len(SPECIALS)
    bos_id = 256
    eos_id = 257

    def _ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def _marked_ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        names = {name: np.array([index], np.int32) for index, name in self.special_names.items()}
        pieces = (_SPECIAL.split(text) for text in texts)
        return [np.concatenate([names[one] if one in names else self._ids([one])[0] for one in row]) for row in pieces]

    def _content_ids(self, text: str, content: Collection[int]) -> np.ndarray:
        back = {ord(mark): char for char, mark in self._content_marks.items()}
        ids = {name: np.array([index], np.int32) for index, name in self.special_names.items()}
        parts = _SPECIAL.split(self._with_marks(text, content))
        return np.concatenate([ids[one] if one in ids else self._ids([one.translate(back)])[0] for one in parts])

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Bytes of each id; empty for special tokens."""
        return [bytes([byte]) for byte in range(256)] + [b""] * len(self.SPECIALS)

    @cached_property
    def special_names(self) -> dict[int, str]:
        """Names of the special tokens by id."""
        return {256 + n: name for n, name in enumerate(self.SPECIALS)}

    @cached_property
    def fingerprint(self) -> str:
        """Hash over everything that determines the ids."""
        return digest(["byte", 1, self.SPECIALS])

    def save(self, folder: Path | str) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`."""
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


_SPECIAL = re.compile("(" + "|".join(map(re.escape, ByteTokenizer.SPECIALS)) + ")")
