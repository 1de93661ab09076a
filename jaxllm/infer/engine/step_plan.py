"""What a step does, as the scheduler says and the engine carries out."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxllm.infer.engine.sequence import Sequence


@dataclass(frozen=True)
class Entry:
    """A sequence's part of a step: ``count`` tokens from position ``start``; ``samples`` if a token is made after."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass
class Plan:
    """A step.

    Attributes:
        entries: in the order of the flat batch.
        steps: tokens that each entry makes on the device before the host hears of them; 1 where prompts are read.
        copies: by group: (page, its copy), one after the other, before anything is computed.
        leaving: swapped out before anything else: (sequence, by group: columns and pages).
        returning: swapped in after that: the same.
        seated: that have got a slot.
    """

    entries: list[Entry] = field(default_factory=list)
    steps: int = 1
    copies: list[list[tuple[int, int]]] = field(default_factory=list)
    leaving: list[tuple[Sequence, list[tuple[list[int], list[int]]]]] = field(default_factory=list)
    returning: list[tuple[Sequence, list[tuple[list[int], list[int]]]]] = field(default_factory=list)
    seated: list[Sequence] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Rows of the flat batch."""
        return sum(entry.count for entry in self.entries)
