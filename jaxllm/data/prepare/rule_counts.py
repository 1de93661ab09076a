"""Counts of documents by what became of them, with samples of those that each rule dropped."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxllm.files import digest, read_json, write_json

SAMPLES = 5
"""Samples of dropped documents kept for a rule."""
SAMPLE_CHARACTERS = 600


@dataclass
class RuleCounts:
    """Documents of one input file or source, by what became of them; with samples of those dropped.

    Samples are those with the smallest hashes, so they depend on the documents only.
    """

    read: int = 0
    kept: int = 0
    tokens: int = 0
    characters: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[list[str]]] = field(default_factory=dict)

    def drop(self, rule: str, where: str, text: str, why: str = "") -> None:
        """Counts a dropped document and keeps it as a sample if its hash is among the smallest."""
        self.dropped[rule] += 1
        self._sample(rule, [digest([where, rule])[:16], where, why, text[:SAMPLE_CHARACTERS]])

    def _sample(self, rule: str, sample: list[str]) -> None:
        held = self.samples.setdefault(rule, [])
        held.append(sample)
        self.samples[rule] = heapq.nsmallest(SAMPLES, held)

    def add(self, other: RuleCounts) -> None:
        """Adds the counts and samples of another part."""
        self.read += other.read
        self.kept += other.kept
        self.tokens += other.tokens
        self.characters += other.characters
        self.dropped.update(other.dropped)
        self.masked.update(other.masked)
        for rule, samples in other.samples.items():
            for one in samples:
                self._sample(rule, one)


def save_counts(path: Path, counts: RuleCounts, **more: Any) -> None:
    """Writes counts to a JSON file, with further values."""
    write_json(path, {**vars(counts), **more})


def load_counts(path: Path) -> tuple[RuleCounts, dict[str, Any]]:
    """Counts of a JSON file, and the further values."""
    values = read_json(path)
    own: dict[str, Any] = {name: values.pop(name) for name in vars(RuleCounts())}
    own["dropped"], own["masked"] = Counter(own["dropped"]), Counter(own["masked"])
    return RuleCounts(**own), values
