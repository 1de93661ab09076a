"""Experts in slots: decoded tokens per second, predicted and measured, over slots, batch, length and share of
the rest of the layers on the device.

    python -m benchmarks.serving.slot_decoding [--slots 2,3,4,6,8] [--batches 1,4] [--shares 1,0] [--lengths 32,256]
        [--rounds 3] [--disk DIR] [--json FILE]

The prediction is that of `--offload fit` for a mixture (`slot_fit`): rates as `jaxllm bench MODEL --tiers` measures
them, before each round, with shares of the experts in slots that need not be those of the table. The mixture has random
weights of 0.6 GB, which no processor's cache holds; experts wait in host memory, or for "files" in files that the page
cache has. What is not on the device of the rest of the layers is in host memory, with a window of two. Of the rounds
the fastest counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.random_mixture import RandomMixture, mixture_of
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.placement_fit import predict
from jaxllm.infer.streaming.tier_benchmark import ROUNDS, decode_step_seconds, measure_tiers, step_sizes
from jaxllm.infer.streaming.tier_rates import TierRates

STEPS = 16
TIERS = ("host", "files")


class SlotDecoding:
    """An engine that decodes a batch with some experts of each layer in slots."""

    def __init__(
        self, model: RandomMixture, tier: str, slots: int, batch: int, share: float, length: int, folder: Path
    ):
        self.model, self.batch, self.length = model, batch, length
        in_files: dict[str, Any] = {"disk": folder, "experts_host": 0} if tier == "files" else {}
        self.budget = OffloadBudget(2, int(share * sum(model.units[1])), experts=slots, **in_files)
        self.engine = model.engine(self.budget, max_sequences=batch, max_len=length + 3 * STEPS, **step_sizes([batch]))

    def measured(self) -> float:
        """Tokens per second: the median of some steps, the fastest of as many times as rates are."""
        return self.batch / min(decode_step_seconds(self.engine, self.batch, self.length, STEPS) for _ in range(ROUNDS))

    def predicted(self, rates: TierRates) -> float:
        """Tokens per second."""
        return predict(self.model.bytes, rates, self.budget, self.batch).tokens_per_second


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", default="2,3,4,6,8")
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--shares", default="1,0")
    parser.add_argument("--lengths", default="32,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    slots, batches, lengths = (
        [int(n) for n in text.split(",")] for text in (asked.slots, asked.batches, asked.lengths)
    )
    shares = [float(share) for share in asked.shares.split(",")]
    ways = list(itertools.product(TIERS, slots, batches, shares, lengths))
    model = RandomMixture(mixture_of(layers=6, heads=8, hidden=2048))
    best: dict[tuple[str, int, int, float, int], list[float]] = {way: [0.0] * 2 for way in ways}
    with tempfile.TemporaryDirectory(dir=asked.disk) as folder:
        made = {way: SlotDecoding(model, *way, Path(folder)) for way in ways}
        for number in range(asked.rounds):
            for length in lengths:
                sizes = {"batches": batches, "prompt": length, "steps": STEPS}
                rates = measure_tiers(model.loaded, model.layers, asked.disk, **sizes)
                print(f"round {number + 1}, {length} tokens: {rates}", file=sys.stderr, flush=True)
                for way, one in made.items():
                    if way[-1] == length:
                        found = one.predicted(rates), one.measured()
                        best[way] = [max(old, new) for old, new in zip(best[way], found, strict=True)]
        for one in made.values():
            one.engine.runner.close()
    print(f"{'from':>5} {'slots':>5} {'batch':>5} {'here':>5} {'length':>6} {'predicted':>9} {'measured':>8} ratio")
    for (tier, n, batch, share, length), (predicted, measured) in best.items():
        way = f"{tier:>5} {n:5} {batch:5} {share:5.0%} {length:6}"
        print(f"{way} {predicted:9.1f} {measured:8.1f} {predicted / measured:5.2f}")
    errors = [abs(predicted / measured - 1) for predicted, measured in best.values()]
    print(f"off by {statistics.median(errors):.0%} in the median, {max(errors):.0%} at worst")
    if asked.json is not None:
        names = ("tier", "slots", "batch", "here", "length", "predicted", "measured")
        rows = [dict(zip(names, (*way, *found), strict=True)) for way, found in best.items()]
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
