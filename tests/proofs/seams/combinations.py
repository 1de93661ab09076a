"""Random pairs of settings: each runs a step or is refused by its row; none is a traceback, none is ignored."""

from __future__ import annotations

from tests.proofs.harness import proof
from tests.train.feature_pairs import check_pair


@proof("seams", count=500, sample=1)
def pairs_of_settings(seed: int) -> None:
    """Two settings drawn at random."""
    check_pair(seed)
