"""Ids of special tokens in a GGUF file's metadata."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.files import DataError

UNKNOWN, CONTROL = 2, 3
"""Types of tokens in `tokenizer.ggml.token_type`, as SentencePiece numbers them."""

# What llama.cpp takes in a vocabulary of SentencePiece's that does not say it, and how such tokens are called.
_DEFAULTS = {"unknown": (0, "<unk>"), "bos": (1, "<s>"), "eos": (2, "</s>")}


def special_id(metadata: Mapping[str, Any], name: str, *, where: str) -> int | None:
    """The id of `tokenizer.ggml.NAME_token_id`, or the one that its absence means; None where there is none.

    A default is taken only if the token there is a special one or has the usual name.

    Raises:
        DataError: it is no id of one of the file's tokens.
    """
    found, tokens = metadata.get(f"tokenizer.ggml.{name}_token_id"), metadata.get("tokenizer.ggml.tokens", ())
    if found is None:
        return _default(metadata, name) if metadata.get("tokenizer.ggml.model") == "llama" else None
    if isinstance(found, bool) or not isinstance(found, int | np.integer):
        raise DataError(f"{where}: tokenizer.ggml.{name}_token_id is {found!r}; it is a token's number")
    if not 0 <= found < len(tokens):
        raise DataError(f"{where}: tokenizer.ggml.{name}_token_id is {found}, outside the {len(tokens)} tokens")
    return int(found)


def _default(metadata: Mapping[str, Any], name: str) -> int | None:
    index, usual = _DEFAULTS.get(name, (0, None))
    tokens, types = metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ())
    if usual is None or index >= len(tokens):
        return None
    special = index < len(types) and int(types[index]) in (UNKNOWN, CONTROL)
    return index if special or str(tokens[index]) == usual else None
