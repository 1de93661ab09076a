"""Power of a device by phase of a step.

A device draws a share of its rated power when idle, and in a step a share for each part: matmuls take all of it,
waiting for memory, collectives and launches less (POLCA, arXiv:2308.12908, and Splitwise, arXiv:2311.18677, measure
prefill near the rated power and decode well below it). The shares are assumptions, the same for all devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxllm.plan.formulas.serving_step import StepCost


@dataclass(frozen=True)
class PowerModel:
    """Shares of the rated power that a device draws.

    Attributes:
        idle: with nothing to do.
        compute: while it multiplies.
        memory: while it waits for memory.
        network: while it waits for a collective or a launch.
    """

    idle: float = 0.15
    compute: float = 1.0
    memory: float = 0.6
    network: float = 0.35

    def energy(self, steps: Iterable[StepCost], seconds: float, watts: float) -> float:
        """Joules of one device: its steps, and idling for the rest of ``seconds``."""
        joules = busy = 0.0
        for cost in steps:
            joules += self.step_energy(cost, watts)
            busy += cost.seconds
        return joules + max(0.0, seconds - busy) * self.idle * watts

    def step_energy(self, cost: StepCost, watts: float) -> float:
        """Joules of one device in a step."""
        parts = self.compute * cost.compute + self.memory * cost.memory + self.network * (cost.network + cost.launch)
        return watts * parts

    def mean_power(self, cost: StepCost, watts: float) -> float:
        """Mean watts of one device in a step."""
        return self.step_energy(cost, watts) / cost.seconds if cost.seconds else self.idle * watts
