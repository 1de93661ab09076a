"""Step times: what steps of an engine take, from those that have run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

NEWEST = 0.2
"""Share of the newest step in the mean of its program."""


@dataclass(frozen=True)
class StepTimes:
    """Durations of steps: a mean of each program, and for programs that have not run a line through the others.

    Attributes:
        weight, tokens, seconds, squares, products: decaying sums of steps with prefill, for the line.
        programs: mean seconds of the steps with prefill of each padded size, in which the newest count most.
        decoding: mean seconds of a forward pass that only decodes; None: there was none yet.
    """

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0
    programs: Mapping[int, float] = field(default_factory=dict)
    decoding: float | None = None

    def with_step(self, tokens: int, seconds: float, fade: float = 0.98) -> StepTimes:
        """Times with one more step with prefill, of a program of ``tokens`` rows."""
        mean = self.programs.get(tokens, seconds)
        return StepTimes(
            self.weight * fade + 1,
            self.tokens * fade + tokens,
            self.seconds * fade + seconds,
            self.squares * fade + tokens * tokens,
            self.products * fade + tokens * seconds,
            {**self.programs, tokens: mean + NEWEST * (seconds - mean)},
            self.decoding,
        )

    def with_decoding(self, seconds: float) -> StepTimes:
        """Times with one more forward pass that only decodes."""
        mean = seconds if self.decoding is None else self.decoding
        return replace(self, decoding=mean + NEWEST * (seconds - mean))

    @property
    def line(self) -> tuple[float, float]:
        """(seconds per step, additional seconds per token); with steps of one size only, the first is 0."""
        if self.weight == 0:
            return 0.0, 0.0
        spread = self.weight * self.squares - self.tokens**2
        if spread <= 1e-6 * self.weight * self.squares:
            return 0.0, self.seconds / self.tokens
        slope = max((self.weight * self.products - self.tokens * self.seconds) / spread, 0.0)
        return max((self.seconds - slope * self.tokens) / self.weight, 0.0), slope

    def of_program(self, tokens: int) -> float:
        """Seconds of a step of a program of ``tokens`` rows: measured ones, or those of the line."""
        if tokens in self.programs:
            return self.programs[tokens]
        base, slope = self.line
        return base + slope * tokens

    def tokens_within(self, target: float, least: int, most: int) -> int:
        """Tokens of a step that is predicted to take no longer than ``target`` seconds, from ``least`` to ``most``."""
        base, slope = self.line
        if slope <= 0:
            return most
        return int(min(most, max(least, (target - base) / slope)))
