"""Failures of replicas: times between failures, times of repair, and what becomes of the requests of a failed replica.

A replica that is ready fails after an exponentially distributed time and is ready again after another one, so its
availability is ``mtbf / (mtbf + repair)``. A failed replica loses its KV cache and its prefix cache. Its requests

    fail      all of them end with an error: the gateway of ``jaxllm route envoy`` retries only what a replica refuses
    retry     those without a first token are sent to another replica; a stream that has begun ends with an error
    migrate   all are sent to another replica, which prefills the prompt with the tokens that were delivered, and goes
              on (request migration of NVIDIA Dynamo)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.simulate.fleet.fleet_options import parse_options

LostRequests = Literal["fail", "retry", "migrate"]
"""Fate of the requests of a failed replica."""


@dataclass(frozen=True)
class ReplicaFailures:
    """Failures of replicas.

    Attributes:
        mtbf: mean seconds that a ready replica works until it fails.
        repair: mean seconds until a failed replica is ready again, loading of its weights included.
        requests: what becomes of the requests of a failed replica; with ``fail`` a request that finds no replica ready
            fails too, else it waits for one.
        retries: times that a request may be sent again.
        seed: of the times; those of a replica depend on the seed and its number alone.

    Raises:
        ConfigError: a time or a number is not legal.
    """

    mtbf: float
    repair: float
    requests: LostRequests = "fail"
    retries: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        times = self.mtbf > 0 and 0 < self.repair < math.inf
        if not times or self.requests not in get_args(LostRequests) or min(self.retries, self.seed) < 0:
            raise ConfigError(
                f"failures: {self}; give mtbf and repair in seconds above 0, requests of "
                f"{', '.join(get_args(LostRequests))}, and retries and seed of 0 or more."
            )

    @classmethod
    def parse(cls, text: str) -> ReplicaFailures:
        """Failures of a text such as ``mtbf=3600,repair=120,requests=migrate,retries=2,seed=0``.

        Raises:
            ConfigError: a name or a value is not legal, or ``mtbf`` or ``repair`` is missing.
        """
        kinds = {"mtbf": float, "repair": float, "requests": get_args(LostRequests), "retries": int, "seed": int}
        found = parse_options("failures", text, kinds)
        if missing := [name for name in ("mtbf", "repair") if name not in found]:
            raise ConfigError(f"failures: {text!r} has no {missing[0]}: give mtbf=SECONDS and repair=SECONDS.")
        return cls(**found)

    @property
    def availability(self) -> float:
        """Expected share of the time that a replica is ready."""
        return 1.0 if math.isinf(self.mtbf) else self.mtbf / (self.mtbf + self.repair)

    def lives(self, replica: int) -> Iterator[tuple[float, float]]:
        """(seconds that it works, seconds of repair) of a replica, one after the other; none if it never fails."""
        rng = np.random.default_rng((self.seed, replica))
        while not math.isinf(self.mtbf):
            yield float(rng.exponential(self.mtbf)), float(rng.exponential(self.repair))
