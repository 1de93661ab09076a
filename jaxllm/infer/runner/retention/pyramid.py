"""Retention rule ``pyramid``: deeper layers keep fewer entries, by recent attention (arXiv:2405.12532)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.infer.runner.retention.budget import highest

SHARE, RECENT, INTERVAL = 0.5, 32, 256
UNIT = 1024
"""Budgets are multiples of so many parts of a length: whole numbers, which host and device compute alike."""


@dataclass(frozen=True)
class Pyramid:
    """Keeps the recent entries and a share of the older ones: those with the most attention of the recent queries.

    The share falls linearly with depth, from ``1 + slope`` to ``1 - slope`` times the mean. Later queries count more,
    linearly; the query heads of a kv head count alike.

    Attributes:
        share: mean share of the older entries that stay, over all layers; 1 keeps everything.
        recent: recent queries that decide, and recent entries that stay.
        interval: see ``ScoreRule``.
        slope: how much the shares of layers differ; less where the first layers would keep more than everything.
    """

    share: float = SHARE
    recent: int = RECENT
    interval: int = INTERVAL
    slope: float = 0.5

    @classmethod
    def of(cls, argument: str) -> Pyramid:
        """Rule of ``pyramid:SHARE``, ``pyramid:SHARE,RECENT`` or ``pyramid:SHARE,RECENT,INTERVAL``.

        Raises:
            ValueError: these are not legal numbers; says what is.
        """
        first, *others = argument.split(",")
        try:
            made = cls(float(first), *map(int, others))
            legal = len(others) <= 2 and 0 < made.share <= 1 and 1 <= made.recent <= made.interval
        except (TypeError, ValueError):
            legal, made = False, cls()
        if not legal:
            raise ValueError(
                f"pyramid:{argument}: give pyramid:SHARE[,RECENT[,INTERVAL]]: the mean share of the older entries that "
                "stay, up to 1; the recent queries that decide, whose entries stay; and every how many tokens, not "
                f"less than RECENT: such as pyramid:{SHARE},{RECENT},{INTERVAL}."
            )
        return made

    def of_part(self, part: int, parts: int) -> Pyramid:
        """Rule of one of several parts of the layers, the first of which keeps the most."""
        slope = min(self.slope, 1 / self.share - 1)
        depth = 0.0 if parts == 1 else 1 - 2 * part / (parts - 1)
        return replace(self, share=self.share * (1 + slope * depth))

    @property
    def observed(self) -> int:
        """See ``ScoreRule``."""
        return self.recent

    @property
    def reduce(self) -> Literal["max", "sum"]:
        """See ``ScoreRule``."""
        return "sum"

    @property
    def forgets(self) -> bool:
        """See ``ScoreRule``."""
        return True

    def keep(self, entries: Int[Array, "..."], query: Int[Array, "..."]) -> Bool[Array, "..."]:
        """See ``RetentionRule``: every entry that has not been evicted."""
        return entries <= query

    def capacity(self, length: int) -> int:
        """See ``RetentionRule``, after an eviction."""
        return min(length, self.recent + -(-max(0, length - self.recent) * round(self.share * UNIT) // UNIT))

    def observe(self, weights: Float[Array, "*any S"], queries: Int[Array, "..."]) -> Float[Array, "*any S"]:
        """See ``ScoreRule``."""
        return weights * (queries % self.interval - (self.interval - self.recent) + 1) / self.recent

    def choose(
        self, scores: Float[Array, "K S"], entries: Int[Array, "K S"], used: Bool[Array, "K S"], length: Int[Array, ""]
    ) -> Bool[Array, "K S"]:
        """See ``ScoreRule``: the entries of the highest scores."""
        older = jnp.maximum(0, length - self.recent)
        budget = self.recent + (older * round(self.share * UNIT) + UNIT - 1) // UNIT
        return highest(scores, entries, used, length, self.recent, budget)
