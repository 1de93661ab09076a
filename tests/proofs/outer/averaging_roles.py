"""Roles of peers by bandwidth: shares and who computes are the best, by messages, bisection, grids and brute force."""

from __future__ import annotations

from tests.proofs.harness import proof
from tests.train.test_averaging_roles import grid_error, plan_errors, roles_error

BOUNDS = {"messages": 1e-2, "bisection": 1e-6, "all-reduce": 1 + 1e-6, "server": 1 + 1e-6}


@proof("outer", count=300, sample=4, bound=BOUNDS)
def averaging_shares_beat_uniform(seed: int) -> dict[str, float]:
    """Time of the planned shares: messages that are sent, bisection, an all-reduce, the best parameter server."""
    return plan_errors(seed)


@proof("outer", count=60, sample=1, bound=1e-6)
def averaging_shares_are_a_grids(seed: int) -> float:
    """Relative error of the time of two or three peers, against the best of grids of shares."""
    return grid_error(seed)


@proof("outer", count=100, sample=2, bound=1e-6)
def averaging_roles_are_brute_force(seed: int) -> float:
    """Relative error of the time of a step under the chosen roles, against all sets of peers that compute."""
    return roles_error(seed)
