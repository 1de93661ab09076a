"""Decode with packed weights beside plain ones, in one run.

    python -m benchmarks.serving.packed_weights [--model smollm2] [--weights packed,int4,int8] [--batches 1,16] [--json]
        [--llama-cpp PYTHON] [--threads 2]

Formats take turns, and a round's ratio is of neighbours. "packed" are the codes of the file (GGUF, compressed-tensors,
GPTQ, AWQ); int4, int8, nf4 and mxfp4 are rounded to after loading, with embedding and head in int8. With PYTHON, an
interpreter that has xllamacpp, llama.cpp decodes the same GGUF in the same rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax


class LlamaCpp:
    """llama.cpp in a process of its own, which decodes when it is told to."""

    def __init__(self, python: str, model: Path, batch: int, length: int, threads: int):
        script = Path(__file__).with_name("llama_cpp_peer.py")
        command = [python, str(script), *map(str, (model, batch, length, threads))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._answer()

    def run(self, prompt: int, tokens: int) -> float:
        """Decoded tokens per second of all sequences."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{prompt} {tokens}\n")
        self.process.stdin.flush()
        return self._answer()["tokens_per_second"]

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"{self.process.args}: llama.cpp ended with {self.process.wait()}.")
        return json.loads(line)


def main() -> int:
    """Measures and prints."""
    from jaxllm.hub import find_model
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
    parser.add_argument("--llama-cpp", help="an interpreter that has xllamacpp, to decode the same GGUF")
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp")
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
        peer, speeds = None, []
        if options.llama_cpp:
            length = 2 * (options.prompt + options.tokens)
            peer = LlamaCpp(options.llama_cpp, find_model(options.model), batch, length, options.threads)
            peer.run(options.prompt, options.tokens)
        rounds = []
        for _ in range(options.rounds):
            rounds.append({name: bench.run() for name, bench in benches.items()})
            speeds += [] if peer is None else [peer.run(options.prompt, options.tokens)]
        if peer is not None:
            peer.close()
            found = sorted(speed / one["plain"].tokens_per_second for speed, one in zip(speeds, rounds, strict=True))
            rows.append(
                {
                    "weights": "llama.cpp",
                    "batch": batch,
                    "tokens_per_second": statistics.median(speeds),
                    "of_plain": statistics.median(found),
                    "of_plain_range": [found[0], found[-1]],
                }
            )
            print(
                f"batch {batch:3} llama.cpp {statistics.median(speeds):21.1f} tokens/s, {statistics.median(found):.2f} "
                f"of plain ({found[0]:.2f}-{found[-1]:.2f})",
                flush=True,
            )
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
