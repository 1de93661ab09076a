"""Named values that streamed layers save: what the planner chooses, against all choices."""

from __future__ import annotations

from tests.plan.test_saved_choice import compared
from tests.proofs.harness import proof


@proof("offload", count=300, sample=10)
def saved_values_are_the_fastest(seed: int) -> None:
    """Drawn costs of policies, windows, micro-batches, rates of disk and link, and rooms in memory and files: the
    choice against every policy of all layers, or of the first or last ones beside "full", with every number of layers
    in files: none that fits takes less time."""
    compared(1000 + seed)
