"""Content marks: keep control-token names in the content of a conversation from becoming control tokens.

The text of a chat template is encoded with control tokens, the content that it interpolates is not. While the template
is rendered, characters of the content at which the name of a control token may begin or end are replaced, one by one,
by characters that occur nowhere else, so they survive filters and concatenation. Afterwards every name that has such a
character in it is known to come from content, also where a part of it is in another message or in the template.

Strings that the template itself looks for in content, such as ``</think>``, are left as they are, unless they overlap
a name. A template that makes a name out of a variable between two of its own texts, as ``'<|' + role + '|>'``, still
makes that token.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxllm.files import DataError
from jaxllm.text.tokenizer import Tokenizer

_FREE = (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900))
"""Code points that may stand for marked characters: Unicode's noncharacters, and those for private use."""
CONTINUES = " "
"""Follows the mark at the end of a message to continue, so that it shows whether the template strips messages."""


class ContentMarks:
    """Marks of one conversation.

    Args:
        names: names of the control tokens; none: content is not marked.
        given: messages, tools and variables of the conversation, which no mark may occur in.
        looked_for: strings that the template compares content with.

    Raises:
        DataError: the conversation has every character that could be a mark.
    """

    def __init__(self, names: Iterable[str], given: Iterable[Any], looked_for: Iterable[str] = ()):
        self._names, edges, self._pattern = _rules(frozenset(names), tuple(looked_for))
        taken = set[str]()
        for one in given:
            _collect(one, taken)
        free = (chr(point) for point in _FREE if chr(point) not in taken)
        found = list(itertools.islice(free, 1 + len(edges)))
        if len(found) <= len(edges):
            raise DataError("the conversation has all characters that could mark its content; leave some out.")
        self._end = found[0]
        self._marks = dict(zip(edges, found[1:], strict=True))
        self._chars = {mark: char for char, mark in self._marks.items()}

    def mark(self, value: Any) -> Any:
        """Copy of JSON values, all of whose strings are marked."""
        if isinstance(value, str):
            return self._pattern.sub(self._marked, value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(one) for one in value]
        return value

    def _marked(self, found: re.Match[str]) -> str:
        text = found[0]
        return text if found[1] is not None else self._marks[text[0]] + text[1:]

    def left_open(self, content: str) -> str:
        """Content of a message that the answer continues; ``close`` cuts the rendered text after it."""
        return content + self._end + CONTINUES

    def close(self, rendered: str) -> str:
        """The rendered text up to the message that was left open, without its white space if the template strips it.

        Raises:
            DataError: the template does not render that message.
        """
        before, found, after = rendered.rpartition(self._end)
        if not found:
            raise DataError("the chat template does not render the last message as it is, so it cannot be continued.")
        return before if after.startswith(CONTINUES) else before.rstrip()

    def text(self, rendered: str) -> str:
        """The rendered text without marks."""
        return rendered.translate({ord(mark): char for mark, char in self._chars.items()})

    def encode(self, tokenizer: Tokenizer, rendered: str) -> list[int]:
        """Token ids of a rendered text; names that have a part in content are text.

        Raises:
            DataError: the vocabulary cannot spell the text.
        """
        text = self.text(rendered)
        kept = {
            place
            for name in self._names
            for begin in _occurrences(name, text)
            for place in range(begin, begin + len(name))
            if rendered[place] in self._chars
        }
        if not kept:
            return [int(i) for i in tokenizer.encode(text, specials=True)]
        return [int(i) for i in tokenizer.encode_with_content(text, kept)]


@functools.lru_cache(maxsize=64)
def _rules(names: frozenset[str], looked_for: tuple[str, ...]) -> tuple[list[str], list[str], re.Pattern[str]]:
    """(names of control tokens, characters that are marked, pattern of what is left as it is or marked in content).

    Letters are marked only where a whole name begins with one, because templates compare words with content.
    """
    ordered = sorted(filter(None, names), key=len, reverse=True)
    edges = {c for name in ordered for c in (name[0], name[-1]) if not (c.isalnum() or c.isspace())}
    words = [name for name in ordered if name[0] not in edges]

    def overlaps(text: str) -> bool:
        return any(name in text or text in name or _touches(text, name) or _touches(name, text) for name in ordered)

    apart = sorted({one for one in looked_for if edges & set(one) and not overlaps(one)}, key=len, reverse=True)
    groups = ("|".join(map(re.escape, one)) or "(?!)" for one in (apart, words, sorted(edges)))
    return ordered, sorted(edges | {word[0] for word in words}), re.compile("|".join(f"({one})" for one in groups))


def _collect(value: Any, into: set[str]) -> None:
    """Adds the characters of all strings in JSON values."""
    if isinstance(value, str):
        into.update(value)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            _collect(key, into)
            _collect(one, into)
    elif isinstance(value, list | tuple):
        for one in value:
            _collect(one, into)


def _touches(first: str, second: str) -> bool:
    """Whether a proper suffix of the first text is a proper prefix of the second."""
    return any(first.endswith(second[:n]) for n in range(1, min(len(first), len(second))))


def _occurrences(name: str, text: str) -> Iterable[int]:
    at = text.find(name)
    while at >= 0:
        yield at
        at = text.find(name, at + 1)
