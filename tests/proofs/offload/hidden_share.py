"""Adaptive share of saved inputs in files: the most layers that passes hide, against all numbers of layers."""

from __future__ import annotations

from tests.proofs.harness import proof
from tests.train.test_hidden_share import compared


@proof("offload", count=300, sample=10)
def the_hidden_share_is_the_largest(seed: int) -> None:
    """Drawn times, windows and micro-batches, one and two backward passes: the chosen number of layers against all
    numbers, each played out tick by tick with a reader, a writer and a window of inputs."""
    compared(1000 + seed)
