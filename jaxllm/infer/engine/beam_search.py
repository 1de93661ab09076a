"""Choosing among several texts: beam search, and the best of many."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

Likeliest = Sequence[tuple[int, float]]
"""Tokens and their log-probabilities, the likeliest first."""


def score(logprob: float, length: int, length_penalty: float) -> float:
    """By which texts are compared: log-probability over length ** length_penalty (arXiv:1609.08144, section 7)."""
    return logprob / max(length, 1) ** length_penalty


@dataclass(frozen=True)
class Beam:
    """A text of a search.

    Attributes:
        tokens: made.
        logprobs, top: of each.
        finish: None while it goes on.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[Likeliest, ...] = ()
    finish: str | None = None

    @property
    def logprob(self) -> float:
        """Of the text."""
        return sum(self.logprobs)


@dataclass
class BeamSearch:
    """The beams of one prompt; it ends when no beam that goes on beats, at its present length, one that has ended.

    Attributes:
        width: beams.
        max_tokens: of a text.
        stop_ids: tokens that end one.
        length_penalty: see ``score``.
        beams: that go on, the likeliest first.
        ended: the best that have ended, the best first.
    """

    width: int
    max_tokens: int
    stop_ids: Collection[int]
    length_penalty: float
    beams: list[Beam] = field(default_factory=lambda: [Beam()])
    ended: list[Beam] = field(default_factory=list)

    @property
    def candidates(self) -> int:
        """The likeliest tokens after each beam that a round needs: whatever ends, as many as there are beams go on."""
        return self.width + len(self.stop_ids)

    def advance(self, found: Sequence[Likeliest]) -> bool:
        """A round: what is likeliest after each beam. Whether the search goes on."""
        after = [
            Beam((*beam.tokens, token), (*beam.logprobs, value), (*beam.top, likeliest))
            for beam, likeliest in zip(self.beams, found, strict=True)
            for token, value in likeliest[: self.candidates]
        ]
        after.sort(key=lambda beam: -beam.logprob)
        full = len(after[0].tokens) >= self.max_tokens
        self.beams = [beam for beam in after if not self._stops(beam)][: self.width]
        for beam in after[: self.width]:
            if self._stops(beam) or full:
                finish = "stop" if self._stops(beam) else "length"
                self.ended.append(Beam(beam.tokens, beam.logprobs, beam.top, finish))
        self.ended = sorted(self.ended, key=lambda beam: -self._score(beam))[: self.width]
        better = len(self.ended) < self.width or self._score(self.beams[0]) > self._score(self.ended[-1])
        return not full and better

    def _stops(self, beam: Beam) -> bool:
        return beam.tokens[-1] in self.stop_ids

    def _score(self, beam: Beam) -> float:
        return score(beam.logprob, len(beam.tokens), self.length_penalty)
