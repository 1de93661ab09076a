"""Retention rule ``corm``: an entry stays while a recent query attends to it (arXiv:2404.15949).

The budget is free: how many entries stay follows from the text. Each layer and kv head chooses by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Array, Bool, Float, Int

THRESHOLD, RECENT, INTERVAL = 1.0, 32, 256


@dataclass(frozen=True)
class Corm:
    """Keeps the entries that one of the recent queries gave at least ``threshold / length`` of its attention.

    ``length`` is the number of tokens that the query sees, so at a threshold of 1 an entry stays that had its even
    share. Of the query heads of a kv head, one suffices. The most recent entries stay in any case.

    Attributes:
        threshold: share of attention, as a multiple of the even share; 0 keeps everything.
        recent: recent queries that decide, and recent entries that stay.
        interval: see ``ScoreRule``; the paper lets entries leave at every token.
    """

    threshold: float = THRESHOLD
    recent: int = RECENT
    interval: int = INTERVAL

    @classmethod
    def of(cls, argument: str) -> Corm:
        """Rule of ``corm:THRESHOLD``, ``corm:THRESHOLD,RECENT`` or ``corm:THRESHOLD,RECENT,INTERVAL``.

        Raises:
            ValueError: these are not legal numbers; says what is.
        """
        first, *others = argument.split(",")
        try:
            made = cls(float(first), *map(int, others))
            legal = made.threshold >= 0 and 1 <= made.recent <= made.interval
        except (TypeError, ValueError):
            legal, made = False, cls()
        if not legal:
            raise ValueError(
                f"corm:{argument}: give corm:THRESHOLD[,RECENT[,INTERVAL]]: a multiple of the even share of attention, "
                f"0 or more; the recent queries that decide; and every how many tokens, not less than RECENT: such as "
                f"corm:{THRESHOLD},{RECENT},{INTERVAL}."
            )
        return made

    @property
    def observed(self) -> int:
        """See ``ScoreRule``."""
        return self.recent

    @property
    def reduce(self) -> Literal["max", "sum"]:
        """See ``ScoreRule``."""
        return "max"

    @property
    def forgets(self) -> bool:
        """See ``ScoreRule``."""
        return True

    def keep(self, entries: Int[Array, "..."], query: Int[Array, "..."]) -> Bool[Array, "..."]:
        """See ``RetentionRule``: every entry that has not been evicted."""
        return entries <= query

    def capacity(self, length: int) -> int:
        """See ``RetentionRule``: no limit."""
        return length

    def observe(self, weights: Float[Array, "*any S"], queries: Int[Array, "..."]) -> Float[Array, "*any S"]:
        """See ``ScoreRule``: multiples of the even share."""
        return weights * (queries + 1)

    def choose(
        self, scores: Float[Array, "K S"], entries: Int[Array, "K S"], used: Bool[Array, "K S"], length: Int[Array, ""]
    ) -> Bool[Array, "K S"]:
        """See ``ScoreRule``."""
        return (scores >= self.threshold) | (entries >= length - self.recent)
