"""Mixtures whose layers are in files: generated tokens per second of whole requests, predicted and measured.

    python -m benchmarks.serving.mixture_throughput [--windows 1,2] [--batches 2,8] [--lengths 16+16,64+32] [--rounds 3]
        [--disk DIR] [--json FILE]

The prediction is that of `--offload fit,prompt=...` (MoE-Lens' model in two stages): its bound, and the steps of four
times the batch of requests. The mixture has random weights, 8 experts of which a token has 2. Rates are measured before
each round; the page cache has the files. Of the rounds the fastest counts, predicted and measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.random_mixture import RandomMixture, mixture_of
from jaxllm.infer import SamplingParams
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.placement_fit import predict
from jaxllm.infer.streaming.throughput_bound import EngineLimits, Workload, bound, predicted
from jaxllm.infer.streaming.tier_benchmark import measure_tiers

STEP_TOKENS = 64
"""Most tokens of a step, and the size of its program: the cost of a step does not depend on how full it is."""
TURNS = 4
"""Requests, in batches."""


class StreamedWorkload:
    """An engine with the mixture's layers in files, and requests for it."""

    def __init__(self, model: RandomMixture, window: int, batch: int, prompt: int, generated: int, folder: Path):
        self.work = Workload(TURNS * batch, prompt, generated)
        self.limits = EngineLimits(STEP_TOKENS, batch, batch * (prompt + generated))
        self.bytes, self.budget = model.bytes, OffloadBudget(window, 0, 0, folder)
        self.engine = model.engine(
            self.budget, max_sequences=batch, max_batched_tokens=STEP_TOKENS, max_len=prompt + generated,
            buckets=(STEP_TOKENS,),
        )  # fmt: skip

    def tokens_per_second(self) -> float:
        """Measured: generated tokens of all requests by the time until the last."""
        rng, work = np.random.default_rng(0), self.work
        params = SamplingParams(max_tokens=work.generated, temperature=0.0, ignore_eos=True)
        for _ in range(work.requests):
            self.engine.submit(rng.integers(0, self.engine.vocab_size, work.prompt), params)
        begin = time.perf_counter()
        while self.engine.busy:
            self.engine.step()
        return work.requests * work.generated / (time.perf_counter() - begin)

    def predictions(self, rates: Any) -> tuple[float, float]:
        """(bound, prediction of the requests), in tokens per second."""
        seconds = predict(self.bytes, rates, self.budget, STEP_TOKENS).seconds
        return bound(lambda _: seconds, self.limits, self.work).tokens_per_second, predicted(
            lambda _: seconds, self.limits, self.work
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", default="1,2")
    parser.add_argument("--batches", default="2,8")
    parser.add_argument("--lengths", default="16+16,64+32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    lengths = [tuple(map(int, text.split("+"))) for text in asked.lengths.split(",")]
    ways = [
        (int(w), int(b), p, g) for w in asked.windows.split(",") for b in asked.batches.split(",") for p, g in lengths
    ]
    model = RandomMixture(mixture_of(layers=6, heads=4, hidden=512))
    best: dict[tuple[int, ...], list[float]] = {way: [0.0] * 3 for way in ways}
    with tempfile.TemporaryDirectory(dir=asked.disk) as folder:
        made = {way: StreamedWorkload(model, *way, Path(folder)) for way in ways}
        for _ in range(asked.rounds):
            rates = measure_tiers(model.loaded, model.layers, asked.disk, batches=[STEP_TOKENS], prompt=32, slots=False)
            for way, one in made.items():
                found = *one.predictions(rates), one.tokens_per_second()
                best[way] = [max(old, new) for old, new in zip(best[way], found, strict=True)]
        for one in made.values():
            one.engine.runner.close()
    print(
        f"{'window':>6} {'batch':>5} {'prompt':>6} {'generated':>9} {'bound':>8} {'predicted':>9} {'measured':>8} ratio"
    )
    for (w, b, p, g), (most, one, measured) in best.items():
        print(f"{w:6} {b:5} {p:6} {g:9} {most:8.1f} {one:9.1f} {measured:8.1f} {one / measured:5.2f}")
    errors = [abs(one / measured - 1) for _, one, measured in best.values()]
    print(f"error: median {statistics.median(errors):.0%}, worst {max(errors):.0%}")
    if asked.json is not None:
        names = ("window", "batch", "prompt", "generated", "bound", "predicted", "measured")
        rows = [dict(zip(names, (*way, *found), strict=True)) for way, found in best.items()]
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
