"""Training steps compiled anew: neither their cycles nor their memory have grown by more than 1%, and they compile."""

from __future__ import annotations

import jax

from benchmarks.compiled import STEPS, figures, growth, stored
from jaxllm.train.compile_step import compile_for
from tests.proofs.harness import proof

BOUND = {"cycles": 0.01, "memory": 0.01}
TINY = tuple(name for name in STEPS if name.startswith("tiny"))
WHOLE = tuple(name for name in STEPS if name not in TINY and name in stored())


def compared(name: str) -> dict[str, float]:
    """Growth of a step over its stored figures; with a JAX that none are stored of, it need only compile."""
    now = figures(compile_for(STEPS[name].run(), STEPS[name].on))
    assert now["cycles"]
    return growth(now, stored()[name].get(jax.__version__, now))


@proof("speed", cases=TINY, sample=1, bound=BOUND)
def small_steps(name: str) -> dict[str, float]:
    """A small model with the default flags of its TPU generation."""
    return compared(name)


@proof("speed", cases=WHOLE, sample=1, bound=BOUND)
def steps(name: str) -> dict[str, float]:
    """A step of real widths."""
    return compared(name)
