"""Optimizers that came later: the proofs over all kinds, for them alone."""

from __future__ import annotations

from tests.optim.kinds import LATER
from tests.proofs.harness import proof
from tests.proofs.optimizers import learning, parity, state


@proof(
    "optimizers",
    cases=[(name, mesh) for name in LATER for mesh in parity.MESHES],
    sample=1,
    float64=True,
    bound={"loss": 1e-10, "parameters": 1e-10},
)
def later_kinds_on_meshes(case: tuple[str, str]) -> dict[str, float]:
    """Losses of four steps, and each parameter after them, as on one device."""
    return parity.parity_float64(case)


@proof("optimizers", cases=LATER, sample=1, bound=0.0)
def later_kinds_state(name: str) -> float:
    """Argument bytes of the compiled step beside parameters and batch equal the documentation's table exactly."""
    return state.compiled_state(name)


@proof("optimizers", cases=LATER, sample=1, bound={"loss over sgd's": 0.99})
def later_kinds_beat_descent(name: str) -> dict[str, float]:
    """The best of seven learning rates, over the best of the same seven of descent with momentum."""
    return learning.beats_descent(name)
