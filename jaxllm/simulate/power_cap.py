"""Power cap of a cluster with more servers than its power budget feeds at their rated power (POLCA, arXiv:2308.12908).

Servers rarely draw their rated power all at once, so more of them than the budget has room for can stand behind it. A
governor reads a power meter, which averages the power of all engines over a period: above a first threshold it lowers
the clock of the engines of low priority, above a second one that of all engines, and it takes a cap back when the power
falls below the threshold by a margin. A lower clock lengthens what computes and not what waits for memory, and takes
less power.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jaxllm.infer.runner.step.step_shape import StepShape
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
        period: seconds that the power meter averages over.
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
        clocks = 0 < self.low_clock <= self.high_clock <= 1
        if not 0 < self.low_threshold <= self.high_threshold or not clocks or self.period <= 0:
            raise ValueError(
                f"power cap: {self}; give thresholds and a period above 0 and clocks up to 1, that of low priority the "
                "lower one."
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
        caps: cap the power; False: only meter it.
        model: power of a step.
        capped: engine-seconds of low and of high priority that ran at a lower clock.
    """

    budget: float
    watts: float
    devices: int
    low: int = 0
    policy: CapPolicy = field(default_factory=CapPolicy)
    caps: bool = True
    model: PowerModel = field(default_factory=PowerModel)
    capped: dict[str, float] = field(default_factory=lambda: {"low": 0.0, "high": 0.0})
    _engines: int = 0
    _joules: dict[int, float] = field(default_factory=dict)  # above idling, by number of the period
    _level: int = 0  # 0: nobody is capped, 1: low priority, 2: all
    _read: int = 0  # periods whose power the governor has seen

    def clock(self, engine: int, runner: PaperRunner) -> StepClock:
        """Step clock of an engine: that of its runner, slower while the engine is capped."""
        inner: StepClock = runner.clock
        self._engines += 1

        def timed(batches: list[BatchWork], shape: StepShape, passes: int) -> StepCost:
            # Engines take their events in the order of time, so all steps that began before this moment are metered.
            self.read_meter(runner.now)
            share, cost = self.share(engine), inner(batches, shape, passes)
            slow = replace(cost, compute=cost.compute / share, launch=cost.launch / share)
            self._meter(runner.next_start, slow.seconds, self._power_above_idle(slow, share))
            if share < 1:
                self.capped["low" if engine < self.low else "high"] += slow.seconds
            return slow

        return timed

    @property
    def idle_watts(self) -> float:
        """Watts of all engines when none has a step."""
        return self.model.idle * self.watts * self.devices * self._engines

    def readings(self) -> list[tuple[float, float, float]]:
        """Readings of the meter, (start, end, mean watts) of each period up to the end of the last step."""
        period = self.policy.period
        return [(n * period, (n + 1) * period, self._mean_watts(n)) for n in range(max(self._joules, default=-1) + 1)]

    def breaches(self) -> list[tuple[float, float, float]]:
        """Readings above the budget."""
        return [one for one in self.readings() if one[2] > self.budget]

    def share(self, engine: int) -> float:
        """Clock of an engine, as a share of the highest."""
        if self._level == 0:
            return 1.0
        if engine < self.low:
            return self.policy.low_clock
        return self.policy.high_clock if self._level == 2 else 1.0

    def read_meter(self, now: float) -> None:
        """Reads the power of each period that has ended, and sets the caps by it."""
        while (self._read + 1) * self.policy.period <= now:
            if self.caps:
                self._level = self._leveled(self._mean_watts(self._read) / self.budget)
            self._read += 1

    def _mean_watts(self, number: int) -> float:
        return self.idle_watts + self._joules.get(number, 0.0) / self.policy.period

    def _meter(self, start: float, seconds: float, watts: float) -> None:
        """Adds the energy of a step to the periods that it spans."""
        period, end = self.policy.period, start + seconds
        for number in range(int(start / period), int(end / period) + 1):
            inside = min(end, (number + 1) * period) - max(start, number * period)
            if inside > 0:
                self._joules[number] = self._joules.get(number, 0.0) + inside * watts

    def _leveled(self, share: float) -> int:
        policy = self.policy
        if share >= policy.high_threshold:
            return 2
        if share >= policy.low_threshold:
            return 2 if self._level == 2 and share >= policy.high_threshold - policy.margin else 1
        return min(self._level, 1) if share >= policy.low_threshold - policy.margin else 0

    def _power_above_idle(self, cost: StepCost, share: float) -> float:
        """Watts of an engine above idling, in a step at a clock."""
        idle = self.model.idle * self.watts
        return self.devices * (self.model.mean_power(cost, self.watts) - idle) * share**self.policy.exponent
