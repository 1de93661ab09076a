"""The text of one continuation as its tokens come, up to a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.text import StreamDecoder, Tokenizer


class Reader:
    """Decodes tokens and looks for stop texts; what may begin one is held back.

    Args:
        tokenizer: of the tokens.
        stops: texts that end it.
        include: the stop text is given out too.
        spelt: special tokens whose names are part of the text.
        earliest: tokens that come first and in whose text no stop text counts.
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
        self._stops, self._include, self._free = tuple(stops), include, earliest
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """(text to give out, whether a stop text came)."""
        self._free -= 1
        return self._look(self._decoder.push(token))

    def end(self) -> str:
        """What is left when no more tokens come; nothing of a stop text that ends only now."""
        text, stopped = self._look(self._decoder.flush())
        return text if stopped else text + self._held

    def _look(self, text: str) -> tuple[str, bool]:
        if not self._stops or self._free >= 0:
            return text, False
        self._held += text
        found = [(at, -len(stop)) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, length = min(found)
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
