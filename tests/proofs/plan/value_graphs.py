"""Value graphs: recomputation by retention intervals and placement over two tiers beside brute force."""

from __future__ import annotations

from tests.plan.test_value_graphs import (
    kept_is_brute_force,
    parts_are_legal,
    placement_is_brute_force,
    recomputation_is_brute_force,
)
from tests.proofs.harness import proof


@proof("plan", count=300, sample=15, counts=("recomputed", "infeasible", "better in another order"))
def retention_is_brute_force(seed: int) -> dict[str, float]:
    """Least time of a random graph within a budget is that of all ways to run operations again and to drop values."""
    return recomputation_is_brute_force(seed)


@proof("plan", count=300, sample=15, counts=("beyond compulsory",))
def placements_are_brute_force(seed: int) -> dict[str, float]:
    """Bytes that a random graph moves between two tiers are the fewest of all orders, writes, fetches and drops."""
    return placement_is_brute_force(seed)


@proof("plan", count=300, sample=5, counts=("moved in parts", "moved at least"))
def placements_in_parts_are_legal(seed: int) -> dict[str, float]:
    """Larger random graphs, divided into parts: every move is legal; bytes beside those of all operations together."""
    return parts_are_legal(seed)


@proof("plan", count=300, sample=15, counts=("recomputed",))
def kept_values_are_retention_intervals(seed: int) -> dict[str, float]:
    """Values that a random block keeps in a number of bytes: the least recomputation of all sets of values, and that of
    retention intervals in a graph with a gap between its forward and its backward pass.
    """
    return kept_is_brute_force(seed)
