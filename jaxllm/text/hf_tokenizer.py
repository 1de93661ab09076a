"""Hugging Face tokenizers: a tokenizer.json run by the `tokenizers` library, byte-level BPE or SentencePiece.

Byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM2, OLMo 2) spell each byte as a printable character;
SentencePiece ones (Llama 2, Mistral, Gemma, Phi-3) spell a space as U+2581 and other bytes as `<0xNN>`.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from jaxllm.files import DataError, at, atomic, digest
from jaxllm.text.byte_tokenizer import byte_alphabet
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.text.tokenizer_files import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    read_stop_ids,
    token_name,
    write_config,
    write_stop_ids,
)
from jaxllm.text.tokenizer_json import SPACE, prefixed_spaces

# (bos, eos) candidates for vocabularies without a tokenizer_config.json; the first whose eos is present is used.
KNOWN_BOS_EOS = (
    ("<|bos|>", "<|eos|>"),
    ("<|begin_of_text|>", "<|end_of_text|>"),
    ("<|endoftext|>", "<|endoftext|>"),
    ("<s>", "</s>"),
    ("<bos>", "<eos>"),
)

# Bytes that never occur in UTF-8 text, so a vocabulary may lack them.
NEVER_IN_UTF8 = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])

# Tokens spelt like special ones that a file does not mark as such: DeepSeek's have full-width bars.
_CONTROL_NAME = re.compile("<[|\uff5c].+[|\uff5c]>", re.DOTALL)
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class HFTokenizer(Tokenizer):
    """Tokenizer defined by a tokenizer.json; created by `train_bpe`, `load_tokenizer` and `tokenizer_from_gguf`.

    Args:
        definition: text of a `tokenizer.json`, kept unchanged, so that saving writes the same file.
        bos, eos: names of the tokens that begin and end a document; either may be None.
        where: name of the tokenizer in errors.
        adds_bos: whether prompts begin with bos.
        stop_ids: ids of tokens that end generation, besides `eos`.

    Raises:
        DataError: the definition is invalid or of an unsupported kind.
    """

    def __init__(
        self,
        definition: str,
        *,
        bos: str | None,
        eos: str | None,
        where: str,
        adds_bos: bool = True,
        stop_ids: Sequence[int] = (),
    ):
        self._definition, self._bos, self._eos, self._where = definition, bos, eos, where
        try:
            self._json = json.loads(definition)
            self._kind = self._json["model"].get("type", "BPE")
            self._begins = _prepends_to_each_part(self._json)
            plain, self._renamed = _for_plain_text(self._json)
            self._unmarked = _unmarked_control_names(self._json)
            self._plain = _library(definition if plain is self._json else json.dumps(plain))
            self._plain.encode_special_tokens = True  # names of special tokens in a document are encoded as text
        except Exception as error:  # the tokenizers library raises bare Exception
            raise DataError(f"{where}: not a tokenizer.json ({error})") from None
        self._byte_level, self.prefix_space = self._read_decoder()
        self.kind = "byte-level BPE" if self._byte_level else f"SentencePiece {self._kind}"
        self._added = self._plain.get_added_tokens_decoder()
        self._specials = {i for i, one in self._added.items() if one.special and self._name(one) not in self._unmarked}
        vocabulary = self._plain.get_vocab(with_added_tokens=True)
        self._vocabulary = {self._renamed.get(token, token): index for token, index in vocabulary.items()}
        self.vocab_size = max(self._vocabulary.values()) + 1
        self.bos_id, self.eos_id = self._special(bos), self._special(eos)
        self.adds_bos = adds_bos
        self._stop_ids = tuple(dict.fromkeys([*super().stop_ids, *stop_ids]))
        if wrong := [one for one in self._stop_ids if not 0 <= one < self.vocab_size]:
            raise DataError(f"{where}: the stop token {wrong[0]} is outside the vocabulary of {self.vocab_size}")
        self._absent = self._absent_bytes()

    @classmethod
    def from_file(cls, file: Path, config: Mapping[str, Any]) -> "HFTokenizer":
        """Opens a tokenizer.json; `config` is the tokenizer_config.json beside it, or {}.

        Raises:
            DataError: the file is invalid, or it is unknown which token ends a document.
        """
        try:
            definition = file.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{at(file)}: not a tokenizer.json ({error})") from None
        parsed = _json_object(definition, file)
        bos, eos = token_name(config.get("bos_token")), token_name(config.get("eos_token"))
        if eos is None:
            names = {token["content"] for token in parsed.get("added_tokens", [])}
            ends = [pair for pair in KNOWN_BOS_EOS if pair[1] in names]
            if not ends:
                raise DataError(
                    f"{at(file)}: which token ends a document? Put a {CONFIG_FILE} with 'eos_token' beside it "
                    f"(special tokens here: {', '.join(sorted(names)) or 'none'})"
                )
            bos, eos = ends[0] if ends[0][0] in names else (None, ends[0][1])
        adds_bos = config.get("add_bos_token")
        if adds_bos is None:  # tokenizers written by this package add bos; others say so in their post-processor
            adds_bos = "jaxllm_tokenizer" in config or (bos is not None and _begins_with(parsed, bos))
        stop_ids = read_stop_ids(file.parent)
        return cls(definition, bos=bos, eos=eos, where=at(file), adds_bos=adds_bos, stop_ids=stop_ids)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end generation."""
        return self._stop_ids

    def _name(self, added: tokenizers.AddedToken) -> str:
        return self._renamed.get(added.content, added.content)

    def _special(self, name: str | None) -> int | None:
        if name is None:
            return None
        if name not in self._vocabulary:
            raise DataError(f"{self._where}: the special token {name!r} is not in the vocabulary")
        return self._vocabulary[name]

    def _read_decoder(self) -> tuple[bool, bool]:
        """Reads the decoder: (whether tokens are spelt in bytes, whether decoding removes a leading space)."""
        decoder = self._json.get("decoder") or {}
        steps = {one["type"]: one for one in decoder.get("decoders", [decoder] if decoder else [])}
        if "ByteLevel" in steps and self._kind == "BPE":
            return True, False
        if self._kind in ("BPE", "Unigram"):
            if space := steps.get("Metaspace"):
                prefix = space.get("prepend_scheme", "always") != "never" and space.get("add_prefix_space", True)
                return False, prefix
            if steps.get("Replace", {}).get("pattern") == {"String": SPACE}:
                return False, steps.get("Strip", {}).get("start", 0) > 0
        raise DataError(
            f"{self._where}: a {self._kind} with decoder {decoder.get('type')}; legal: byte-level BPE, as of GPT-2, "
            "Llama 3, Qwen or SmolLM2, and SentencePiece's BPE or Unigram, as of Llama 2, Mistral, Gemma or Phi-3"
        )

    # Encoding

    def _ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        texts = [f" {text}" if text and self._begins else text for text in texts]
        return self._encoded(self._plain, texts)

    def _marked_ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self._encoded(self._marked, texts)

    @cached_property
    def _marked(self) -> tokenizers.Tokenizer:
        return _library(self._definition)

    def _content_ids(self, text: str, content: Collection[int]) -> np.ndarray:
        library, ids_here = self._content_library
        marked = self._with_marks(text, content)
        if self._absent:
            self._refuse_absent_bytes([text])
        ids = np.array(library.encode(marked, add_special_tokens=False).ids, np.int32)
        if self._unknown_id is not None:
            self._refuse_unknown(library, [marked], [ids])
        return np.array([ids_here.get(one, one) for one in ids.tolist()], np.int32)

    @cached_property
    def _content_library(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """Library that encodes marked text, and ids of the control tokens by their ids there."""
        library = _library(json.dumps(_for_marked_text(self._json, self.control_names, self._content_marks)))
        found = {name: library.token_to_id(name) for name in self.control_names}
        return library, {there: self._vocabulary[name] for name, there in found.items() if there is not None}

    def _encoded(self, library: tokenizers.Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
        if self._absent:
            self._refuse_absent_bytes(texts)
        encodings = library.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [np.array(encoding.ids, np.int32) for encoding in encodings]
        if self._unknown_id is not None:
            self._refuse_unknown(library, texts, ids)
        return ids

    def _absent_bytes(self) -> bytes:
        """Bytes of UTF-8 text for which a byte-level vocabulary has no token."""
        if not self._byte_level:
            return b""
        absent = [byte for byte, char in enumerate(byte_alphabet()) if char not in self._vocabulary]
        return bytes(byte for byte in absent if byte not in NEVER_IN_UTF8)

    @cached_property
    def _unknown_id(self) -> int | None:
        """Id of the unknown token of a SentencePiece vocabulary; None if the vocabulary can spell every byte."""
        if self._byte_level:
            return None
        model = self._json["model"]
        spelt = (f"<0x{byte:02X}>" in self._vocabulary for byte in range(256) if byte not in NEVER_IN_UTF8)
        if model.get("byte_fallback") and all(spelt):
            return None
        unknown = self._vocabulary.get(model.get("unk_token")) if self._kind == "BPE" else model.get("unk_id")
        if unknown is None:
            raise DataError(
                f"{self._where}: has neither tokens for all bytes nor an unknown token; text would be lost silently"
            )
        return unknown

    def _refuse_absent_bytes(self, texts: Sequence[str]) -> None:
        """Refuses text with bytes that have no token; the library would drop them silently."""
        for text in texts:
            raw = text.encode()
            if len(raw.translate(None, self._absent)) != len(raw):
                character = next(char for char in text if any(byte in self._absent for byte in char.encode()))
                raise DataError(f"{self._where}: this vocabulary cannot spell {character!r}")

    def _refuse_unknown(self, library: tokenizers.Tokenizer, texts: Sequence[str], ids: list[np.ndarray]) -> None:
        for text, row in zip(texts, ids, strict=True):
            unknown = row == self._unknown_id
            if unknown.any():
                offsets = library.encode(text, add_special_tokens=False).offsets
                spans = [text[begin:end] for (begin, end), one in zip(offsets, unknown, strict=True) if one]
                own_name = None if library is self._plain else self.special_names.get(self._unknown_id or 0)
                wrong = [span for span in spans if span != own_name]
                if wrong:
                    raise DataError(f"{self._where}: this vocabulary cannot spell {wrong[0]!r}")

    # The vocabulary

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """Bytes of each id; empty for special tokens."""
        spelt = self._byte_spelling if self._byte_level else self._piece_spelling
        table = [b""] * self.vocab_size
        for token, index in self._vocabulary.items():
            table[index] = spelt(token)
        for index, added in self._added.items():
            plain = self._name(added) if self._byte_level else self._name(added).replace(SPACE, " ")
            table[index] = b"" if index in self._specials else plain.encode()
        return table

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        return {char: byte for byte, char in enumerate(byte_alphabet())}

    def _byte_spelling(self, token: str) -> bytes:
        back = self._alphabet
        return bytes(back[char] for char in token) if set(token) <= back.keys() else token.encode()

    def _piece_spelling(self, piece: str) -> bytes:
        byte = _BYTE_PIECE.fullmatch(piece) if self._json["model"].get("byte_fallback") else None
        return bytes.fromhex(byte[1]) if byte else piece.replace(SPACE, " ").encode()

    @cached_property
    def special_names(self) -> dict[int, str]:
        """Names of the special tokens by id."""
        return {index: self._name(self._added[index]) for index in sorted(self._specials)}

    @cached_property
    def control_names(self) -> frozenset[str]:
        """Names of the special tokens, and of tokens spelt like them."""
        return frozenset(self.special_names.values()) | self._unmarked

    @cached_property
    def fingerprint(self) -> str:
        """Hash over everything that determines the ids."""
        model = self._json["model"]
        added = sorted((index, self._name(one), index in self._specials) for index, one in self._added.items())
        rules = [self._json.get("normalizer"), self._json.get("pre_tokenizer")]
        rules += [sorted(self._unmarked)] if self._unmarked else []
        if self._byte_level:
            merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
            return digest(["bpe", 1, model["vocab"], merges, added, rules, self._bos, self._eos])
        return digest(["sentencepiece", 1, model, added, rules, self._bos, self._eos])

    def save(self, folder: Path | str) -> None:
        """Writes the tokenizer.json unchanged, `tokenizer_config.json`, and stop ids if they are not the default."""
        folder = Path(folder)
        with atomic(folder / TOKENIZER_FILE) as file:
            file.write(self._definition.encode())
        write_config(folder, self._bos, self._eos, kind=self._kind.lower(), adds_bos=self.adds_bos)
        if self._stop_ids != super().stop_ids:
            write_stop_ids(folder, self._stop_ids)


def _library(definition: str) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer.from_str(definition)
    # A tokenizer.json may enable truncation and padding, which would change documents silently.
    library.no_truncation()
    library.no_padding()
    return library


def _for_plain_text(definition: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Definition that encodes no text as a special token, for documents; and its renamed tokens: {new name: name}.

    Merges or scores may lead to special tokens that are part of the model's vocabulary. Their names get a leading
    space there, which no other token has, because every kind of vocabulary spells spaces as another character. A
    normalizer that prepends a space to every part between added tokens is replaced: callers prepend it once.
    """
    model, unmarked = definition["model"], _unmarked_control_names(definition)
    names = {one["content"] for one in definition.get("added_tokens", []) if one["special"]} | unmarked
    changed, new = _without_pieces(model, names)
    prepends = _prepends_to_each_part(definition)
    if not new and not prepends and not unmarked:
        return definition, {}
    added = [
        {**one, "content": new.get(one["content"], one["content"]), "special": one["content"] in names}
        for one in definition["added_tokens"]
    ]
    plain = {**definition, "model": changed, "added_tokens": added, "post_processor": None}
    if prepends:
        plain["normalizer"] = prefixed_spaces(prefix=False)
    return plain, {renamed: name for name, renamed in new.items()}


def _for_marked_text(definition: dict[str, Any], names: Collection[str], marks: Mapping[str, str]) -> dict[str, Any]:
    """Definition that encodes text whose content is marked: control tokens are matched first, then marks are undone.

    Pieces of the model's vocabulary do not become control tokens either. That takes their ids from control tokens that
    are pieces; the library gives them others.
    """
    model, _ = _without_pieces(definition["model"], names)
    added = [
        {**one, "normalized": False} if one["content"] in names else one for one in definition.get("added_tokens", [])
    ]
    steps = [{"type": "Replace", "pattern": {"String": mark}, "content": char} for char, mark in marks.items()]
    if definition.get("normalizer"):
        steps.append(definition["normalizer"])
    normalizer = {"type": "Sequence", "normalizers": steps}
    return {**definition, "model": model, "added_tokens": added, "normalizer": normalizer, "post_processor": None}


def _without_pieces(model: dict[str, Any], names: Collection[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The model without these pieces, whose names get a leading space; and the new names of those that it has."""
    listed = isinstance(model["vocab"], list)
    pieces = {piece for piece, _ in model["vocab"]} if listed else model["vocab"].keys()
    new = {name: f" {name}" for name in names if name in pieces}
    if not new:
        return model, {}
    changed = dict(model)
    if listed:
        changed["vocab"] = [[new.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        changed["vocab"] = {new.get(piece, piece): index for piece, index in model["vocab"].items()}
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        changed["merges"] = [pair for pair in pairs if not new.keys() & {pair[0], pair[1], pair[0] + pair[1]}]
        if model.get("unk_token"):
            changed["unk_token"] = new.get(model["unk_token"], model["unk_token"])
    return changed, new


def _unmarked_control_names(definition: dict[str, Any]) -> frozenset[str]:
    """Names of added tokens that are spelt like special ones and are not marked as special."""
    added = definition.get("added_tokens", [])
    return frozenset(one["content"] for one in added if not one["special"] and _CONTROL_NAME.fullmatch(one["content"]))


def _prepends_to_each_part(definition: dict[str, Any]) -> bool:
    """Whether the normalizer is Llama 2's, which prepends a space to every part between added tokens."""
    return definition.get("normalizer") == prefixed_spaces(prefix=True)


def _begins_with(definition: dict[str, Any], bos: str) -> bool:
    """Whether the post-processor prepends `bos`."""
    after = definition.get("post_processor") or {}
    for step in after.get("processors", [after]):
        if step.get("type") == "TemplateProcessing":
            first = step["single"][0] if step["single"] else {}
            return first.get("SpecialToken", {}).get("id") == bos
    return False


def _json_object(text: str, file: Path) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DataError(f"{at(file)}: not a tokenizer.json ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{at(file)}: not a tokenizer.json (the top level is not an object)")
    return value
