"""Planned paths of collectives: never slower than by hash, and the best of all assignments on small networks."""

from __future__ import annotations

from tests.proofs.harness import proof
from tests.simulate.test_network_paths import brute_force_error, over_hash


@proof("outer", count=300, sample=4, bound=1 + 1e-9)
def planned_paths_beat_hashes(seed: int) -> float:
    """Time of the planner's slowest link over that of the best of five hashes, also after one more link died."""
    return over_hash(seed)


@proof("outer", count=300, sample=6, bound=1e-9)
def planned_paths_are_optimal(seed: int) -> float:
    """Relative error of the plan's slowest link, against all assignments of flows to paths."""
    return brute_force_error(seed)
