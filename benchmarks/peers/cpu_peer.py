"""Trains and decodes a 29M-parameter Llama on jaxllm and on transformers + torch, on this machine's CPU, in turn.

    python -m benchmarks.peers.cpu_peer --torch-python PATH [--rounds 8] [--out DIR]

PATH is a Python with torch and transformers (default: $TORCH_PYTHON, else this one). The two sides take turns, a step
each, the first of a pair changing from round to round; a ratio is the median over the pairs, so what else the machine
does falls on both. Prints a table; ``--out`` also writes it as cpu_peer.md beside cpu_peer.json.

The matmul-only floor is the time of a step's matrix products alone, each run by itself in the same library.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.interleaved import (
    OURS,
    THEIRS,
    Contender,
    Worker,
    cpu_name,
    in_turn,
    markdown,
    on_cores,
    ratio,
    versions,
)
from benchmarks.peers.setting import Setting

BATCHES = (1, 16)


@contextmanager
def workers(torch_python: str, setting: Setting, threads: int) -> Iterator[list[Worker]]:
    """Ours and the peer's."""
    ours = Contender("jaxllm", sys.executable, OURS, setting, threads)
    theirs = Contender("torch", torch_python, THEIRS, setting, threads)
    with ours.started() as one, theirs.started() as other:
        yield [one, other]


def compare(work: Sequence[float], answers: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Tokens per second of both sides and their ratio, ``work`` being the tokens of one answer of each."""
    seconds = [[answer["seconds"] for answer in side] for side in answers]
    rates = [tokens / median(side) for tokens, side in zip(work, seconds, strict=True)]
    middle, *ends = ratio(*([tokens / x for x in side] for tokens, side in zip(work, seconds, strict=True)))
    return {
        "tokens_per_second": rates,
        "fastest_tokens_per_second": [tokens / min(side) for tokens, side in zip(work, seconds, strict=True)],
        "ratio": middle,
        "ratio_range": ends,
        "cpu_seconds": [median(answer["cpu_seconds"] for answer in side) for side in answers],
        "seconds": seconds,
    }


def measure(torch_python: str, setting: Setting, threads: int, rounds: int) -> dict[str, Any]:
    """Everything, as plain data."""
    with workers(torch_python, setting, threads) as sides:
        first = [side.ask("train", steps=1) for side in sides]
        train = in_turn(sides, rounds, "train", steps=1)
        compiled = [side.ask("train", steps=1)["compiled"] for side in sides]
        result: dict[str, Any] = {
            "machine": {"cpu": cpu_name(), "threads": threads, "python": platform.python_version()},
            "setting": asdict(setting),
            "rounds": rounds,
            "sides": [side.about for side in sides],
            "seconds_to_first_step": [answer["since_start"] for answer in first],
            "compile_seconds": [answer["compiled"]["seconds"] for answer in first],
            "programs_after_first_step": [
                after["programs"] - answer["compiled"]["programs"]
                for after, answer in zip(compiled, first, strict=True)
            ],
            "train": compare([setting.tokens] * 2, train),
            "train_peak_mib": [side[-1]["peak_bytes"] / 2**20 for side in train],
        }
        floors = [min(side.ask("floor")["floor"] for _ in range(2)) for side in sides]
        result["matmul_floor_seconds"] = floors
        result["share_of_floor"] = [
            floor / min(seconds) for floor, seconds in zip(floors, result["train"]["seconds"], strict=True)
        ]
        result["decode"] = {}
        for batch in BATCHES:
            answers = in_turn(sides, rounds, "decode", batch=batch)
            result["decode"][str(batch)] = compare([side[0]["tokens"] for side in answers], answers)
    return result


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    ours, theirs = (side["name"] for side in result["sides"])
    s = result["setting"]
    rows: list[Sequence[str]] = [("", ours, theirs, "ratio")]

    def speed(what: str, part: dict[str, Any]) -> None:
        low, high = part["ratio_range"]
        a, b = part["tokens_per_second"]
        rows.append((what, f"{a:,.0f}", f"{b:,.0f}", f"**{part['ratio']:.2f}** ({low:.2f}-{high:.2f})"))

    def plain(what: str, pair: Sequence[float], form: str) -> None:
        rows.append((what, *(format(x, form) for x in pair), ""))

    speed(f"train, {s['batch']} x {s['seq_len']}, tokens/s", result["train"])
    for batch, part in result["decode"].items():
        speed(f"generate {s['new_tokens']} after {s['prompt']}, batch {batch}, tokens/s", part)
    plain("step: share of its own matmul-only floor", result["share_of_floor"], ".0%")
    plain("step: CPU seconds", result["train"]["cpu_seconds"], ".2f")
    plain("peak memory, MiB", result["train_peak_mib"], ",.0f")
    plain("start to end of first step, s", result["seconds_to_first_step"], ".1f")
    plain("of which tracing and compiling, s", result["compile_seconds"], ".1f")
    plain("programs compiled after the first step", result["programs_after_first_step"], "d")
    machine = result["machine"]
    about = f"{machine['cpu']}, {machine['threads']} threads; {versions(result['sides'])}"
    return f"{markdown(rows)}\n\n{about}; {result['rounds']} rounds in turn."


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, and writes if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", default=os.environ.get("TORCH_PYTHON", sys.executable))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, help="directory for cpu_peer.json and cpu_peer.md")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or not 1 <= options.threads <= len(os.sched_getaffinity(0)):
        parser.error("give at least one round, and no more threads than there are cores.")
    on_cores(options.threads)
    result = measure(options.torch_python, Setting(), options.threads, options.rounds)
    text = table(result)
    print(text)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "cpu_peer.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.out / "cpu_peer.md").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
