"""Beam search over the model's log-probabilities, and the score that compares completions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

Likeliest = Sequence[tuple[int, float]]
"""Top tokens and their log-probabilities, the most likely first."""


def length_normalised_score(logprob: float, length: int, length_penalty: float) -> float:
    """Length-normalised score: log-probability over length ** length_penalty (arXiv:1609.08144, section 7)."""
    return logprob / max(length, 1) ** length_penalty


@dataclass(frozen=True)
class Beam:
    """Beam: one candidate completion.

    Attributes:
        tokens: generated tokens.
        logprobs, top: log-probability of each token, and the top tokens at its position.
        finish: finish reason; None while it continues.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[Likeliest, ...] = ()
    finish: str | None = None

    @property
    def logprob(self) -> float:
        """Log-probability of the completion."""
        return sum(self.logprobs)


@dataclass
class BeamSearch:
    """Beam search for one prompt; ends when no continuing beam scores better than an ended one.

    Attributes:
        width: number of beams.
        max_tokens: maximum number of generated tokens.
        stop_ids: stop tokens.
        length_penalty: see ``length_normalised_score``.
        beams: beams that continue, the most likely first.
        ended: best beams that have ended, the best first.
    """

    width: int
    max_tokens: int
    stop_ids: Collection[int]
    length_penalty: float
    beams: list[Beam] = field(default_factory=lambda: [Beam()])
    ended: list[Beam] = field(default_factory=list)

    @property
    def candidates(self) -> int:
        """Top tokens per beam that a round needs: ``width`` beams continue, whichever end."""
        return self.width + len(self.stop_ids)

    def advance(self, found: Sequence[Likeliest]) -> bool:
        """Advances by one round, given the top tokens after each beam; returns whether the search continues."""
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
        return length_normalised_score(beam.logprob, len(beam.tokens), self.length_penalty)
