"""Autoscaler of replicas: the algorithm of the Kubernetes Horizontal Pod Autoscaler (HPA) on metrics of LLM servers.

Every ``period`` the mean of a metric over the ready replicas is held against its target: as many replicas are wanted as
make the mean the target, ``ceil(sum / target)``. Within the tolerance nothing changes. Replicas that start count as
idle when the fleet would grow, and so do failed ones, which count as being at the target when it would shrink. A fleet
grows to the least number that was wanted within the window ``up``, and shrinks to the largest within the window
``down`` (stabilisation), by at most the double or four replicas at a time
(https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from jaxllm.config import ConfigError
from jaxllm.simulate.fleet.fleet_options import parse_options

ScalingMetric = Literal["requests", "queue", "cache", "busy"]
"""Metric of a replica, see ``AutoscalePolicy``."""

MOST_ADDED = 4
"""Replicas that may be added at a time, or as many as there are: the default of the HPA."""

ROUNDING = 1e-9
"""Part of a replica that floating-point rounding may add to the wanted number."""


@dataclass(frozen=True)
class AutoscalePolicy:
    """Policy of an autoscaler.

    Attributes:
        min, max: limits of the number of replicas.
        target: value of the metric that a replica should have.
        metric: ``requests``: requests that a replica has, waiting ones included (concurrency); ``queue``: those that
            wait for a slot of its batch; ``cache``: share of its KV cache that is in use; ``busy``: share of the last
            period in which its devices computed.
        period: seconds between two looks at the metric.
        up, down: seconds of the stabilisation windows.
        tolerance: relative difference from the target that changes nothing.
        start: seconds until a new replica loads its weights: scheduling, container, compiled programs.
        load: bytes per second at which each of its devices gets its weights; None: the device's share of its host's
            disks in the hardware table. Give the network's rate where weights come from a store.

    Raises:
        ConfigError: a value is not legal.
    """

    min: int
    max: int
    target: float
    metric: ScalingMetric = "requests"
    period: float = 15.0
    up: float = 0.0
    down: float = 300.0
    tolerance: float = 0.1
    start: float = 30.0
    load: float | None = None

    def __post_init__(self) -> None:
        numbers = 1 <= self.min <= self.max and self.target > 0 and self.period > 0 and (self.load or 1.0) > 0
        if not numbers or self.metric not in get_args(ScalingMetric) or (
            min(self.up, self.down, self.tolerance, self.start) < 0
        ):  # fmt: skip
            raise ConfigError(
                f"autoscale: {self}; give 1 <= min <= max, target, period and load above 0, a metric of "
                f"{', '.join(get_args(ScalingMetric))}, and up, down, tolerance and start of 0 or more."
            )

    @classmethod
    def parse(cls, text: str) -> AutoscalePolicy:
        """Policy of a text such as ``min=1,max=8,target=20,metric=requests,down=300,start=30,load=2e9``.

        Raises:
            ConfigError: a name or a value is not legal, or ``min``, ``max`` or ``target`` is missing.
        """
        numbers = ("target", "period", "up", "down", "tolerance", "start", "load")
        kinds = {"min": int, "max": int, "metric": get_args(ScalingMetric), **dict.fromkeys(numbers, float)}
        found = parse_options("autoscale", text, kinds)
        if missing := [name for name in ("min", "max", "target") if name not in found]:
            raise ConfigError(f"autoscale: {text!r} has no {missing[0]}: give min=N, max=N and target=NUMBER.")
        return cls(**found)

    def start_seconds(self, device_bytes: float, disk: float) -> float:
        """Seconds from the decision for a new replica until it is ready.

        Args:
            device_bytes: bytes of weights of one device; a replica's devices load at the same time.
            disk: bytes per second that a device's share of its host's disks gives, where ``load`` is None.
        """
        return self.start + device_bytes / (self.load or disk)


class Autoscaler:
    """Autoscaler with the numbers that were wanted within its windows.

    Args:
        policy: policy.
        now: seconds at which it begins.
        replicas: replicas at that time, which count as wanted then.
    """

    def __init__(self, policy: AutoscalePolicy, now: float, replicas: int):
        self.policy = policy
        self._wanted = deque([(now, replicas)])

    def decide(self, now: float, readings: Sequence[float], starting: int = 0, failed: int = 0) -> int:
        """Number of replicas that there shall be.

        Args:
            now: seconds.
            readings: metric of each ready replica.
            starting, failed: replicas that are not ready.
        """
        policy, current = self.policy, len(readings) + starting + failed
        wanted = self._wanted_now(readings, starting, failed)
        while self._wanted and self._wanted[0][0] < now - max(policy.up, policy.down):
            self._wanted.popleft()
        least = min([wanted, *(n for at, n in self._wanted if at >= now - policy.up)])
        most = max([wanted, *(n for at, n in self._wanted if at >= now - policy.down)])
        self._wanted.append((now, wanted))
        stable = min(max(current, least), most)
        stable = min(stable, max(2 * current, current + MOST_ADDED))
        return min(max(stable, policy.min), policy.max)

    def _wanted_now(self, readings: Sequence[float], starting: int, failed: int) -> int:
        """Number of replicas that makes the mean of the metric the target."""
        target, tolerance, current = self.policy.target, self.policy.tolerance, len(readings) + starting + failed
        if not readings:
            return current
        total, counted = sum(readings), len(readings)
        grows = total > counted * target
        if grows:
            counted += starting + failed
        elif total < counted * target:
            total, counted = total + failed * target, counted + failed
        ratio = total / (counted * target)
        if abs(ratio - 1) <= tolerance or (grows and ratio < 1):
            return current
        wanted = math.ceil(total / target - ROUNDING)
        return min(wanted, current) if ratio < 1 else max(wanted, current)
