"""Step time of two processes of which one is slow, with equal and with uneven rows (``parallel.micro_batches``).

    python -m benchmarks.replicas.unequal_devices [--slow 3] [--accumulate 2] [--steps 12] [--repeats 2] [--json FILE]

Two processes of one CPU device each, pinned to a core, train one model along ``data``. The second is slow: SIGSTOP and
SIGCONT let it run for 1 / SLOW of the time, from its first steps on. Runs alternate between equal rows and rows by
speed, as ``jaxllm.plan.unequal.uneven_rows`` splits them. The figure is the median of the steps of a run without the
first four. docs/train/unequal.md shows it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxllm.files import DataError
from jaxllm.plan.unequal.uneven_rows import split_rows

PERIOD = 0.1
"""Seconds in which the slow process is stopped once."""
FIRST = 4
"""Steps that are not counted."""
LIMIT = 500.0
"""Seconds of a run."""
ROWS = 8
"""Rows of a micro-batch."""


def command(folder: Path, counts: Sequence[int], accumulate: int, steps: int) -> list[str]:
    """Command of each process: a decoder of 4 layers and 256 features."""
    settings = {
        "--mesh": "data=2",
        "--accumulate": accumulate,
        "--steps": steps,
        "--name": "unequal",
        "--out": folder,
        "--data.seq-len": 256,
        "--data.batch-size": ROWS * 2 * accumulate,
        "--data.tokenizer": "byte",
        "--data.cache-dir": folder,
        "--model.layers": 4,
        "--model.embed-dim": 256,
        "--model.vocab-size": 320,
        "--checkpoint.every": 10 * steps,
        "--log-every": 1,
    }
    given = [part for name, value in settings.items() for part in (name, str(value))]
    uneven = ["--parallel.micro-batches", *map(str, counts)] if len(set(counts)) > 1 else []
    return [sys.executable, "-m", "jaxllm.cli", "train", "quickstart", *given, *uneven]


def slowed(process: subprocess.Popen[bytes], share: float, begin: threading.Event, end: threading.Event) -> None:
    """Lets a process run for a share of the time, from one event to another."""
    begin.wait()
    while not end.is_set() and process.poll() is None:
        process.send_signal(signal.SIGSTOP)
        time.sleep(PERIOD * (1 - share))
        process.send_signal(signal.SIGCONT)
        time.sleep(PERIOD * share)


def measured(counts: Sequence[int], slow: float, accumulate: int, steps: int) -> float:
    """Median seconds of a step of a run whose second process is slow.

    Raises:
        DataError: the run failed; the message has what it printed.
    """
    with tempfile.TemporaryDirectory() as name, socket.socket() as one:
        folder = Path(name)
        one.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{one.getsockname()[1]}"
        one.close()
        cores = sorted(os.sched_getaffinity(0))
        common = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
            "JAXLLM_COORDINATOR": address,
            "JAXLLM_PROCESSES": "2",
        }
        running, logs = [], [folder / f"{rank}.log" for rank in range(2)]
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                start = command(folder, counts, accumulate, steps)
                running.append(
                    subprocess.Popen(start, stdout=file, stderr=file, env=common | {"JAXLLM_PROCESS_ID": str(rank)})
                )
            os.sched_setaffinity(running[-1].pid, {cores[rank % len(cores)]})
        begin, end = threading.Event(), threading.Event()
        thread = threading.Thread(target=slowed, args=(running[1], 1 / slow, begin, end))
        thread.start()
        metrics, deadline = folder / "unequal" / "metrics.jsonl", time.monotonic() + LIMIT
        try:
            while any(process.poll() is None for process in running) and time.monotonic() < deadline:
                rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
                if sum("step_seconds" in row for row in rows) >= 2:
                    begin.set()
                if sum("step_seconds" in row for row in rows) >= steps - 1:
                    end.set()
                time.sleep(0.2)
        finally:
            begin.set()
            end.set()
            thread.join()
            for process in running:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if any(process.returncode for process in running):
            raise DataError("\n".join(log.read_text()[-2000:] for log in logs))
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        seconds = [row["step_seconds"] for row in rows if "step_seconds" in row]
        return statistics.median(seconds[FIRST:-1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=float, default=3.0, help="times that the second process is slower")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a process, in the mean")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    even = (options.accumulate,) * 2
    uneven = split_rows([1.0, options.slow], [0.0, 0.0], 2 * options.accumulate)
    found: dict[str, Any] = {}
    print("| micro-batches | seconds of a step |\n|---|---:|")
    for counts in [even, uneven] * options.repeats:
        seconds = measured(counts, options.slow, options.accumulate, options.steps)
        found.setdefault(" ".join(map(str, counts)), []).append(seconds)
        print(f"| {', '.join(map(str, counts))} | {seconds:.2f} |", flush=True)
    equal, by_speed = (statistics.median(found[" ".join(map(str, counts))]) for counts in (even, uneven))
    print(f"\nequal over uneven: {equal / by_speed:.2f}")
    if options.json:
        given = {name: value for name, value in vars(options).items() if name != "json"}
        options.json.write_text(json.dumps({"options": given, "seconds": found}, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
