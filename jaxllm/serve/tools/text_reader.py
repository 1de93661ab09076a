"""Text reader: generated text that has come and is not consumed yet, read by generators that yield None for more."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

Steps = Generator[Any, None, Any]


class ReadCall(NamedTuple):
    """Tool call in generated text: name and arguments."""

    name: str
    arguments: dict[str, Any]


class TextReader:
    """Reader of one completion.

    Attributes:
        text: text that is not consumed yet.
        last: no more text comes.
    """

    def __init__(self) -> None:
        self.text, self.last = "", False

    def take(self, many: int) -> str:
        """Consumes and returns so many characters."""
        taken, self.text = self.text[:many], self.text[many:]
        return taken

    def space(self) -> Steps:
        """Consumes white space; returns whether any text follows."""
        while not (found := self.text.lstrip()) and not self.last:
            yield None
        self.text = found
        return bool(found)

    def find(self, marker: str, at: int) -> Steps:
        """Position of a marker from ``at`` on; -1 if the text ends without it."""
        while (found := self.text.find(marker, at)) < 0 and not self.last:
            at = max(at, len(self.text) - len(marker) + 1)
            yield None
        return found

    def match(self, text: str, at: int) -> Steps:
        """End of ``text`` at this position, ignoring white space; -1 where something else is there."""
        for letter in "".join(text.split()):
            while not (rest := self.text[at : at + 1]) or rest.isspace():
                if not rest and self.last:
                    return -1
                if rest:
                    at += 1
                else:
                    yield None
            if rest != letter:
                return -1
            at += 1
        return at

    def bracketed(self, at: int, quotes: str = '"') -> Steps:
        """End of the brackets that open at this position, and of all inside them; -1 if the text ends before."""
        scan = BracketScanner(quotes)
        while (end := scan.feed(self.text, at)) < 0:
            at = len(self.text)
            if self.last:
                return -1
            yield None
        return end

    def held_back(self, markers: Sequence[str]) -> int:
        """Length of the end of the text that may be the beginning of a marker."""
        return max((marker_overlap(self.text, marker) for marker in markers), default=0)


def marker_overlap(text: str, marker: str) -> int:
    """Length of the longest suffix of a text that is a proper prefix of the marker."""
    many = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((n for n in many if marker.startswith(text[-n:])), 0)


class BracketScanner:
    """Incremental scanner that finds the end of a bracketed text, such as a JSON object.

    Args:
        quotes: characters that begin and end strings, in which brackets do not count.
    """

    def __init__(self, quotes: str = '"') -> None:
        self._quotes, self._depth, self._quote, self._escaped = quotes, 0, "", False

    def feed(self, text: str, at: int = 0) -> int:
        """End of the brackets in ``text``, of which characters before ``at`` were scanned; -1 while they are open."""
        for place in range(at, len(text)):
            letter = text[place]
            if self._quote:
                if not self._escaped and letter == self._quote:
                    self._quote = ""
                self._escaped = letter == "\\" and not self._escaped
            elif letter in self._quotes:
                self._quote = letter
            elif letter in "{[(":
                self._depth += 1
            elif letter in "}])":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return -1
