"""llama.cpp as a peer of ``packed_weights``: decodes when it is told to. Run by another interpreter, with xllamacpp.

    PYTHON llama_cpp_peer.py MODEL.gguf BATCH LENGTH THREADS

It reads lines "PROMPT TOKENS" and answers each with one of JSON: tokens of all sequences per second, from their first
tokens on (llama.cpp's own times; those of the slowest sequence). Tokens are drawn at temperature 1, as those of
``decode_step_seconds`` are: greedy ones of a random mixture repeat themselves, and so do their experts. No module but
this interpreter's is imported.
"""

from __future__ import annotations

import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

WORDS = ("sea", "house", "river", "letter", "winter", "garden", "stone", "music", "engine", "paper")


def main() -> int:
    """Serves until its input ends."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    model, batch, length, threads = sys.argv[1], *map(int, sys.argv[2:5])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel, params.n_ctx = batch, batch * length
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt = False
    server = xllamacpp.Server(params)
    print(json.dumps({"info": xllamacpp.BUILD_INFO}), flush=True)

    def complete(given: tuple[int, int, int]) -> dict[str, Any]:
        seed, prompt, tokens = given
        text = " ".join(random.Random(seed).choices(WORDS, k=prompt))
        drawn = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": seed}
        body = drawn | {"prompt": text, "n_predict": tokens, "ignore_eos": True, "cache_prompt": False}
        found = server.handle_completions(body)
        return (json.loads(found) if isinstance(found, str) else found)["timings"]

    with ThreadPoolExecutor(batch) as pool:
        for line in sys.stdin:
            prompt, tokens = map(int, line.split())
            timings = list(pool.map(complete, [(seed, prompt, tokens) for seed in range(batch)]))
            seconds = max(one["predicted_ms"] for one in timings) / 1e3
            print(json.dumps({"tokens_per_second": sum(one["predicted_n"] for one in timings) / seconds}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
