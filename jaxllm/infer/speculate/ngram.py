"""N-gram lookup (prompt lookup): proposes the tokens that followed the last n-gram where it occurred before.

It needs no model, and pays where a completion repeats its prompt or itself: code edits, summaries, quotes, loops
(LLMA, arXiv:2304.04487).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from jaxllm.infer.scheduling.sequence import Sequence

LONGEST = 4
"""Tokens of the longest n-gram that is looked up, unless another is given."""
SHORTEST = 2
"""Tokens of the shortest one: a single token says too little about what follows it."""


@dataclass
class _NgramIndex:
    """N-grams of one sequence: where the latest occurrence of each ends; the sequence's end itself is left out."""

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    done: int = 0

    def extend(self, tokens: list[int], begin: int, longest: int) -> None:
        """Adds the n-grams that end before the last token."""
        for end in range(max(self.done, begin) + 1, len(tokens)):
            for size in range(min(SHORTEST, longest), min(longest, end - begin) + 1):
                self.ends[tuple(tokens[end - size : end])] = end
        self.done = max(self.done, len(tokens) - 1)


class NgramProposer:
    """N-gram proposer of an engine, see ``Proposer``.

    Args:
        longest: tokens of the longest n-gram that is looked up; shorter ones follow, down to ``SHORTEST``.
    """

    def __init__(self, longest: int = LONGEST):
        self.longest = longest
        self._indices: weakref.WeakKeyDictionary[Sequence, _NgramIndex] = weakref.WeakKeyDictionary()

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        """Proposes what followed the longest n-gram that has occurred before; nothing if none has."""
        tokens, begin = sequence.tokens, sequence.request.virtual_tokens
        index = self._indices.setdefault(sequence, _NgramIndex())
        index.extend(tokens, begin, self.longest)
        for size in range(min(self.longest, len(tokens) - begin), min(SHORTEST, self.longest) - 1, -1):
            if (end := index.ends.get(tuple(tokens[-size:]))) is not None:
                # What reaches the end of the sequence goes on as a loop of this period.
                period = len(tokens) - end
                return [tokens[end + number % period] for number in range(count)]
        return []


def parse_longest(text: str) -> int:
    """Length of the longest n-gram, from the text after ``ngram:``.

    Raises:
        ValueError: it is no number of 1 or more.
    """
    if not text:
        return LONGEST
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"ngram:{text}; N is the length in tokens of the longest n-gram, 1 or more: ngram:{LONGEST}.")
    return int(text)
