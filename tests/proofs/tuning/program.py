"""Sequence model of StableHLO: FLOPs, bytes and seconds of generated programs that it has not seen."""

from __future__ import annotations

from jaxllm.tune import program_cost
from tests import environment
from tests.proofs.harness import proof


@proof("tuning", cases=(0, 1), sample=1, bound={"flops": 0.05, "bytes": 0.05, "seconds": 0.4})
def model_reads_programs(seed: int) -> dict[str, float]:
    """1 - R2 of the logarithm of each cost, on 100 programs held out of 400 that are compiled and timed here."""
    with environment.optimized():
        examples = program_cost.generate(400, seed)
        _, error = program_cost.train_and_test(examples, 900, seed)
    return {name: 1 - error[name].r_squared for name in program_cost.TARGETS}
