"""Log-probabilities in OpenAI's response formats of chat and text completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxllm.text import Tokenizer

TopTokens = Sequence[tuple[int, float]]
LOWEST_LOGPROB = -9999.0
"""Value that replaces minus infinity, which JSON cannot represent."""


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Bytes of a token; for a special token, the bytes of its name."""
    return tokenizer.decode_bytes([token], specials=True)


def display_text(raw: bytes) -> str:
    """Bytes as text, or as ``bytes:\\xNN`` where they are part of a character, so that different tokens differ."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprob(tokenizer: Tokenizer, token: int, value: float, best: TopTokens) -> dict[str, Any]:
    """Entry of ``choices[i].logprobs.content`` of a chat completion."""

    def one(token: int, value: float) -> dict[str, Any]:
        raw = token_bytes(tokenizer, token)
        return {"token": display_text(raw), "logprob": max(value, LOWEST_LOGPROB), "bytes": list(raw)}

    return {**one(token, value), "top_logprobs": [one(*pair) for pair in best]}


class TextLogprobsBuilder:
    """Incremental builder of ``choices[i].logprobs`` of a text completion.

    Args:
        tokenizer: tokenizer of the model.
        offset: number of characters of the text before the first token.
        best: whether to list the most likely tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, best: bool, offset: int = 0):
        self._tokenizer, self._best, self._offset = tokenizer, best, offset

    def take(
        self, tokens: Sequence[int], values: Sequence[float | None], best: Sequence[TopTokens | None]
    ) -> dict[str, Any]:
        """Columns of the next tokens: ``tokens``, ``token_logprobs``, ``top_logprobs`` and ``text_offset``."""
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for number, (token, value) in enumerate(zip(tokens, values, strict=True)):
            raw = token_bytes(self._tokenizer, token)
            # The token's value and its value among the top tokens may round differently; clients expect equality.
            value = dict(best[number] or ()).get(token, value)
            out["tokens"].append(display_text(raw))
            out["token_logprobs"].append(None if value is None else max(value, LOWEST_LOGPROB))
            out["text_offset"].append(self._offset)
            self._offset += len(self._tokenizer.decode([token]))
            if self._best:
                row = best[number]
                out["top_logprobs"].append(
                    None
                    if row is None
                    else {
                        display_text(token_bytes(self._tokenizer, t)): max(v, LOWEST_LOGPROB)
                        for t, v in reversed(list(row))
                    }
                )
        if not self._best:
            out["top_logprobs"] = None
        return out
