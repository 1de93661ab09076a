"""Power cap of a cluster with more servers than its power budget feeds at their rated power (POLCA, arXiv:2308.12908).

Servers rarely draw their rated power all at once, so more of them than the budget has room for can stand behind it. A
governor looks at the power of all engines once in a period: above a first threshold it lowers the clock of the engines
of low priority, above a second one that of all engines, and it takes a cap back when the power falls below the
threshold by a margin. A lower clock lengthens what computes and not what waits for memory, and takes less power.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jaxllm.infer.runner.step_shape import StepShape
from jaxllm.plan.formulas.serving_step import BatchWork, StepCost
from jaxllm.simulate.paper_runner import PaperRunner, StepClock
from jaxllm.simulate.power import PowerModel


@dataclass(frozen=True)
class CapPolicy:
    """Thresholds and clocks of a power cap; powers are shares of the budget, clocks of the highest clock.

    Attributes:
        low_threshold: power from which on engines of low priority are capped.
        high_threshold: power from which on all are.
        margin: how far below its threshold the power must fall before a cap is taken back.
        low_clock, high_clock: clock of a capped engine of low and of high priority.
        period: seconds between two looks at the power.
        exponent: power above idling grows with this power of the clock.
    """

    low_threshold: float = 0.80
    high_threshold: float = 0.89
    margin: float = 0.05
    low_clock: float = 0.70
    high_clock: float = 0.85
    period: float = 2.0
    exponent: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.low_threshold <= self.high_threshold or not 0 < self.low_clock <= self.high_clock <= 1:
            raise ValueError(
                f"power cap: {self}; give thresholds above 0 and clocks up to 1, that of low priority the lower one."
            )


@dataclass
class PowerGovernor:
    """Governor of the power of a cluster.

    Attributes:
        budget: watts of all engines together.
        watts: rated power of one device.
        devices: devices of an engine.
        low: number of engines of low priority; they come first.
        policy: thresholds and clocks.
        caps: cap the power; False: only watch it.
        model: power of a step.
        capped: engine-seconds of low and of high priority that ran at a lower clock.
        over: (start, end, watts) of the intervals in which the power was above the budget.
        samples: (seconds, watts) of each look.
    """

    budget: float
    watts: float
    devices: int
    low: int = 0
    policy: CapPolicy = field(default_factory=CapPolicy)
    caps: bool = True
    model: PowerModel = field(default_factory=PowerModel)
    capped: dict[str, float] = field(default_factory=lambda: {"low": 0.0, "high": 0.0})
    over: list[tuple[float, float, float]] = field(default_factory=list)
    samples: list[tuple[float, float]] = field(default_factory=list)
    _drawn: dict[int, tuple[float, float]] = field(default_factory=dict)  # engine -> (watts, until)
    _level: int = 0  # 0: nobody is capped, 1: low priority, 2: all
    _next: float = 0.0

    def clock(self, engine: int, runner: PaperRunner) -> StepClock:
        """Step clock of an engine: that of its runner, slower while the engine is capped."""
        inner: StepClock = runner.clock
        self._drawn[engine] = self.model.idle * self.watts * self.devices, 0.0

        def timed(batches: list[BatchWork], shape: StepShape, passes: int) -> StepCost:
            now = runner.next_start
            self.look(now)
            share, cost = self.share(engine), inner(batches, shape, passes)
            slow = replace(cost, compute=cost.compute / share, launch=cost.launch / share)
            self._drawn[engine] = self._power(slow, share), now + slow.seconds
            if share < 1:
                self.capped["low" if engine < self.low else "high"] += slow.seconds
            return slow

        return timed

    def share(self, engine: int) -> float:
        """Clock of an engine, as a share of the highest."""
        if self._level == 0:
            return 1.0
        if engine < self.low:
            return self.policy.low_clock
        return self.policy.high_clock if self._level == 2 else 1.0

    def look(self, now: float) -> None:
        """Looks at the power if a period has passed, and sets the caps."""
        if now < self._next:
            return
        start, self._next = self._next, now + self.policy.period
        idle = self.model.idle * self.watts * self.devices
        drawn = sum(power if until >= now else idle for power, until in self._drawn.values())
        self.samples.append((now, drawn))
        if drawn > self.budget:
            self.over.append((start, now, drawn))
        if self.caps:
            self._level = self._leveled(drawn / self.budget)

    def _leveled(self, share: float) -> int:
        policy = self.policy
        if share >= policy.high_threshold:
            return 2
        if share >= policy.low_threshold:
            return 2 if self._level == 2 and share >= policy.high_threshold - policy.margin else 1
        return min(self._level, 1) if share >= policy.low_threshold - policy.margin else 0

    def _power(self, cost: StepCost, share: float) -> float:
        """Watts of an engine in a step at a clock."""
        idle = self.model.idle * self.watts
        return self.devices * (idle + (self.model.mean_power(cost, self.watts) - idle) * share**self.policy.exponent)
