"""Time of rollouts over that of the same work in `jaxllm bench`: same prompts and lengths, in turns of one process.

    python -m benchmarks.posttraining.rollout_cost [--model smollm2] [--batch 16] [--prompt 64] [--tokens 64]
        [--rounds 5] [--json FILE]

Rollouts are sampled at temperature 1 with the log-probability of each token, and count until they are episodes: tokens,
log-probabilities and text. `jaxllm bench` decodes greedily. Judging, packing and updates are not in either.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    import numpy as np

    from jaxllm.convert.load import load_model
    from jaxllm.files import write_json
    from jaxllm.hub import find_model
    from jaxllm.infer.decode_benchmark import DecodeBenchmark
    from jaxllm.posttrain.prompts import Prompt
    from jaxllm.posttrain.rollouts import Completions, Requests, RolloutEngine, Sampling, sampled

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    batch, length, tokens = options.batch, options.prompt, options.tokens
    loaded = load_model(find_model(options.model))
    bench = DecodeBenchmark(loaded, batch, length, tokens, 1.0)
    budget = max(batch, 256)  # of the benchmark too
    assert loaded.tokenizer is not None
    engine = RolloutEngine(
        loaded.model, loaded.params, loaded.tokenizer, None, length + tokens, batch, batched_tokens=budget
    )
    rng = np.random.default_rng(0)

    def rollouts(prompts: list[Prompt], seed: int) -> Sampling[int]:
        """Rollouts as in training, but that none ends early: the work is that of the benchmark."""
        own = sampled(prompts, 1, tokens, seed)
        requests: Requests = [(ids, replace(params, ignore_eos=True)) for ids, params in next(own)]
        completions: Completions = yield requests
        try:
            own.send(completions)
        except StopIteration as done:
            return sum(len(one.tokens) for group in done.value for one in group)
        raise AssertionError("rollouts of one turn ask once")

    def rollout_seconds(seed: int) -> float:
        ids = rng.integers(0, loaded.model.config.vocab_size, (batch, length))
        prompts = [Prompt(tuple(map(int, row)), "", {}) for row in ids]
        start = time.perf_counter()
        found = engine.run(rollouts(prompts, seed))
        assert found == batch * tokens
        return time.perf_counter() - start

    def bench_seconds() -> float:
        found = bench.run()
        return found.seconds + found.prompt_seconds

    ratios = []
    for number in range(-1, options.rounds):
        times = bench_seconds(), rollout_seconds(number + 1)
        if number < 0:  # to warm up
            continue
        ratios.append(times[1] / times[0])
        print(f"round {number + 1}: bench {times[0]:.2f} s, rollouts {times[1]:.2f} s, {ratios[-1]:.3f}", flush=True)
    middle = statistics.median(ratios)
    print(f"{options.model}, {batch} of {length} + {tokens}: rollouts take {middle:.3f} of bench's time")
    if options.json:
        write_json(options.json, {**vars(options), "json": None, "ratios": ratios})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
