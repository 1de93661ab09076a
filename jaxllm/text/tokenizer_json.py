"""Builders of a tokenizer.json, to which SentencePiece, tiktoken and GGUF tokenizers are converted.

One common format means one encoder (the `tokenizers` library), one way to save, and files that transformers opens.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SPACE = "\u2581"
"""Character that stands for a space in SentencePiece vocabularies: LOWER ONE EIGHTH BLOCK."""

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def tokenizer_json(
    model: Mapping[str, Any],
    *,
    added: Sequence[Mapping[str, Any]],
    normalizer: Mapping[str, Any] | None,
    pre_tokenizer: Mapping[str, Any] | None,
    decoder: Mapping[str, Any],
    bos: tuple[str, int] | None,
) -> str:
    """Text of a tokenizer.json; `bos` is name and id of the token that the post-processor prepends, or None."""
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": sorted(added, key=lambda one: one["id"]),
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": _begins_with(*bos) if bos else None,
            "decoder": decoder,
            "model": model,
        },
        ensure_ascii=False,
    )


def added_token(index: int, content: str, *, special: bool, rstrip: bool = False) -> dict[str, Any]:
    """Entry of `added_tokens`: a token matched in raw text first; `rstrip` absorbs the white space after it."""
    return {
        "id": index,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": rstrip,
        "normalized": False,
        "special": special,
    }


def bpe(
    vocab: Mapping[str, int],
    merges: Iterable[Sequence[str]],
    *,
    whole_words: bool = False,
    unknown: str | None = None,
    byte_fallback: bool = False,
) -> dict[str, Any]:
    """The `model` of a BPE tokenizer.json; `whole_words`: words in the vocabulary bypass merges (`ignore_merges`)."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unknown is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": whole_words,
        "vocab": dict(vocab),
        "merges": [list(pair) for pair in merges],
    }


def merges_of(ranks: Mapping[str, float], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """BPE merges: every pair of tokens that forms a token, ordered by the rank of the result (least first).

    SentencePiece and tiktoken store no merges: they merge the neighbours whose result has the best rank.

    Args:
        ranks: ranks of the tokens that take part in merges.
        vocab: ids, which order the pairs that form the same token.
    """
    found = [
        (rank, vocab[token], vocab[token[:cut]], vocab[token[cut:]], token[:cut], token[cut:])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def prefixed_spaces(prefix: bool) -> dict[str, Any]:
    """Normalizer that replaces spaces by `SPACE`; with `prefix` it prepends one first."""
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return {"type": "Sequence", "normalizers": steps}


def spaces_decoder(prefix: bool) -> dict[str, Any]:
    """Decoder that reverts `prefixed_spaces`: restores spaces, decodes byte tokens, and removes a prepended space."""
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _begins_with(name: str, index: int) -> dict[str, Any]:
    def sequence(letter: str, kind: int) -> list[dict[str, Any]]:
        special = {"SpecialToken": {"id": name, "type_id": kind}}
        return [special, {"Sequence": {"id": letter, "type_id": kind}}]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {name: {"id": name, "ids": [index], "tokens": [name]}},
    }
