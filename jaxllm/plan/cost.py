"""What a number of tokens costs with a layout: time, energy, money."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxllm.plan.hardware import Cluster
from jaxllm.plan.search import Layout


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


def cost(layout: Layout, cluster: Cluster, tokens: float) -> Cost:
    """Of ``tokens`` tokens."""
    steps = math.ceil(tokens / (layout.run.data.batch_size * layout.run.data.seq_len))
    seconds = steps * layout.time.seconds
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
