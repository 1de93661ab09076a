"""Byte-level BPE through the `tokenizers` library: trained on the corpus, or loaded from a `tokenizer.json`.

Byte-level (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", 2.2): merges run over the UTF-8
bytes of the text, so every text has an encoding and nothing is unknown.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxllm.files import DataError, at, atomic, digest, file_sha256, read_json
from jaxllm.text.tokenizer import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    ByteTokenizer,
    Tokenizer,
    byte_alphabet,
    load_tokenizer,
    write_config,
)

log = logging.getLogger(__name__)

# (bos, eos) of vocabularies that come without a tokenizer_config.json; the first whose eos is present is taken.
KNOWN_ENDS = (
    ("<|bos|>", "<|eos|>"),
    ("<|begin_of_text|>", "<|end_of_text|>"),
    ("<|endoftext|>", "<|endoftext|>"),
    ("<s>", "</s>"),
    ("<bos>", "<eos>"),
)

# Bytes that occur in no UTF-8 text; a vocabulary may lack them.
NEVER_IN_UTF8 = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])


class BPETokenizer(Tokenizer):
    """A byte-level BPE. Make one with `train_bpe`, or with `load_tokenizer`.

    definition: the text of a `tokenizer.json`, kept as it is, so that saving gives back the same file.
    bos, eos: names of the tokens that begin and end a document; bos may be None.
    where: what to call this tokenizer in errors.
    """

    def __init__(self, definition: str, *, bos: str | None, eos: str | None, where: str):
        try:
            self._json = json.loads(definition)
            self._library = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{where}: not a tokenizer.json ({error})") from None
        if not _has_byte_level(self._json.get("decoder")) or self._json["model"].get("type") != "BPE":
            kind, decoder = self._json["model"].get("type"), (self._json.get("decoder") or {}).get("type")
            raise DataError(
                f"{where}: a {kind} with decoder {decoder}; "
                "legal: byte-level BPE, as of GPT-2, Llama 3, Qwen or SmolLM2"
            )
        # A tokenizer.json may carry truncation and padding from its training; both would change documents silently.
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True  # a special token's name inside a text is only text
        self._definition, self._bos, self._eos, self._where = definition, bos, eos, where
        self._vocabulary = self._library.get_vocab(with_added_tokens=True)
        self._added = self._library.get_added_tokens_decoder()
        self.vocab_size = max(self._vocabulary.values()) + 1
        self.bos_id, self.eos_id = self._special(bos), self._special(eos)
        alphabet = byte_alphabet()
        absent = [byte for byte in range(256) if alphabet[byte] not in self._vocabulary]
        self._absent = bytes(byte for byte in absent if byte not in NEVER_IN_UTF8)

    @classmethod
    def from_file(cls, file: Path, config: dict[str, Any]) -> "BPETokenizer":
        """`config`: the neighbouring tokenizer_config.json, or {} where there is none."""
        try:
            definition = file.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{at(file)}: not a tokenizer.json ({error})") from None
        bos, eos = _name(config.get("bos_token")), _name(config.get("eos_token"))
        if eos is None:
            names = {token["content"] for token in _json_object(definition, file).get("added_tokens", [])}
            ends = [pair for pair in KNOWN_ENDS if pair[1] in names]
            if not ends:
                raise DataError(
                    f"{at(file)}: which token ends a document? Put a {CONFIG_FILE} with 'eos_token' beside it "
                    f"(special tokens here: {', '.join(sorted(names)) or 'none'})"
                )
            bos, eos = ends[0] if ends[0][0] in names else (None, ends[0][1])
        return cls(definition, bos=bos, eos=eos, where=at(file))

    def _special(self, name: str | None) -> int | None:
        if name is None:
            return None
        if name not in self._vocabulary:
            raise DataError(f"{self._where}: the special token {name!r} is not in the vocabulary")
        return self._vocabulary[name]

    def _ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self._absent:
            self._refuse_absent_bytes(texts)
        encodings = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def _refuse_absent_bytes(self, texts: Sequence[str]) -> None:
        """The library drops what has no token; nothing may vanish from a text unseen."""
        for text in texts:
            raw = text.encode()
            if len(raw.translate(None, self._absent)) != len(raw):
                character = next(char for char in text if any(byte in self._absent for byte in char.encode()))
                raise DataError(f"{self._where}: this vocabulary cannot spell {character!r}")

    @cached_property
    def token_bytes(self) -> list[bytes]:
        back = {char: byte for byte, char in enumerate(byte_alphabet())}
        table = [b""] * self.vocab_size
        for token, index in self._library.get_vocab(with_added_tokens=False).items():
            table[index] = bytes(back[char] for char in token) if set(token) <= back.keys() else token.encode()
        for index, added in self._added.items():
            table[index] = b"" if added.special else added.content.encode()
        return table

    @cached_property
    def special_names(self) -> dict[int, str]:
        return {index: added.content for index, added in self._added.items() if added.special}

    @cached_property
    def fingerprint(self) -> str:
        model = self._json["model"]
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        added = sorted((index, one.content, one.special) for index, one in self._added.items())
        rules = [self._json.get("normalizer"), self._json.get("pre_tokenizer")]
        return digest(["bpe", 1, model["vocab"], merges, added, rules, self._bos, self._eos])

    def save(self, folder: Path | str) -> None:
        folder = Path(folder)
        with atomic(folder / TOKENIZER_FILE) as file:
            file.write(self._definition.encode())
        write_config(folder, self._bos, self._eos, kind="bpe")


def train_bpe(texts: Iterable[str], vocab_size: int, *, where: str) -> BPETokenizer:
    """Trains a byte-level BPE with exactly `vocab_size` tokens: specials, 256 bytes, merges. Same texts, same result.

    Raises DataError when the size is below what bytes and specials need, or above what the texts have merges for.
    """
    specials = ByteTokenizer.SPECIALS
    least = 256 + len(specials)
    if vocab_size < least:
        raise DataError(f"bpe:{vocab_size}: too small; bytes and special tokens alone are {least}")
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(iter(texts), trainer)
    reached = library.get_vocab_size()
    if reached != vocab_size:
        raise DataError(f"{where}: the text has merges for {reached} tokens only; use 'bpe:{reached}' or 'byte'")
    return BPETokenizer(library.to_str(), bos=ByteTokenizer.BOS, eos=ByteTokenizer.EOS, where=f"bpe:{vocab_size}")


def cached_bpe(texts: Iterable[str], vocab_size: int, *, content_hash: str, where: str, cache: Path) -> Tokenizer:
    """`train_bpe`, or its earlier result for the same text. A damaged cache entry is trained again, never used."""
    folder = cache / "tokenizers" / f"bpe-{vocab_size}-{digest([content_hash, ByteTokenizer.SPECIALS])[:16]}"
    stamp = folder / "sha256.json"
    if stamp.is_file():
        try:
            found = {name: file_sha256(folder / name) for name in (TOKENIZER_FILE, CONFIG_FILE)}
            if found == read_json(stamp):
                return load_tokenizer(folder)
            log.warning("%s: does not match its hash; training the tokenizer again", folder)
        except (OSError, DataError) as error:
            log.warning("%s; training the tokenizer again", error)
    trained = train_bpe(texts, vocab_size, where=where)
    trained.save(folder)
    hashes = {name: file_sha256(folder / name) for name in (TOKENIZER_FILE, CONFIG_FILE)}
    with atomic(stamp) as file:  # last: an entry without its stamp is not an entry
        file.write(json.dumps(hashes).encode())
    return trained


def _has_byte_level(part: dict[str, Any] | None) -> bool:
    """Whether a decoder is ByteLevel, or a sequence that holds it."""
    return part is not None and any(one.get("type") == "ByteLevel" for one in part.get("decoders", [part]))


def _name(token: Any) -> str | None:
    """A token in tokenizer_config.json is its name or an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _json_object(text: str, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DataError(f"{at(file)}: not a tokenizer.json ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{at(file)}: not a tokenizer.json (the top level is not an object)")
    return value
