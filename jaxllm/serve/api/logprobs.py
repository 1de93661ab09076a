"""Log-probabilities in OpenAI's response formats of chat and text completions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


def add_token_ids(choice: dict[str, Any], more: dict[str, Any]) -> None:
    """Adds the token ids of an output delta to those of a choice."""
    for name, ids in more.items():
        choice[name] = [*choice.get(name, []), *ids] if name == "token_ids" else ids


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence[tuple[float, int]], top: Sequence[TopTokens]
) -> list[dict[str, Any] | None]:
    """Log-probability and rank (1: the likeliest) of each prompt token and of the top tokens there, by token id.

    Args:
        tokenizer: tokenizer of the model.
        prompt: token ids.
        scores: log-probability and number of likelier tokens, of each token but the first.
        top: top tokens at these positions.
    """

    def one(token: int, value: float, rank: int) -> dict[str, Any]:
        text = display_text(token_bytes(tokenizer, token))
        return {"logprob": max(value, LOWEST_LOGPROB), "rank": rank, "decoded_token": text}

    out: list[dict[str, Any] | None] = [None]
    for token, (value, rank), best in zip(prompt[1:], scores, top, strict=True):
        row = {str(i): one(i, score, place) for place, (i, score) in enumerate(best, 1)}
        out.append({str(token): one(token, value, rank + 1)} | row)
    return out


class TextLogprobsBuilder:
    """Incremental builder of ``choices[i].logprobs`` of a text completion.

    Args:
        tokenizer: tokenizer of the model.
        spelt: ids of generated special tokens whose names are part of the text.
        offset: number of characters of the text before the first token.
    """

    def __init__(self, tokenizer: Tokenizer, *, spelt: Collection[int] = (), offset: int = 0):
        self._tokenizer, self._spelt, self._offset = tokenizer, spelt, offset

    def take(
        self,
        tokens: Sequence[int],
        values: Sequence[float | None],
        best: Sequence[TopTokens | None],
        echoed: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Columns of the next tokens: ``tokens``, ``token_logprobs``, ``top_logprobs`` and ``text_offset``.

        Args:
            tokens: token ids.
            values: their log-probabilities.
            best: top tokens at each position; the token itself is listed with them.
            echoed: the prompt, if the tokens begin with it.
        """
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for number, (token, value) in enumerate(zip(tokens, values, strict=True)):
            text, row = display_text(token_bytes(self._tokenizer, token)), best[number]
            # The token's value and its value among the top tokens may round differently; clients expect equality.
            value = dict(row or ()).get(token, value)
            out["tokens"].append(text)
            out["token_logprobs"].append(None if value is None else max(value, LOWEST_LOGPROB))
            out["text_offset"].append(self._offset)
            specials = number < len(echoed) or token in self._spelt
            if number > 0 or not self._tokenizer.is_begun(echoed):
                self._offset += len(self._tokenizer.decode([token], specials=specials))
            if row is None or value is None:
                out["top_logprobs"].append(None)
                continue
            listed = {
                display_text(token_bytes(self._tokenizer, t)): max(v, LOWEST_LOGPROB) for t, v in reversed(list(row))
            }
            out["top_logprobs"].append({text: max(value, LOWEST_LOGPROB)} | listed)
        return out
