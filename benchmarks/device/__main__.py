"""Device kit: measures on an accelerator what could not be measured without one, in slices.

    python -m benchmarks.device --minutes 9 --out figures             again, until it says that everything is measured
    python -m benchmarks.device --dry-run --on h100:1x1,h200:1x1      compiles all of it for devices that are not here
    python -m benchmarks.device --only "verdict *,training 8b *"      those slices, in this order
    python -m benchmarks.device --report figures                      writes docs/performance.md and the tuned blocks
    python -m benchmarks.device --wheels wheels                       downloads what a bare Python 3.12 with jax lacks

In order: verdicts of the self-check on every kernel of the platform, those that no default chooses too, block sizes,
flash and paged attention beside cuDNN and torch, training steps (MFU, memory and time beside the plan's), decoding
beside its roofline, and how much of an offload's copies is hidden. Each slice is a process of its own and is written to
OUT/device.json when it ends: the command may be stopped at any time, and the same OUT may be carried to the next
machine of that kind. Slices that time nothing, such as verdicts, run at the same time. On the device:

    pip install --no-index --find-links wheels wheels/*.whl && python -m benchmarks.device --minutes 9 --out figures
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.device import report, wheels
from benchmarks.device.slices import PARTS, Slice, slices
from jaxllm.compiler.aot import to_stderr
from jaxllm.files import write_json
from sharding.isolate import run_isolated

ABOUT = (
    "import jax, json, sys; from pallas_kernels._compat import target_device; here = target_device(); "
    "print(json.dumps([here.kind, here.platform, jax.__version__, sys.version]))"
)
LINES = 40
"""Of what a slice that failed said last, to be kept beside its figures."""
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".92"}


def here() -> dict[str, str]:
    """Kind of the device, its platform and versions, from a process that releases it."""
    said = subprocess.run([sys.executable, "-c", ABOUT], capture_output=True, text=True, check=True).stdout
    return dict(zip(("device", "platform", "jax", "python"), json.loads(said.splitlines()[-1]), strict=True))


def measured(one: Slice, tiny: bool, seconds: float) -> dict[str, Any]:
    """Figures of a slice, measured in a process of its own; "failed" says why there are none.

    Raises:
        TimeoutError: it was not done after so many seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "benchmarks.device.slices", one.name, "tiny" if tiny else "all", str(out)]
        began = time.monotonic()
        child = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT | os.environ,
            start_new_session=True,
        )
        try:
            _, said = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            raise TimeoutError(one.name) from None
        took = {"part": one.part, "seconds": round(time.monotonic() - began, 1)}
        if child.returncode == 0 and out.exists():
            return {**took, "result": json.loads(out.read_text())}
        lines = said.strip().splitlines() or [f"exit status {child.returncode}"]
        return {**took, "failed": lines[-1][:300], "trace": lines[-LINES:]}


def measure_all(file: Path, minutes: float, chosen: Sequence[Slice], tiny: bool) -> int:
    """Measures the slices that are not in the file, until the time is over; returns how many are left."""
    began, about = time.monotonic(), here()
    kept = json.loads(file.read_text()) if file.exists() else {"about": about, "slices": {}}
    if kept["about"]["device"] != about["device"]:
        raise SystemExit(
            f"{file} has figures of {kept['about']['device']}, and this is {about['device']}: another --out."
        )
    chosen = [one for one in chosen if one.is_for(about["platform"])]
    left = [one for one in chosen if one.name not in kept["slices"]]
    print(f"{about['device']}, jax {about['jax']}: {len(left)} slices to measure", flush=True)
    keeping, remaining = threading.Lock(), lambda: 60 * minutes - (time.monotonic() - began)

    def run(one: Slice, last_chance: bool) -> bool:
        """Whether there was time for the slice; one that had all the time there is counts as failed."""
        try:
            found = measured(one, tiny, max(1.0, remaining()))
        except TimeoutError:
            if not last_chance:
                return False
            found = {"part": one.part, "seconds": 60 * minutes, "failed": f"not done in {minutes:g} minutes"}
        at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with keeping:
            kept["slices"][one.name] = {**found, "at": at}
            write_json(file, kept)
            print(f"{one.name}: {found.get('failed', 'measured')} ({found['seconds']:.0f} s)", flush=True)
        return True

    timed = [one for one in left if one.timed]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        list(pool.map(lambda one: run(one, last_chance=True), (one for one in left if not one.timed)))
    for number, one in enumerate(timed):
        if number and remaining() < 60 * one.minutes:
            continue  # a shorter one may still have the time
        if not run(one, last_chance=not number):
            break
    print(report.tables(kept))
    return sum(one.name not in kept["slices"] for one in left)


def dry_run(on: Sequence[str], chosen: Sequence[Slice], tiny: bool) -> int:
    """Compiles the slices for each topology; returns how many do not compile."""
    failed = 0
    for topology in on:
        arguments = {"tiny": tiny, "names": [one.name for one in chosen]}
        found = run_isolated("benchmarks.device.slices:compiled_here", topology, arguments, progress=to_stderr)
        print(f"{topology}: {len(found)} slices")
        for name, figures in found.items():
            failed += "failed" in figures
            print(f"  {name}: {json.dumps(figures)}")
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns an exit status: 1 if slices are left, or do not compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="no slice is started that may end later")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for device.json")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--only", help="names of slices, such as 'training 8b *', with commas between them")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--on", default="h100:1x1,h200:1x1", help="topologies for --dry-run")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the kit")
    parser.add_argument("--report", type=Path, help="folder of device.json")
    parser.add_argument("--wheels", type=Path, help="folder to download wheels to")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: legal are {', '.join(PARTS)}.")
    chosen = [one for one in slices(options.tiny) if one.part in parts]
    if options.only is not None:
        wanted = [pattern.strip() for pattern in options.only.split(",")]
        if useless := [w for w in wanted if not any(fnmatchcase(one.name, w) for one in chosen)]:
            parser.error(f"--only: no slice is named {', '.join(useless)}: {'; '.join(one.name for one in chosen)}.")
        found = {one.name: one for w in wanted for one in chosen if fnmatchcase(one.name, w)}
        chosen = list(found.values())
    if options.wheels is not None:
        return wheels.download(options.wheels)
    if options.report is not None:
        report.write(json.loads((options.report / "device.json").read_text()))
        return 0
    if options.dry_run:
        return min(1, dry_run(options.on.split(","), chosen, options.tiny))
    options.out.mkdir(parents=True, exist_ok=True)
    left = measure_all(options.out / "device.json", options.minutes, chosen, options.tiny)
    print(f"{left} slices are left: the same command goes on." if left else "everything is measured.")
    return min(1, left)


if __name__ == "__main__":
    sys.exit(main())
