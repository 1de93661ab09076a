"""Decode with packed weights beside plain ones, in one run.

    python -m benchmarks.serving.packed_weights [--model smollm2] [--weights packed,int4,int8] [--batches 1,16] [--json]

Formats take turns, and a round's ratio is of neighbours. "packed" are the codes of the file (GGUF, compressed-tensors,
GPTQ, AWQ); int4, int8, nf4 and mxfp4 are rounded to after loading. The embedding, which is the head too where they are
tied, stays in the dtype: it is read whole for every token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import jax


def main() -> int:
    """Measures and prints."""
    from jaxllm.infer import load_model
    from jaxllm.infer.decode_benchmark import DecodeBenchmark, memory_bandwidth

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="packed,int4,int8")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--layers", default="stacked", choices=["stacked", "apart"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = ["plain", *options.weights.split(",")]
    loaded = {
        name: load_model(options.model, dtype=options.dtype, weights=name, layers=options.layers) for name in names
    }
    bandwidth, rows = memory_bandwidth(), []
    for batch in map(int, options.batches.split(",")):
        benches = {
            name: DecodeBenchmark(model, batch, options.prompt, options.tokens, bandwidth)
            for name, model in loaded.items()
        }
        for bench in benches.values():
            bench.run()
        rounds = [{name: bench.run() for name, bench in benches.items()} for _ in range(options.rounds)]
        for name in names:
            ratios = sorted(one["plain"].seconds / one[name].seconds for one in rounds)
            row: dict[str, Any] = {
                "weights": name,
                "batch": batch,
                "mebibytes": sum(x.nbytes for x in jax.tree.leaves(loaded[name].params)) / 2**20,
                "tokens_per_second": statistics.median(one[name].tokens_per_second for one in rounds),
                "roofline": statistics.median(one[name].roofline for one in rounds),
                "of_plain": statistics.median(ratios),
                "of_plain_range": [ratios[0], ratios[-1]],
            }
            rows.append(row)
            print(
                f"batch {batch:3} {name:8} {row['mebibytes']:8.1f} MiB {row['tokens_per_second']:8.1f} tokens/s, "
                f"roofline {row['roofline']:.2f}, {row['of_plain']:.2f} of plain ({ratios[0]:.2f}-{ratios[-1]:.2f})",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
