"""Retention rule ``window+sinks``: the first tokens and the most recent ones stay cached (arXiv:2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RECENT, SINKS = 1024, 4


@dataclass(frozen=True)
class WindowAndSinks:
    """Keeps the first ``sinks`` tokens and the most recent ``recent`` ones, the query's own among them.

    Attributes:
        recent: most recent tokens.
        sinks: first tokens, which queries attend to whatever they hold.
    """

    recent: int = RECENT
    sinks: int = SINKS

    @classmethod
    def of(cls, argument: str) -> WindowAndSinks:
        """Rule of ``window+sinks:RECENT`` or ``window+sinks:RECENT,SINKS``.

        Raises:
            ValueError: these are not numbers of tokens; says what is legal.
        """
        numbers = argument.split(",")
        if not 1 <= len(numbers) <= 2 or not all(n.isdecimal() for n in numbers) or int(numbers[0]) < 1:
            raise ValueError(
                f"window+sinks:{argument}: give window+sinks:RECENT or window+sinks:RECENT,SINKS, such as "
                f"window+sinks:{RECENT},{SINKS}."
            )
        return cls(*map(int, numbers))

    def keep(self, entries: Any, query: Any) -> Any:
        """See ``RetentionRule``."""
        return (entries < self.sinks) | (entries > query - self.recent)

    def capacity(self, length: int) -> int:
        """See ``RetentionRule``."""
        return min(length, self.sinks + self.recent - 1)
