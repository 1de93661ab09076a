"""Detokenizer: decodes the tokens of a completion into text as they come, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.text import StreamDecoder, Tokenizer


class Detokenizer:
    """Incremental detokenizer that finds stop strings; text that may start one is held back.

    Args:
        tokenizer: tokenizer of the model.
        stops: stop strings.
        include: the stop string is part of the text.
        spelt: special tokens whose names are part of the text.
        earliest: number of first tokens in whose text stop strings are ignored.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include: bool = False,
        earliest: int = 0,
        spelt: Sequence[int] = (),
    ):
        self._decoder = StreamDecoder(tokenizer, continues=True, spelt=spelt)
        self._stops, self._include, self._tokens_without_stop = tuple(stops), include, earliest
        self._held = ""
        self.stop_found: str | None = None

    def push(self, token: int) -> tuple[str, bool]:
        """Adds a token; returns (text that can be given out, whether a stop string was found)."""
        self._tokens_without_stop -= 1
        return self._find_stop(self._decoder.push(token))

    def end(self) -> str:
        """Rest of the text when no more tokens come, without a stop string that only it completes."""
        text, stopped = self._find_stop(self._decoder.flush())
        return text if stopped else text + self._held

    def _find_stop(self, text: str) -> tuple[str, bool]:
        """Searches the held text for a stop string; returns (text that can be given out, whether one was found)."""
        if not self._stops or self._tokens_without_stop >= 0:
            return text, False
        self._held += text
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, length, self.stop_found = min(found)
            given, self._held = self._held[: at - length if self._include else at], ""
            return given, True
        most = max(len(stop) for stop in self._stops)
        keep = next(
            (n for n in range(min(most - 1, len(self._held)), 0, -1)
             if any(stop.startswith(self._held[-n:]) for stop in self._stops)),
            0,
        )  # fmt: skip
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return given, False
