"""Log-probabilities of tokens as OpenAI writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxllm.text import Tokenizer

TopTokens = Sequence[tuple[int, float]]
LOWEST_LOGPROB = -9999.0
"""What minus infinity is written as; JSON has none."""


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """A token's bytes; of a special token, those of its name."""
    return tokenizer.decode_bytes([token], specials=True)


def display_text(raw: bytes) -> str:
    """The bytes as text, or spelt out where they are a part of a character: texts of different tokens differ."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprob(tokenizer: Tokenizer, token: int, value: float, best: TopTokens) -> dict[str, Any]:
    """One entry of ``choices[i].logprobs.content``."""

    def one(token: int, value: float) -> dict[str, Any]:
        raw = token_bytes(tokenizer, token)
        return {"token": display_text(raw), "logprob": max(value, LOWEST_LOGPROB), "bytes": list(raw)}

    return {**one(token, value), "top_logprobs": [one(*pair) for pair in best]}


class TextLogprobsBuilder:
    """``choices[i].logprobs`` of completions, grown token by token.

    Args:
        tokenizer: for texts of tokens.
        offset: characters that the text has before the first token.
        best: whether the likeliest tokens are listed.
    """

    def __init__(self, tokenizer: Tokenizer, *, best: bool, offset: int = 0):
        self._tokenizer, self._best, self._offset = tokenizer, best, offset

    def take(
        self, tokens: Sequence[int], values: Sequence[float | None], best: Sequence[TopTokens | None]
    ) -> dict[str, Any]:
        """The columns of some more tokens."""
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for number, (token, value) in enumerate(zip(tokens, values, strict=True)):
            raw = token_bytes(self._tokenizer, token)
            # Rounded in two ways it may be less than itself; who compares it with the likeliest must find it equal.
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
