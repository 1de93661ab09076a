"""Phase split: how many tokens a step has for prompts while other sequences decode.

Every step decodes a token of each sequence whose prompt is computed, and takes longer for the tokens of prompts beside
them: a large step is good for the time to first token, and bad for the time of an output token. A split chooses the
size of the next step among those that there are programs for. It is a pure function of what waits and of measured
times, so that a simulator can use it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxllm.config import ConfigError, closest
from jaxllm.infer.scheduling.step_times import StepTimes


@dataclass(frozen=True)
class StepDemand:
    """Work that the next step could do.

    Attributes:
        decodes: sequences that decode, at least 1.
        prompts: prompts that are not yet computed, those of waiting requests too.
        tokens: tokens of them that are not yet computed.
        sizes: rows that there are programs for, ascending, all more than ``decodes``.
    """

    decodes: int
    prompts: int
    tokens: int
    sizes: Sequence[int]


@runtime_checkable
class PhaseSplit(Protocol):
    """Rule that chooses the size of steps in which sequences decode."""

    def size(self, demand: StepDemand, times: StepTimes) -> int:
        """One of the sizes of ``demand``."""
        ...


@dataclass(frozen=True)
class TokenTime:
    """Largest step that takes no longer than a target time per output token, by a line through measured times.

    Attributes:
        seconds: target time; the smallest step may take longer.
    """

    seconds: float

    def size(self, demand: StepDemand, times: StepTimes) -> int:
        """See ``PhaseSplit``."""
        most = times.tokens_within(self.seconds, demand.sizes[0], demand.sizes[-1])
        return max((one for one in demand.sizes if one <= most), default=demand.sizes[0])


@dataclass(frozen=True)
class EvenShares:
    """Largest step that takes twice the time of decoding alone: half of the time is for prompts, whatever waits."""

    def size(self, demand: StepDemand, times: StepTimes) -> int:
        """See ``PhaseSplit``."""
        alone = decoding_seconds(demand, times)
        return max((one for one in demand.sizes if times.of_program(one) <= 2 * alone), default=demand.sizes[0])


@dataclass(frozen=True)
class LeastWaiting:
    """Step size with the least waiting of prompts and of output tokens together (after Nexus, arXiv:2507.06608).

    Nexus shares a GPU's processors between prefill and decode, and chooses the shares ahead of time by a cost model of
    both phases, for what waits now. A compiled program has the whole device, so here it is the time of a step that is
    shared. Until the prompts are computed, in steps of one size, every decoding sequence loses what those steps take
    longer than decoding alone, and a prompt waits half of their time in the mean. So steps are large while few
    sequences decode and many prompts wait, and small otherwise.

    Attributes:
        weight: seconds of output tokens that a second to the first token is worth.
    """

    weight: float = 10.0

    def size(self, demand: StepDemand, times: StepTimes) -> int:
        """See ``PhaseSplit``."""
        alone = decoding_seconds(demand, times)

        def waiting(size: int) -> float:
            steps, seconds = -(-demand.tokens // (size - demand.decodes)), times.of_program(size)
            prompts = self.weight * demand.prompts * steps * seconds / 2
            return prompts + demand.decodes * steps * max(0.0, seconds - alone)

        return min(demand.sizes, key=waiting)


def decoding_seconds(demand: StepDemand, times: StepTimes) -> float:
    """Seconds of a step that only decodes: measured ones, or those of the smallest step."""
    return times.of_program(demand.sizes[0]) if times.decoding is None else times.decoding


SPLITS: dict[str, Callable[..., PhaseSplit]] = {"half": EvenShares, "tpot": TokenTime, "nexus": LeastWaiting}
"""Splits by name; besides them "whole": prompts get all tokens that decoding leaves."""
LEGAL = "whole, half, tpot:SECONDS, nexus, nexus:WEIGHT"


def phase_split(text: str) -> PhaseSplit | None:
    """Split of a text, see ``LEGAL``; None for "whole".

    Raises:
        ConfigError: there is no such split, or its number is not one; says what is legal.
    """
    name, colon, number = text.partition(":")
    if text == "whole":
        return None
    if name not in SPLITS:
        raise ConfigError(f"engine: phase_split = {text!r}: no such split.{closest(name, SPLITS)} Legal: {LEGAL}.")
    try:
        values = [float(number)] if colon else []
        if any(not 0 < one < math.inf for one in values):
            raise ValueError
        return SPLITS[name](*values)
    except (TypeError, ValueError):  # too many numbers, too few, or not a positive one
        raise ConfigError(f"engine: phase_split = {text!r}: give it as one of: {LEGAL}; numbers above 0.") from None
