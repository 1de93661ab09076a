"""Subtasks that leave a sequence when they are finished (TIM and TIMRUN, arXiv:2507.16784, section 3).

A model that reasons in a tree of tasks puts each list of subtasks between two markers, and their conclusion behind it.
What follows needs the conclusion, not the subtasks: the tokens between the markers leave the sequence, and those behind
them are computed again at the positions that have become free. So the sequence is, token for token, a prompt of the
pruned text, its pages come back in the middle of a generation, and a completion may be longer than the pool of pages
and the model's context. As in the paper, the latest finished subtasks stay a while: a stack of a fixed size.

The paper parses JSON of a fixed schema; here any two token sequences are markers. It also calls tools between subtasks,
which is left to the client.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxllm.text import Tokenizer

DEFAULT_KEPT = 1
"""Finished subtasks that stay, unless another number is given."""


@dataclass(frozen=True)
class Subtasks:
    """Rule that says what a subtask is, and how many finished ones stay.

    Attributes:
        start: token ids that begin a subtask.
        end: token ids that end the one that began last. Both markers stay in the sequence.
        kept: finished subtasks that stay: the latest ones. One that is inside of another counts, and leaves, with it
            once that is finished.

    Raises:
        ValueError: a marker is empty, they are equal, or ``kept`` is negative.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    kept: int = DEFAULT_KEPT

    def __post_init__(self) -> None:
        if not self.start or not self.end or self.start == self.end:
            raise ValueError(
                f"subtasks: start = {self.start} and end = {self.end}; give two different markers of one or more "
                "tokens each."
            )
        if self.kept < 0:
            raise ValueError(f"subtasks: kept = {self.kept}; give 0 or more finished subtasks that stay.")

    @classmethod
    def of_text(cls, tokenizer: Tokenizer, start: str, end: str, kept: int = DEFAULT_KEPT) -> Subtasks:
        """Rule with markers as text; names of special tokens in them are those tokens.

        A model may spell other text by other tokens than these, where neighbours merge with it: use special tokens.
        """
        first, last = (tuple(int(i) for i in tokenizer.encode(text, specials=True)) for text in (start, end))
        return cls(first, last, kept)


@dataclass
class SubtaskStack:
    """Subtasks of one sequence: those that have begun, and the finished ones that have not left.

    Attributes:
        rule: what a subtask is.
        begun: place of the first token of each open subtask, the outer ones first.
        finished: (first token, the one after the last) of each, in order.
        read: number of tokens that belong to markers read so far, or are before them: markers do not overlap.
    """

    rule: Subtasks
    begun: list[int] = field(default_factory=list)
    finished: list[tuple[int, int]] = field(default_factory=list)
    read: int = 0

    def push(self, tokens: list[int]) -> tuple[int, int] | None:
        """Reads the last token of a sequence, all of whose tokens before it have been read.

        Returns:
            (first token, the one after the last) of what leaves the sequence now, if it is not empty. The stack knows
            its subtasks by their places after that.
        """
        many = len(tokens)
        if self._ends_with(tokens, self.rule.start):
            self.begun.append(many)
        elif self.begun and self._ends_with(tokens, self.rule.end):
            first, stop = self.begun.pop(), many - len(self.rule.end)
            self.finished = [one for one in self.finished if one[0] < first]  # the others are inside of it
            if first < stop:
                self.finished.append((first, stop))
        else:
            return None
        self.read = many
        return self._oldest() if len(self.finished) > self.rule.kept else None

    def _ends_with(self, tokens: list[int], marker: tuple[int, ...]) -> bool:
        return len(tokens) - len(marker) >= self.read and tuple(tokens[-len(marker) :]) == marker

    def _oldest(self) -> tuple[int, int]:
        """Takes the oldest finished subtask away; what is behind it moves to the front."""
        first, stop = self.finished.pop(0)
        gone = stop - first
        self.begun = [place - gone if place >= stop else place for place in self.begun]
        self.finished = [(a - gone, b - gone) for a, b in self.finished]
        self.read -= gone
        return first, stop
