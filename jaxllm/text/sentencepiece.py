"""SentencePiece models (Kudo and Richardson 2018): reads `tokenizer.model` and converts it to a tokenizer.json.

The file is one protobuf message; field numbers are those of sentencepiece's `sentencepiece_model.proto`. BPE merges
the neighbouring pair whose merged piece has the best score; Unigram chooses the segmentation with the largest sum of
scores. Both may spell characters without a piece in bytes (byte fallback).
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxllm.files import DataError, at
from jaxllm.text import tokenizer_json
from jaxllm.text.hf_tokenizer import HFTokenizer
from jaxllm.text.tokenizer_files import CONFIG_FILE, read_stop_ids, token_name
from jaxllm.text.tokenizer_json import SPACE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Piece types; GGUF files use the same numbers."""

UNIGRAM, BPE = 1, 2

_USER_SCORE = -0.1
"""Score of user-defined pieces in sentencepiece's Unigram, better than that of any segmentation of them."""


@dataclass(frozen=True)
class SentencePieceVocabulary:
    """SentencePiece vocabulary: text, score and type of each piece, by id."""

    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]

    def added(self, *, rstrip: bool = False) -> list[dict[str, Any]]:
        """Added tokens of the tokenizer.json, matched in raw text: user-defined pieces and special tokens."""
        return [
            tokenizer_json.added_token(index, text, special=kind != USER_DEFINED, rstrip=rstrip)
            for index, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True))
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]

    def with_spaces(self) -> "SentencePieceVocabulary":
        """The vocabulary with real spaces in user-defined pieces, which are matched before spaces are replaced."""
        pairs = zip(self.texts, self.kinds, strict=True)
        texts = [text.replace(SPACE, " ") if kind == USER_DEFINED else text for text, kind in pairs]
        return replace(self, texts=texts)


@dataclass
class _Proto:
    """Contents of a model file; trainer and normalizer settings by field number."""

    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    trainer: dict[int, Any] = field(default_factory=dict)
    normalizer: dict[int, Any] = field(default_factory=dict)


def open_sentencepiece(file: Path, data: bytes, config: Mapping[str, Any]) -> HFTokenizer:
    """Opens a SentencePiece model file.

    Args:
        file: path of the file, for errors and for `generation_config.json` beside it.
        data: content of the file.
        config: the tokenizer_config.json beside it, or {}.

    Raises:
        DataError: the file is invalid, or has a setting that cannot be reproduced exactly; says which.
    """
    where = at(file)
    try:
        proto = _read(data)
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
        raise DataError(f"{where}: neither a SentencePiece model nor a tiktoken file ({error})") from None
    trainer, rules = proto.trainer, proto.normalizer
    pieces = SentencePieceVocabulary(proto.texts, proto.scores, proto.kinds)
    kind, byte_fallback = trainer.get(3, UNIGRAM), bool(trainer.get(35, 0))
    if kind not in (UNIGRAM, BPE):
        raise DataError(f"{where}: a SentencePiece model of type {kind}; legal: {UNIGRAM} (Unigram), {BPE} (BPE)")
    prefix, squeeze, escape = (bool(rules.get(number, 1)) for number in (3, 4, 5))
    charsmap = rules.get(2, b"")
    if trainer.get(24, 0) or not escape:
        what = "treat_whitespace_as_suffix" if escape else "escape_whitespaces = false"
        raise DataError(f"{where}: trained with {what}, which is not supported")
    if charsmap:
        raise DataError(
            f"{where}: normalizes text by the rules {_text(rules.get(1, b'')) or 'of its own'!r}; only "
            "'identity' is supported. Use the tokenizer.json of the same model, if there is one"
        )
    if kind == BPE and prefix and squeeze and USER_DEFINED in pieces.kinds:
        raise DataError(f"{where}: has user-defined symbols and removes extra spaces, which is not supported together")
    bos = token_name(config.get("bos_token")) or _named(proto.texts, trainer, 41)
    eos = token_name(config.get("eos_token")) or _named(proto.texts, trainer, 42)
    if eos is None:
        raise DataError(f"{where}: which token ends a document? Put a {CONFIG_FILE} with 'eos_token' beside it")
    adds_bos = bool(config.get("add_bos_token", True)) and bos in pieces.texts
    make = bpe_tokenizer_json if kind == BPE else _unigram_tokenizer_json
    text = make(
        pieces,
        normalizer=_normalizer(prefix, squeeze),
        prefix=prefix,
        byte_fallback=byte_fallback,
        bos=(bos, pieces.texts.index(bos)) if adds_bos and bos else None,
        where=where,
    )
    stop_ids = read_stop_ids(file.parent)
    return HFTokenizer(text, bos=bos, eos=eos, where=where, adds_bos=adds_bos, stop_ids=stop_ids)


def bpe_tokenizer_json(
    pieces: SentencePieceVocabulary,
    *,
    normalizer: Mapping[str, Any],
    prefix: bool,
    byte_fallback: bool,
    bos: tuple[str, int] | None,
    where: str,
    rstrip: bool = False,
) -> str:
    """The tokenizer.json of a SentencePiece BPE model.

    Args:
        pieces: the vocabulary.
        normalizer: normalizer of the tokenizer.json, which also replaces spaces by `SPACE`.
        prefix: whether the normalizer prepends a space, which decoding removes.
        byte_fallback: whether characters without a piece are spelt in bytes.
        bos: name and id of the token that begins a text; None for none.
        where: name of the tokenizer in errors.
        rstrip: whether special tokens absorb the white space after them, as Phi-3's do.

    Raises:
        DataError: a piece occurs twice, or merges lead to an unused piece.
    """
    pieces = pieces.with_spaces()
    vocab = {text: index for index, text in enumerate(pieces.texts)}
    if len(vocab) != len(pieces.texts):
        raise DataError(f"{where}: {len(pieces.texts) - len(vocab)} pieces occur twice")
    ranks = {
        text: -score
        for text, score, kind in zip(pieces.texts, pieces.scores, pieces.kinds, strict=True)
        if kind == NORMAL
    }
    for text, kind in zip(pieces.texts, pieces.kinds, strict=True):
        if kind == UNUSED and any(text[:cut] in ranks and text[cut:] in ranks for cut in range(1, len(text))):
            raise DataError(f"{where}: the piece {text!r} is marked unused, but merges lead to it; not supported")
    unknown = pieces.texts[pieces.kinds.index(UNKNOWN)] if UNKNOWN in pieces.kinds else None
    merges = tokenizer_json.merges_of(ranks, vocab)
    return tokenizer_json.tokenizer_json(
        tokenizer_json.bpe(vocab, merges, unknown=unknown, byte_fallback=byte_fallback),
        added=pieces.added(rstrip=rstrip),
        normalizer=normalizer,
        pre_tokenizer=None,
        decoder=tokenizer_json.spaces_decoder(prefix),
        bos=bos,
    )


def _unigram_tokenizer_json(
    pieces: SentencePieceVocabulary,
    *,
    normalizer: Mapping[str, Any],
    prefix: bool,
    byte_fallback: bool,
    bos: tuple[str, int] | None,
    where: str,
) -> str:
    if UNKNOWN not in pieces.kinds:
        raise DataError(f"{where}: a Unigram model without an unknown piece")
    vocab = []
    for text, score, kind in zip(pieces.texts, pieces.scores, pieces.kinds, strict=True):
        if kind == UNUSED:
            vocab.append([f" {text}", score])  # normalized text has no spaces, so this piece never matches
        elif kind == USER_DEFINED:
            vocab.append([text, _USER_SCORE])
        else:
            vocab.append([text, score])
    # Without this split the library would match a literal `<0x41>` in text as the byte's piece.
    apart = {"type": "Split", "pattern": {"Regex": "<(?=0x[0-9A-F]{2}>)"}, "behavior": "Isolated", "invert": False}
    return tokenizer_json.tokenizer_json(
        {"type": "Unigram", "unk_id": pieces.kinds.index(UNKNOWN), "vocab": vocab, "byte_fallback": byte_fallback},
        added=[one for one in pieces.added() if one["special"]],
        normalizer=normalizer,
        pre_tokenizer=apart if byte_fallback else None,
        decoder=tokenizer_json.spaces_decoder(prefix),
        bos=bos,
    )


def _normalizer(prefix: bool, squeeze: bool) -> dict[str, Any]:
    """Normalizer in SentencePiece's order: remove extra spaces, prepend a space, replace spaces by `SPACE`."""
    last = tokenizer_json.prefixed_spaces(prefix)
    rules = ((r"\A +| +\z", ""), (" {2,}", " ")) if squeeze else ()
    first = [{"type": "Replace", "pattern": {"Regex": regex}, "content": content} for regex, content in rules]
    return {**last, "normalizers": [*first, *last["normalizers"]]}


def _named(texts: list[str], trainer: Mapping[int, Any], number: int) -> str | None:
    """Piece whose id is in a field of the trainer settings: 41 is bos (default 1), 42 is eos (default 2)."""
    index = trainer.get(number, number - 40)
    return texts[index] if 0 <= index < len(texts) else None


# Protobuf's wire format: https://protobuf.dev/programming-guides/encoding/


def _read(data: bytes) -> _Proto:
    proto = _Proto()
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            proto.texts.append(_text(piece[1]) if 1 in piece else "")
            proto.scores.append(piece.get(2, 0.0))
            proto.kinds.append(piece.get(3, NORMAL))
        elif number == 2:
            proto.trainer = dict(_fields(value))
        elif number == 3:
            proto.normalizer = dict(_fields(value))
    if not proto.texts:
        raise ValueError("it holds no pieces")
    return proto


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields (field number, value) of a protobuf message; values are integers, floats or bytes."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(data, place)
            value -= (value >> 63) << 64  # two's complement
        elif kind in (1, 5):
            size, form = (8, "<d") if kind == 1 else (4, "<f")
            (value,) = struct.unpack_from(form, data, place)
            place += size
        elif kind == 2:
            size, place = _varint(data, place)
            value = data[place : place + size]
            place += size
            if len(value) != size:
                raise ValueError("it ends too early")
        else:
            raise ValueError(f"wire type {kind}")
        yield key >> 3, value


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place += 1
        shift += 7
        if byte < 0x80:
            return value, place
        if shift > 63:
            raise ValueError("a number that is too long")


def _text(raw: Any) -> str:
    if not isinstance(raw, bytes):
        raise ValueError("a number instead of text")
    return raw.decode()
