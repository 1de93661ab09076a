"""Full fine-tuning of SmolLM2-135M, its optimizer state in memory and on disk: resident bytes, seconds of a step.

    python -m benchmarks.memory.disk_tier [--directory DIR] [--rows 8] [--length 512] [--steps 3] [--remat elementwise]
        [--timeline PAGE.html]
    python -m benchmarks.memory.disk_tier --parameters [--accumulate 4]

Each way runs in a process of its own on one CPU device: the recipe sft_smollm2 with all activations saved and the state
in memory, then with ``--remat`` and the state in files of ``--directory``. Resident bytes are the peak since before the
parameters are loaded, less what the process had then (Python, JAX and the compiled program); a step is the median of
those after the first. Where other programs run, the processors' time says more than the clock. The target is at most
half of the bytes in at most 1.3 times the time. The last step with files has a timeline of what computed, was read
and was written, which ``--timeline`` draws. ``--parameters`` puts the parameters of layers into the files too, and
leaves gradient clipping out of both ways.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any


def kib(field: str) -> int:
    """Memory of this process by a field of /proc/self/status, KiB."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0])


def measured(
    rows: int, length: int, steps: int, accumulate: int, parameters: bool, remat: str, directory: str, page: str
) -> dict[str, Any]:
    """Peak bytes, and seconds per step by the clock and of processors, of one way, in this process.

    Args:
        rows, length: of a batch.
        steps: at least 2.
        accumulate: micro-batches of a step.
        parameters: without gradient clipping, as parameters on disk need; those of layers are in ``directory``.
        remat: of the model.
        directory: of the disk tier; empty: the optimizer state is in memory.
        page: for the timeline of the last step; empty: none.
    """
    import jax

    from jaxllm.data import Prefetcher
    from jaxllm.train.disk.config import DiskConfig
    from jaxllm.train.disk.io_timeline import timed
    from jaxllm.train.recovery.resume import start_state
    from jaxllm.train.run import Run
    from recipes.sft import sft_smollm2

    recipe = sft_smollm2()
    with tempfile.TemporaryDirectory() as out:
        run = Run(
            replace(
                recipe,
                model=replace(recipe.model, remat=remat),
                data=replace(recipe.data, seq_len=length, batch_size=rows),
                accumulate=accumulate,
                optim=replace(recipe.optim, clip_norm=None) if parameters else recipe.optim,
                disk=DiskConfig(directory, parameters=parameters and bool(directory)),
                out=out,
            ),
            devices=jax.devices()[:1],
        )
        step, _ = run.compile_step()
        before = kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak of compiling does not count
        seconds, busy, losses, line = [], [], [], None
        with run.saver() as saver, jax.set_mesh(run.mesh), Prefetcher(run.batches, 0, run.put_batch) as batches:
            state, _ = start_state(run, saver)
            for number, batch in batches:
                tiers = [files.tier for files in (run.state_files, run.param_files) if files is not None]
                if tiers and number + 1 == steps:
                    line = step.timeline = timed(tiers)
                began, used = time.monotonic(), time.process_time()
                state, metrics = step(state, batch)
                losses.append(float(metrics["loss"]))
                for tier in tiers:
                    tier.flush()
                jax.block_until_ready(state.params)
                seconds.append(time.monotonic() - began)
                busy.append(time.process_time() - used)
                if number + 1 == steps:
                    break
    if line is not None:
        line.finish()
        if page:
            Path(page).write_text(line.page("A step with its state on disk"))
    return {
        "hidden": None if line is None else line.hidden(),
        "rates": None if line is None else [line.rate("read"), line.rate("write")],
        "bytes": (kib("VmHWM") - before) * 1024,
        "seconds": statistics.median(seconds[1:]),
        "processor": statistics.median(busy[1:]),
        "losses": losses,
    }


def main(argv: list[str] | None = None) -> None:
    """Prints both ways side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=".", help="on the disk of the state's files")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--remat", default="elementwise", help="with the state on disk")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--parameters", action="store_true", help="parameters on disk too; --remat is full")
    parser.add_argument("--timeline", default="", help="HTML page for the last step with files")
    parser.add_argument("--one", nargs=2, metavar=("REMAT", "DIRECTORY"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    sizes = args.rows, args.length, args.steps, args.accumulate
    if args.one:
        print(json.dumps(measured(*sizes, args.parameters, *args.one, args.timeline)))
        return
    found = []
    for remat, directory in (("none", ""), ("full" if args.parameters else args.remat, args.directory)):
        names = "rows", "length", "steps", "accumulate"
        words = [f"--{name}={value}" for name, value in zip(names, sizes, strict=True)]
        words += ["--parameters"] * args.parameters + [f"--timeline={args.timeline}"]
        command = [sys.executable, "-m", "benchmarks.memory.disk_tier", *words, "--one", remat, directory]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(result.stdout.splitlines()[-1]))
        where = f"in files of {directory}" if directory else "in memory"
        what = "parameters and optimizer state" if args.parameters else "optimizer state"
        print(
            f"{what} {where}, model.remat {remat}: {found[-1]['bytes'] / 2**30:.2f} GiB, "
            f"{found[-1]['seconds']:.1f} s per step ({found[-1]['processor']:.1f} s of processors), "
            f"losses {', '.join(f'{x:.4f}' for x in found[-1]['losses'])}",
            flush=True,
        )
    resident, disk = found
    share, slower, busier = (disk[name] / resident[name] for name in ("bytes", "seconds", "processor"))
    print(f"programs compute in {disk['hidden']:.0%} of the seconds in which files are read or written")
    read, write = (rate / 1e9 for rate in disk["rates"])
    print(f"files are read at {read:.2f} GB/s and written at {write:.2f}: disk and disk_write of a hardware file")
    print(f"{share:.2f} of the bytes in {slower:.2f} of the time ({busier:.2f} of the processors' time)")


if __name__ == "__main__":
    main()
