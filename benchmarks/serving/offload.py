"""Streamed weights: decoded tokens per second, predicted and measured, over batch, window, length and share on the
device.

    python -m benchmarks.serving.offload [--model smollm2] [--batches 1,8,32] [--windows 1,2,4] [--shares 0,0.5]
        [--lengths 32] [--rounds 3] [--disk DIR] [--json FILE]

The rates of the tiers are measured as by `jaxllm bench MODEL --tiers --prompt LENGTH`, before each round; the layers
that are not on the device are in files, which the page cache has. Of the rounds the fastest counts, predicted and
measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path

from jaxllm.convert.source_layers import open_layers
from jaxllm.infer import EngineConfig
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.open_streamed import open_streamed
from jaxllm.infer.streaming.placement_fit import ModelBytes, predict
from jaxllm.infer.streaming.tier_benchmark import ROUNDS, decode_step_seconds, measure_tiers, step_sizes

STEPS = 16
"""Steps that are timed, for rates too: attention on a CPU takes as long as for the longest sequence there may be."""


class StreamedDecoding:
    """An engine that decodes a batch with so much of the layers on the device and the rest in files of a folder."""

    def __init__(self, model: str, batch: int, window: int, share: float, length: int, folder: Path):
        self.batch, self.length = batch, length

        def choose(sizes: ModelBytes) -> OffloadBudget:
            self.sizes = sizes
            self.budget = OffloadBudget(window, int(share * sum(sizes.units)), 0, folder)
            return self.budget

        loaded = open_streamed(model, choose)
        config = EngineConfig(
            max_sequences=batch, max_len=length + 3 * STEPS, layer_window=window, **step_sizes([batch]),
            samplers=("plain",), prefix_cache=False,
        )  # fmt: skip
        self.engine = Engine.of(loaded.model, loaded.params, config, strict=True)

    def tokens_per_second(self) -> float:
        """Measured decoding of random prompts: the median of some steps, the fastest of as many times as rates are."""
        return self.batch / min(decode_step_seconds(self.engine, self.batch, self.length, STEPS) for _ in range(ROUNDS))


def main(argv: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--windows", default="1,2,4")
    parser.add_argument("--shares", default="0,0.5")
    parser.add_argument("--lengths", default="32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    numbers = (asked.batches, asked.windows, asked.lengths)
    batches, windows, lengths = ([int(n) for n in text.split(",")] for text in numbers)
    ways = [(b, w, float(s), n) for n in lengths for b in batches for w in windows for s in asked.shares.split(",")]
    loaded, layers = open_layers(asked.model)
    best: dict[tuple[int, int, float, int], list[float]] = {way: [0.0, 0.0] for way in ways}
    with tempfile.TemporaryDirectory(dir=asked.disk) as folder:
        made = {way: StreamedDecoding(asked.model, *way, Path(folder)) for way in ways}
        for number, length in itertools.product(range(asked.rounds), lengths):
            rates = measure_tiers(loaded, layers, asked.disk, batches=batches, prompt=length, steps=STEPS)
            print(f"round {number + 1}, {length} tokens: {rates}", file=sys.stderr, flush=True)
            for way, one in made.items():
                if one.length != length:
                    continue
                predicted = predict(one.sizes, rates, one.budget, one.batch).tokens_per_second
                found = predicted, one.tokens_per_second()
                best[way] = [max(old, new) for old, new in zip(best[way], found, strict=True)]
        for one in made.values():
            one.engine.runner.close()
    print(f"{'length':>6} {'batch':>5} {'window':>6} {'on device':>9} {'predicted':>9} {'measured':>9} {'ratio':>6}")
    for (batch, window, share, length), (predicted, measured) in best.items():
        print(
            f"{length:6} {batch:5} {window:6} {share:9.0%} {predicted:9.1f} {measured:9.1f} {predicted / measured:6.2f}"
        )
    errors = [abs(predicted / measured - 1) for predicted, measured in best.values()]
    print(f"error: median {statistics.median(errors):.0%}, worst {max(errors):.0%}")
    if asked.json is not None:
        rows = [dict(zip(("batch", "window", "share", "length", "predicted", "measured"), (*way, *both), strict=True))
                for way, both in best.items()]  # fmt: skip
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
