"""Fine-tuning in the slack of an engine's steps: what decoding and prefill leave of the token budget and of the time.

Each step may take as long as the latency target allows. What its requests need is known from the steps before: the
longest recent duration of the same program. Units of fine-tuning run before the step while the sum stays within the
target and their tokens within the step's budget (FlexLLM, arXiv:2402.18789, section 6, whose hybrid scheduler has the
same two limits). While the engine has no requests, units run one by one, so that a request waits for one at most.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from jaxllm.infer.side_work import StepRoom
from jaxllm.posttrain.coserve.work_units import UnitKind, WorkUnit

RECENT_STEPS = 64
"""Steps of a program whose longest duration is what its next step is expected to take."""
RECENT_UNITS = 16
"""Units of a kind whose longest duration is what the next one is expected to take."""


@runtime_checkable
class UnitSource(Protocol):
    """Units of fine-tuning in their order, and the programs that run them."""

    def peek(self) -> WorkUnit | None:
        """The next unit; None: there is none."""
        ...

    def run_next(self, *, wait: bool) -> float:
        """Starts the next unit; with ``wait`` returns when it has ended, with its duration in seconds, else 0."""
        ...

    @property
    def behind(self) -> bool:
        """Whether units that were started before the last call of ``mark`` still run."""
        ...

    def mark(self) -> None:
        """Marks the units that were started so far."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Cumulative counters by name."""
        ...

    def close(self) -> None:
        """Ends in order."""
        ...


class SlackScheduler:
    """Side work of an engine (``jaxllm.infer.side_work.SideWork``): units of fine-tuning in the slack of its steps.

    Args:
        source: the units.
        target: seconds per output token that a step with decoding sequences may take.
        durations: seconds of a unit of each kind, as measured before the start.

    Attributes:
        tokens: tokens of the chunks whose forward or backward pass has been started, by kind.
        squeezed: steps that left no room for the next unit.
    """

    def __init__(self, source: UnitSource, target: float, durations: Mapping[UnitKind, float]):
        if target <= 0:
            raise ValueError(f"fine-tuning: the target of {target} seconds per token; give a positive number.")
        self.source, self.target = source, target
        self._steps: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_STEPS))
        self._units = {kind: deque([seconds], maxlen=RECENT_UNITS) for kind, seconds in durations.items()}
        self.tokens: dict[UnitKind, int] = {"forward": 0, "backward": 0}
        self.squeezed = 0

    @property
    def has_work(self) -> bool:
        """Whether there is a unit to run."""
        return self.source.peek() is not None

    def fill(self, room: StepRoom) -> float:
        """Starts the units that fit beside a step; returns the seconds that they are expected to take."""
        known, spent = self._steps.get(room.program), 0.0
        if self.source.peek() is None or self.source.behind:
            return spent
        self.source.mark()
        if not known:
            return spent  # the first step of a program runs by itself, so that its duration is known
        seconds, tokens = self.target * room.passes - max(known), room.tokens
        while (unit := self.source.peek()) is not None:
            cost = self.expected(unit.kind)
            if spent + cost > seconds or unit.tokens > tokens:
                self.squeezed += not spent
                break
            self._start(unit)
            spent += cost
            tokens -= unit.tokens
        return spent

    def landed(self, room: StepRoom, started: float | None, seconds: float) -> float:
        """Records the duration of a step and the units before it; returns that of the step by itself."""
        own = max(seconds - (started or 0.0), 0.0)
        self._steps[room.program].append(own)
        return own

    def run_alone(self) -> None:
        """Runs one unit and waits for it; its duration is what the next of its kind are expected to take."""
        if (unit := self.source.peek()) is not None:
            self._units[unit.kind].append(self._start(unit, wait=True))

    def expected(self, kind: UnitKind) -> float:
        """Seconds that a unit is expected to take: the longest of the recent ones."""
        return max(self._units[kind])

    def counters(self) -> dict[str, int]:
        """Tokens of forward and backward passes so far, and steps without room."""
        return dict(self.source.counters()) | {
            "finetune_forward_tokens": self.tokens["forward"],
            "finetune_backward_tokens": self.tokens["backward"],
            "finetune_steps_without_room": self.squeezed,
        }

    def close(self) -> None:
        """Ends the fine-tuning in order; the run resumes from its last complete step."""
        self.source.close()

    def _start(self, unit: WorkUnit, wait: bool = False) -> float:
        seconds = self.source.run_next(wait=wait)
        if unit.kind != "update":
            self.tokens[unit.kind] += unit.tokens
        return seconds
