"""Retention rule ``locret``: trained retaining heads score each entry when it is written (arXiv:2410.01805)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Array, Bool, Float, Int

from jaxllm.infer.runner.retention.budget import highest

BUDGET, RECENT, INTERVAL = 1024, 64, 256
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Locret:
    """Keeps a number of entries: those of the highest scores by retaining heads, and the most recent ones.

    An entry's score does not change, and no attention weights are collected. The most recent entries stay in any case,
    for what the heads cannot know (the paper's stabilisers).

    Attributes:
        heads: safetensors file of the retaining heads, as ``jaxllm train locret_smollm2`` writes it.
        budget: entries that stay in each layer and kv head.
        recent: most recent entries that stay.
        interval: see ``ScoreRule``.
    """

    heads: str = ""
    budget: int = BUDGET
    recent: int = RECENT
    interval: int = INTERVAL

    @classmethod
    def of(cls, argument: str) -> Locret:
        """Rule of ``locret:HEADS.safetensors``, then ``,BUDGET``, ``,RECENT`` and ``,INTERVAL`` if other than usual.

        Raises:
            ValueError: there is no file, or the numbers are not legal; says what is.
        """
        name, end, rest = argument.partition(SUFFIX)
        try:
            made = cls(name + end, *map(int, filter(None, rest.split(","))))
            legal = bool(end) and rest[:1] in ("", ",") and 1 <= made.recent <= min(made.budget, made.interval)
        except (TypeError, ValueError):
            legal, made = False, cls()
        if not legal:
            raise ValueError(
                f"locret:{argument}: give locret:HEADS.safetensors[,BUDGET[,RECENT[,INTERVAL]]]: the file that `jaxllm "
                "train locret_smollm2` writes; the entries that stay; the recent ones among them; and every how many "
                f"tokens, not less than RECENT: such as locret:heads.safetensors,{BUDGET},{RECENT},{INTERVAL}."
            )
        return made

    @property
    def observed(self) -> int:
        """See ``ScoreRule``: no attention weights are collected."""
        return 0

    @property
    def reduce(self) -> Literal["max", "sum"]:
        """See ``ScoreRule``."""
        return "max"

    @property
    def forgets(self) -> bool:
        """See ``ScoreRule``."""
        return False

    def keep(self, entries: Int[Array, "..."], query: Int[Array, "..."]) -> Bool[Array, "..."]:
        """See ``RetentionRule``: every entry that has not been evicted."""
        return entries <= query

    def capacity(self, length: int) -> int:
        """See ``RetentionRule``, after an eviction."""
        return min(length, self.budget)

    def observe(self, weights: Float[Array, "*any S"], queries: Int[Array, "..."]) -> Float[Array, "*any S"]:
        """See ``ScoreRule``."""
        return weights

    def choose(
        self, scores: Float[Array, "K S"], entries: Int[Array, "K S"], used: Bool[Array, "K S"], length: Int[Array, ""]
    ) -> Bool[Array, "K S"]:
        """See ``ScoreRule``."""
        return highest(scores, entries, used, length, self.recent, self.budget)
