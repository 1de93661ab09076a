"""Every precision trains the reference model to within a stated gap of float32's held-out loss."""

from __future__ import annotations

import functools

from jaxllm.train.precision import with_precision
from tests.proofs.harness import proof
from tests.proofs.policies.reference import RUN, evaluated, trained

SEEDS = (0, 1, 2)
GAPS = {
    "bf16": 0.001,
    "fp16": 0.002,
    "bf16_collage": 0.002,
    "bf16_stochastic": 0.005,
    "int8": 0.005,
    "fp8_current": 0.005,
    "fp8_delayed": 0.005,
    "fp8_block": 0.005,
}
"""The most that the loss may be larger, of the mean over seeds, as a part of float32's."""


@functools.cache
def losses(name: str) -> tuple[float, ...]:
    """Held-out loss of each seed."""
    run = with_precision(RUN, name)
    return tuple(evaluated(run, trained(run, seed)[0].params) for seed in SEEDS)


@proof("policies", cases=tuple(GAPS), sample=1, bound={"of_limit": 1.0, "gap": 0.005})
def precision(name: str) -> dict[str, float]:
    """Seeds draw parameters and data alike for both; "gap" is what their mean loss is larger by, 0 where it is not."""
    single, own = (sum(losses(of)) / len(SEEDS) for of in ("float32", name))
    assert single < 2.5, "the reference learns: bytes alone, by their frequencies, take 3.3"
    gap = max(0.0, own / single - 1)
    return {"of_limit": gap / GAPS[name], "gap": gap}
