"""How often to save: as often as the time that saving costs is worth what a failure would cost.

A save costs the stall d; with failures at a mean time M apart, half an interval of work is lost at each, and Young's
first-order optimum is T = sqrt(2 d M); Daly's estimate adds the terms that matter when d is not small beside M:

    T = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d    for d < 2M, else T = M

    J. W. Young, A first order approximation to the optimum checkpoint interval (CACM 1974); J. T. Daly, A higher order
    estimate of the optimum checkpoint interval for restart dumps (FGCS 2006).
"""

from __future__ import annotations

import math

PRIOR_HOURS = 24.0
"""Hours without a failure that a host is believed to have behind it before anything is known of it."""


def optimal_interval(stall: float, between_failures: float) -> float:
    """Seconds of work between two saves.

    Args:
        stall: seconds that a save costs.
        between_failures: mean seconds between two failures.
    """
    if stall >= 2 * between_failures:
        return between_failures
    ratio = stall / (2 * between_failures)
    return math.sqrt(2 * stall * between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def mean_time_between_failures(seconds: float, failures: int, hosts: int) -> float:
    """Mean seconds between two failures of a run, from those so far and what is believed of hosts beforehand."""
    return (seconds + PRIOR_HOURS * 3600 / hosts) / (failures + 1)


def interval_steps(stall: float, step_seconds: float, failures_apart: float) -> int:
    """The interval in steps, one or more."""
    return max(1, round(optimal_interval(stall, failures_apart) / max(step_seconds, 1e-6)))
