"""What a number of tokens costs with a layout: time, energy, money."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxllm.plan.hardware import Cluster
from jaxllm.plan.layout_search import Layout


@dataclass(frozen=True)
class Cost:
    """Of training on a number of tokens, without stops and evaluations.

    Attributes:
        tokens: asked for.
        steps: whole ones.
        days: of all devices.
        device_hours: of one.
        megawatt_hours: of the devices alone, at the data sheet's power; None where that is not known.
        dollars: at the hardware table's price; None where there is none.
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


def cost(layout: Layout, cluster: Cluster, tokens: float) -> Cost:
    """Of ``tokens`` tokens with a layout."""
    steps = math.ceil(tokens / (layout.run.data.batch_size * layout.run.data.seq_len))
    return spent(cluster, tokens, steps, steps * layout.time.seconds)


def spent(cluster: Cluster, tokens: float, steps: int, seconds: float) -> Cost:
    """Of a cluster for so many seconds."""
    hours = seconds / 3600 * cluster.devices
    hardware = cluster.hardware
    return Cost(
        tokens,
        steps,
        seconds / 86400,
        hours,
        None if hardware.watts is None else hours * hardware.watts / 1e6,
        None if hardware.dollars_per_hour is None else hours * hardware.dollars_per_hour,
    )
