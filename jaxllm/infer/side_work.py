"""Side work: work that shares an engine's devices, such as fine-tuning, in what decoding and prefill leave of a step.

The engine offers the room of every step before it starts the step, and lets the work run alone while it has no
requests. It knows nothing of the work itself; ``jaxllm.posttrain.coserve`` has some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class StepRoom:
    """Step that is about to start, and what it leaves of the engine's budget.

    Attributes:
        program: name of the step's program.
        tokens: tokens that the budget has left.
        passes: tokens that the step decodes of each sequence, one after the other.
    """

    program: str
    tokens: int
    passes: int = 1


@runtime_checkable
class SideWork(Protocol):
    """Work beside the steps of an engine. The engine's thread alone calls it."""

    @property
    def has_work(self) -> bool:
        """Whether there is something to do now."""
        ...

    def fill(self, room: StepRoom) -> Any:
        """Starts work that runs on the devices just before a step; returns at once, with what ``landed`` is given."""
        ...

    def landed(self, room: StepRoom, started: Any, seconds: float) -> float:
        """Records the duration of a step and of the work before it.

        Args:
            room: of the step.
            started: what ``fill`` returned for it.
            seconds: from the result of the step before to that of this one.

        Returns:
            seconds that the step took by itself.
        """
        ...

    def run_alone(self) -> None:
        """Does one piece of work while the engine has no requests, and waits for it."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Cumulative counters by name, for metrics; any thread may call it."""
        ...

    def close(self) -> None:
        """Ends the work in order: what is to be kept is on disk afterwards."""
        ...
