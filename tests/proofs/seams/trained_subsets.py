"""A trained subset of the parameters: bytes of gradients and optimizer state, and the gradients, on every mesh."""

from __future__ import annotations

from tests.proofs.harness import proof
from tests.train.test_trainable import (
    PARTS,
    check_gradient_bytes,
    check_state_of_subset,
    check_step_bytes,
    gradient_error,
)


@proof("seams", cases=list(PARTS), sample=1)
def bytes_of_a_subset(mesh: str) -> None:
    """Compiled gradients and the compiled step have no gradients and no optimizer state of frozen parameters."""
    check_gradient_bytes(mesh)
    check_step_bytes(mesh)


@proof("seams", cases=list(PARTS), sample=1, float64=True, bound=1e-13)
def gradients_of_a_subset(mesh: str) -> float:
    """Gradients of the subset are those of all parameters, and frozen parameters keep their bits."""
    return gradient_error(mesh)


@proof("seams", cases=["muon", "adafactor"], sample=1)
def optimizers_of_a_subset(kind: str) -> None:
    """Other optimizers update the subset alone, and keep state for it alone."""
    check_state_of_subset(kind)
