"""Optimal checkpoint interval (Young, Daly): balances the cost of saving against the work that failures lose.

A save stalls training for d seconds. With a mean time M between failures, each failure loses half an interval of work,
and Young's first-order optimum is T = sqrt(2 d M). Daly adds the terms that matter if d is not small relative to M:

    T = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d    for d < 2M, else T = M

    J. W. Young, A first order approximation to the optimum checkpoint interval (CACM 1974); J. T. Daly, A higher order
    estimate of the optimum checkpoint interval for restart dumps (FGCS 2006).
"""

from __future__ import annotations

import math

PRIOR_HOURS = 24.0
"""Prior: hours without a failure that are assumed for a host before anything is observed."""


def optimal_interval(stall: float, between_failures: float) -> float:
    """Optimal interval: seconds of work between two saves.

    Args:
        stall: seconds for which a save stalls training.
        between_failures: mean seconds between two failures.
    """
    if stall >= 2 * between_failures:
        return between_failures
    ratio = stall / (2 * between_failures)
    return math.sqrt(2 * stall * between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def mean_time_between_failures(seconds: float, failures: int, hosts: int) -> float:
    """Estimated mean seconds between two failures of a run, from its failures so far and the prior for its hosts."""
    return (seconds + PRIOR_HOURS * 3600 / hosts) / (failures + 1)


def interval_steps(stall: float, step_seconds: float, failures_apart: float) -> int:
    """Optimal interval in steps, 1 or more.

    Args:
        stall: seconds for which a save stalls training.
        step_seconds: seconds of a step.
        failures_apart: mean seconds between two failures.
    """
    return max(1, round(optimal_interval(stall, failures_apart) / max(step_seconds, 1e-6)))
