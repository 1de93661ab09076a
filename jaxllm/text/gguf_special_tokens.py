"""Special token ids in a GGUF file's metadata."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.files import DataError

UNKNOWN, CONTROL = 2, 3
"""Token types in `tokenizer.ggml.token_type`, which are SentencePiece's."""

# llama.cpp's default ids for SentencePiece vocabularies whose metadata has none, and the usual names of these tokens.
_DEFAULTS = {"unknown": (0, "<unk>"), "bos": (1, "<s>"), "eos": (2, "</s>")}


def special_id(metadata: Mapping[str, Any], name: str, *, where: str) -> int | None:
    """Token id of `tokenizer.ggml.NAME_token_id`, or its default where the key is absent; None where there is neither.

    A default is used only if the token of that id is a special one or has the usual name.

    Raises:
        DataError: the id is not that of a token of the file.
    """
    found, tokens = metadata.get(f"tokenizer.ggml.{name}_token_id"), metadata.get("tokenizer.ggml.tokens", ())
    if found is None:
        return _default(metadata, name) if metadata.get("tokenizer.ggml.model") == "llama" else None
    if isinstance(found, bool) or not isinstance(found, int | np.integer):
        raise DataError(f"{where}: tokenizer.ggml.{name}_token_id is {found!r}; legal: a token id")
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
