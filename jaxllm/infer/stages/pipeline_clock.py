"""Pipeline clock: when the stages of a pipeline have computed what they were told to.

The device clock asks the devices. The simulated clock computes the time of a pipeline from costs, for measurements that
have to be the same every time: a stage computes one run after the other, and the host waits and drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax


@runtime_checkable
class PipelineClock(Protocol):
    """Clock of a staged runner. A ticket stands for a run on a stage."""

    def started(self, stage: int, tokens: int, before: Any, output: Any) -> Any:
        """Takes notice that a stage was told to compute.

        Args:
            stage: the stage.
            tokens: tokens of the run.
            before: ticket of the run on the stage before; None: this is the first.
            output: arrays that the stage computes.

        Returns:
            the ticket.
        """
        ...

    def is_done(self, ticket: Any) -> bool:
        """Whether the stage has computed that run."""
        ...

    def wait_any(self, tickets: Sequence[Any]) -> None:
        """Waits until one of these runs has been computed, the oldest of which comes first."""
        ...


class DeviceClock:
    """Clock that asks the devices, see ``PipelineClock``."""

    def started(self, stage: int, tokens: int, before: Any, output: Any) -> Any:
        """The ticket is the output."""
        return output

    def is_done(self, ticket: Any) -> bool:
        """Whether all arrays are there."""
        return all(x.is_ready() for x in jax.tree.leaves(ticket))

    def wait_any(self, tickets: Sequence[Any]) -> None:
        """Waits for the oldest: the others follow it through the same stages."""
        jax.block_until_ready(tickets[0])


class SimulatedClock:
    """Clock of a simulated pipeline, see ``PipelineClock``; its tickets are the times at which stages have computed.

    Args:
        stage: seconds of a stage for a run of one token.
        row: seconds of a stage for each further token of a run.
        draft: seconds of a drafted token; the host drafts, and tells ``drafted``.

    Attributes:
        now: the host's time in seconds.
    """

    def __init__(self, stage: float = 1.0, row: float = 0.0, draft: float = 0.0):
        if stage <= 0 or min(row, draft) < 0:
            raise ValueError(
                f"stage = {stage}, row = {row}, draft = {draft}: give a positive stage time, and 0 or more."
            )
        self.stage, self.row, self.draft, self.now = stage, row, draft, 0.0
        self._free: dict[int, float] = {}

    def started(self, stage: int, tokens: int, before: float | None, output: Any) -> float:
        """The stage computes once it is told to, is free, and has its input."""
        begin = max(self.now, self._free.get(stage, 0.0), -math.inf if before is None else before)
        self._free[stage] = begin + self.stage + self.row * (tokens - 1)
        return self._free[stage]

    def is_done(self, ticket: float) -> bool:
        """Whether that time has come."""
        return ticket <= self.now

    def wait_any(self, tickets: Sequence[float]) -> None:
        """Goes on to the first of these times."""
        self.now = max(self.now, min(tickets))

    def drafted(self, tokens: int) -> None:
        """The host has drafted so many tokens, one after the other."""
        self.now += self.draft * tokens
