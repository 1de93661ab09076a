"""Throughput of alike requests over streamed weights: steps are the engine's own, and none exceeds the bound."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxllm.infer import SamplingParams
from jaxllm.infer.streaming.streamed_weights import WeightPlacement
from jaxllm.infer.streaming.throughput_bound import EngineLimits, Workload, bound, predicted, steps_of
from tests.infer import engines
from tests.proofs.harness import proof


def steps_of_an_engine(limits: EngineLimits, work: Workload) -> list[int]:
    """Tokens of each step in which an engine with streamed weights serves the requests."""
    config = dataclasses.replace(
        engines.ENGINES["roomy"], max_sequences=limits.sequences, max_batched_tokens=limits.tokens,
        buckets=(limits.tokens,), prefix_cache=False,
    )  # fmt: skip
    engine = engines.build(config, placement=WeightPlacement(1))
    run, seen = engine.runner.run, list[int]()

    def recorded(shape: Any, packed: Any, masks: Any = None) -> Any:
        seen.append(int(shape.inputs.views(packed[0])["starts"][-1]))
        return run(shape, packed, masks)

    engine.runner.run = recorded  # type: ignore[method-assign]
    for n in range(work.requests):
        prompt = np.random.default_rng(n).integers(0, engines.VOCAB, work.prompt)
        engine.submit(prompt, SamplingParams(max_tokens=work.generated, ignore_eos=True))
    while engine.busy:
        engine.step()
    return seen


@proof("offload", count=30, sample=1, bound={"above": 1e-9}, counts=("of_bound",))
def steps_keep_to_the_bound(seed: int) -> dict[str, float]:
    """Drawn requests and limits: the tokens of each step are those of an engine. With drawn costs of steps the
    throughput of few requests and of many is at most the bound; how much of it the many reach is kept.
    """
    rng = np.random.default_rng(seed)
    sequences = int(rng.integers(1, 7))
    limits = EngineLimits(int(rng.integers(sequences, 24)), sequences, 80 * 8)
    p, g = int(rng.integers(1, 40)), int(rng.integers(1, 20))
    work = Workload(int(rng.integers(1, 12)), p, g)
    assert [tokens for tokens, _ in steps_of(limits, work)] == steps_of_an_engine(limits, work)
    above, reached = 0.0, 0.0
    for _ in range(20):
        least, each = rng.uniform(0, 2), rng.uniform(0.001, 0.1)
        seconds = lambda tokens, a=least, b=each: max(a, b * tokens)  # noqa: E731
        most = bound(seconds, limits, work).tokens_per_second
        few, many = (predicted(seconds, limits, Workload(n, p, g)) for n in (work.requests, 50 * sequences))
        above = max(above, max(few, many) / most - 1)
        reached = max(reached, many / most)
    return {"above": above, "of_bound": reached}
