"""Experts in slots: decoded tokens per second, predicted and measured, over slots, batch and length.

    python -m benchmarks.serving.slot_decoding [--slots 2,4,8] [--batches 1,4] [--lengths 32,256] [--rounds 3]
        [--disk DIR] [--json FILE]

The prediction is that of `--offload fit` for a mixture (`slot_fit`): rates as `jaxllm bench MODEL --tiers` measures
them, before each round, and routing by chance. "by counts" is the same with the loads that the engine has counted in
place of those by chance, so it tells the error of the costs from that of the routing. The mixture has random weights;
experts wait in host memory, or for "files" in files that the page cache has. Of the rounds the fastest counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.serving.mixture_throughput import MODEL
from jaxllm.convert.load import LoadedModel
from jaxllm.infer import EngineConfig
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.streaming.experts.slot_fit import load_seconds
from jaxllm.infer.streaming.layer_store import LoadedLayers, units_of
from jaxllm.infer.streaming.offload_budget import OffloadBudget
from jaxllm.infer.streaming.open_streamed import UnitBytes, mixture_bytes, model_bytes
from jaxllm.infer.streaming.placement_fit import predict
from jaxllm.infer.streaming.streamed_runner import StreamedRunner
from jaxllm.infer.streaming.streamed_weights import StreamedWeights
from jaxllm.infer.streaming.tier_benchmark import decode_step_seconds, measure_tiers
from jaxllm.infer.streaming.tier_rates import TierRates
from jaxllm.models import functional
from jaxllm.text import ByteTokenizer

STEPS = 16
TIERS = ("host", "files")


class SlotDecoding:
    """An engine that decodes a batch with some experts of each layer in slots."""

    def __init__(self, params: Any, tier: str, slots: int, batch: int, length: int, folder: Path):
        self.batch, self.length = batch, length
        model, layers = functional(MODEL), LoadedLayers(params)
        ends = {name: value for name, value in params.items() if name != "segments"}
        of_units = [UnitBytes.of(layers, unit) for unit in units_of(MODEL.segments)]
        self.bytes = model_bytes(model, [one.whole for one in of_units], ends, mixture_bytes(model, of_units))
        rest = [one.rest for one in of_units]
        in_files: dict[str, Any] = {"disk": folder, "experts_host": 0} if tier == "files" else {}
        self.budget = OffloadBudget(1, sum(rest), experts=slots, **in_files)
        weights = StreamedWeights.of(model, ends, layers, self.budget.placement(rest), ["slots"])
        config = EngineConfig(
            max_sequences=batch, max_batched_tokens=batch, max_len=length + 3 * STEPS, layer_window=1,
            buckets=(batch,), samplers=("plain",), prefix_cache=False,
        )  # fmt: skip
        self.engine = Engine.of(model, weights, config, strict=True)

    def measure(self) -> tuple[float, float]:
        """(tokens per second, loads of a step in the mean)."""
        runner = self.engine.runner
        assert isinstance(runner, StreamedRunner)
        assert runner.experts is not None
        counts = runner.experts.counts
        before, wanted = counts.loads, counts.wanted
        seconds = decode_step_seconds(self.engine, self.batch, self.length, STEPS)
        share = (counts.loads - before) / (counts.wanted - wanted)
        mixtures = self.bytes.mixtures
        assert mixtures is not None
        return self.batch / seconds, share * mixtures.missing(0, self.batch)

    def predictions(self, rates: TierRates, loads: float) -> tuple[float, float]:
        """Tokens per second: (by chance, with so many loads a step)."""
        one, mixtures = predict(self.bytes, rates, self.budget, self.batch), self.bytes.mixtures
        assert mixtures is not None
        from_files = 0.0 if self.budget.experts_host is None else 1.0
        of_load = load_seconds(mixtures, rates, from_files, self.budget.loaders)
        other = one.seconds + (loads - mixtures.missing(self.budget.experts, self.batch)) * of_load
        return one.tokens_per_second, self.batch / other


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", default="2,4,8")
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--lengths", default="32,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(argv)
    slots, batches, lengths = (
        [int(n) for n in text.split(",")] for text in (asked.slots, asked.batches, asked.lengths)
    )
    ways = [(t, n, b, length) for t in TIERS for n in slots for b in batches for length in lengths]
    params = functional(MODEL).init(jax.random.key(0))
    ends = {name: value for name, value in params.items() if name != "segments"}
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    loaded = LoadedModel(functional(MODEL), ends, ByteTokenizer(), None, mesh, 0, {}, None)
    best: dict[tuple[str, int, int, int], list[float]] = {way: [0.0] * 3 for way in ways}
    with tempfile.TemporaryDirectory(dir=asked.disk) as folder:
        made = {way: SlotDecoding(params, *way, Path(folder)) for way in ways}
        for number in range(asked.rounds):
            for length in lengths:
                rates = measure_tiers(loaded, LoadedLayers(params), asked.disk, batches=batches, prompt=length)
                print(f"round {number + 1}, {length} tokens: {rates}", file=sys.stderr, flush=True)
                for way, one in made.items():
                    if way[3] == length:
                        measured, loads = one.measure()
                        found = *one.predictions(rates, loads), measured
                        best[way] = [max(old, new) for old, new in zip(best[way], found, strict=True)]
        for one in made.values():
            one.engine.runner.close()
    print(
        f"{'from':>5} {'slots':>5} {'batch':>5} {'length':>6} {'predicted':>9} {'by counts':>9} {'measured':>8} ratios"
    )
    for (tier, n, batch, length), (chance, counted, measured) in best.items():
        row = f"{tier:>5} {n:5} {batch:5} {length:6} {chance:9.1f} {counted:9.1f} {measured:8.1f}"
        print(f"{row} {chance / measured:5.2f} {counted / measured:5.2f}")
    for name, at in (("predicted", 0), ("by counts", 1)):
        errors = [abs(row[at] / row[2] - 1) for row in best.values()]
        print(f"{name}: off by {statistics.median(errors):.0%} in the median, {max(errors):.0%} at worst")
    if asked.json is not None:
        names = ("tier", "slots", "batch", "length", "predicted", "by_counts", "measured")
        rows = [dict(zip(names, (*way, *found), strict=True)) for way, found in best.items()]
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
