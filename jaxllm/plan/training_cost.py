"""Training cost of a layout for a number of tokens: time, energy, price."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxllm.plan.hardware import Cluster
from jaxllm.plan.layout_search import ParallelLayout


@dataclass(frozen=True)
class TrainingCost:
    """Cost of training on a number of tokens, without stops and evaluations.

    Attributes:
        tokens: requested tokens.
        steps: whole steps.
        days: wall-clock days.
        device_hours: hours summed over devices.
        megawatt_hours: energy of the devices alone, at the data sheet's power; None where that is unknown.
        dollars: price by the hardware table; None where there is none.
    """

    tokens: float
    steps: int
    days: float
    device_hours: float
    megawatt_hours: float | None
    dollars: float | None

    def __str__(self) -> str:
        energy = "" if self.megawatt_hours is None else f", {self.megawatt_hours:,.1f} MWh"
        money = "" if self.dollars is None else f", ${self.dollars:,.0f} at list price"
        return f"{self.days:,.1f} days, {self.device_hours:,.0f} device hours{energy}{money}"


def cost(layout: ParallelLayout, cluster: Cluster, tokens: float) -> TrainingCost:
    """Cost of training on ``tokens`` tokens with a layout."""
    steps = math.ceil(tokens / (layout.run.data.batch_size * layout.run.data.seq_len))
    return cost_of_time(cluster, tokens, steps, steps * layout.time.seconds)


def cost_of_time(cluster: Cluster, tokens: float, steps: int, seconds: float) -> TrainingCost:
    """Cost of a cluster for that many seconds."""
    hours = seconds / 3600 * cluster.devices
    hardware = cluster.hardware
    return TrainingCost(
        tokens,
        steps,
        seconds / 86400,
        hours,
        None if hardware.watts is None else hours * hardware.watts / 1e6,
        None if hardware.dollars_per_hour is None else hours * hardware.dollars_per_hour,
    )
