"""Planning time: ranking layouts and compiling the best three, with the peak memory of all processes.

    python -m benchmarks.plan [8b] [405b] [--no-compile]

8b: llama3_8b on v6e:8x8, 64 chips, meant to take less than 10 minutes on two cores; 405b: llama3_405b on v5p:8x8x8, 512
chips, less than 40; both less than 10 GiB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

RUNS = {"8b": ("llama3_8b", "v6e:8x8", 600), "405b": ("llama3_405b", "v5p:8x8x8", 2400)}
GIB = 2**30
LIMIT = 10 * GIB


def resident(pid: int) -> int:
    """Bytes of a process and its descendants."""
    total, family = 0, [pid]
    for member in family:
        try:
            status = Path(f"/proc/{member}/status").read_text()
            children = Path(f"/proc/{member}/task/{member}/children").read_text().split()
        except OSError:  # it has ended
            continue
        family += [int(child) for child in children]
        total += next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")), 0)
    return total


def measure(argv: list[str]) -> tuple[float, int]:
    """(seconds, peak bytes) of a command."""
    started, peak = time.monotonic(), 0
    process = subprocess.Popen([sys.executable, "-m", "jaxllm.cli", *argv])
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.25):
            peak = max(peak, resident(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    status = process.wait()
    over.set()
    watcher.join()
    if status:
        raise SystemExit(f"{' '.join(argv)} ended with {status}")
    return time.monotonic() - started, peak


def main() -> None:
    """Entry point of ``python -m benchmarks.plan``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*RUNS, []], default=[])
    parser.add_argument("--no-compile", action="store_true", help="rank only")
    given = parser.parse_args()
    for name in given.names or RUNS:
        recipe, on, limit = RUNS[name]
        argv = ["plan", recipe, "--on", on, "--top", "3", *(["--no-compile"] if given.no_compile else [])]
        seconds, peak = measure(argv)
        print(
            json.dumps(
                {
                    "run": f"{recipe} on {on}",
                    "compiled": not given.no_compile,
                    "seconds": round(seconds, 1),
                    "limit_seconds": limit,
                    "peak_GiB": round(peak / GIB, 2),
                    "limit_GiB": LIMIT // GIB,
                    "within": seconds < limit and peak < LIMIT,
                }
            )
        )


if __name__ == "__main__":
    main()
