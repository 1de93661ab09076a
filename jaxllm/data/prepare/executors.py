"""Executors of a corpus: processes of this machine, a Slurm array, or a Ray cluster run the same tasks.

A stage begins when the one before is done. Workers share a file system with the folder of the corpus.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxllm.config import closest
from jaxllm.data.prepare.stages import STAGES, Corpus
from jaxllm.files import DataError

StageProgress = Callable[[str, int, int], None]
"""(stage, tasks done, tasks)."""
MOST_LOSSES = 3
"""Times that workers may be lost without a task done in between."""


def _corpus(work: str) -> Corpus:
    plan = (Path(work) / "plan.json").stat()
    return _opened_corpus(work, plan.st_ino, plan.st_mtime_ns)


@lru_cache(maxsize=1)
def _opened_corpus(work: str, inode: int, changed: int) -> Corpus:
    """Corpus of a work folder; a folder that was deleted and begun again is another corpus."""
    return Corpus(Path(work))


def run_task(work: str, stage: str, number: int) -> int:
    """Runs a task of a corpus in this process, and returns its number. A process opens a corpus once."""
    _corpus(work).run(stage, number)
    return number


@runtime_checkable
class TaskRunner(Protocol):
    """Runner of the tasks of a stage: yields the number of each when it is done."""

    def __call__(self, work: Path, stage: str, pending: list[int]) -> Iterable[int]:
        """Runs tasks in any order."""
        ...


def run_stages(work: Path, on: str, workers: int, progress: StageProgress) -> None:
    """Runs all stages, those tasks that are not done, on `local` or a Ray cluster.

    Raises DataError naming the file that cannot be used, or the tasks whose workers were lost several times.
    """
    with local_tasks(workers) if on == "local" else ray_tasks(on, workers) as run:
        for stage in STAGES:
            corpus = Corpus(work)
            total, pending = corpus.tasks(stage), corpus.pending(stage)
            done = total - len(pending)
            progress(stage, done, total)
            for _ in run(work, stage, pending):
                done += 1
                progress(stage, done, total)


def check_executor(on: str, workers: int) -> None:
    """Raises ValueError unless `on` is local, slurm, or ray with an address, and there is a worker."""
    if on not in ("local", "slurm", "ray") and not on.startswith("ray://"):
        raise ValueError(f"--on {on}: no such executor.{closest(on, ('local', 'slurm', 'ray'))} "
                         "Legal: local, slurm, ray (the cluster of this machine), ray://HOST:PORT")  # fmt: skip
    if workers < 1:
        raise ValueError(f"--workers {workers}: it must be 1 or more")


@contextmanager
def local_tasks(workers: int) -> Iterator[TaskRunner]:
    """Runner on this machine: in this process for one worker, else in so many processes."""
    if workers == 1:
        yield lambda work, stage, pending: (run_task(str(work), stage, number) for number in pending)
        return
    context = multiprocessing.get_context("spawn")
    pools = [ProcessPoolExecutor(workers, context)]

    def run(work: Path, stage: str, pending: list[int]) -> Iterator[int]:
        losses, left = 0, set(pending)
        while left:
            try:
                for one in as_completed({pools[0].submit(run_task, str(work), stage, number) for number in left}):
                    left.remove(one.result())
                    losses = 0
                    yield one.result()
            except BrokenProcessPool:
                losses += 1
                pools[0].shutdown(cancel_futures=True)
                pools[0] = ProcessPoolExecutor(workers, context)
                if losses == MOST_LOSSES:
                    raise DataError(
                        f"{work.parent}: stage {stage}: workers were lost {losses} times without finishing one of "
                        f"tasks {', '.join(map(str, sorted(left)[:5]))}; they may need more memory than there is: use "
                        "fewer workers. Run the command again to resume"
                    ) from None

    try:
        yield run
    finally:
        pools[0].shutdown(cancel_futures=True)


@contextmanager
def ray_tasks(address: str, workers: int) -> Iterator[TaskRunner]:
    """Runner on a Ray cluster: at most `workers` tasks at a time, each of one CPU, run again if its node is lost.

    Raises DataError if Ray is not installed, or the cluster cannot be reached.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
        from ray.exceptions import RayTaskError  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError("--on ray needs the package ray: pip install 'jaxllm[ray]'") from None
    mine = not ray.is_initialized()
    if mine:
        try:
            ray.init(address if address != "ray" else None, log_to_driver=False)
        except (ConnectionError, OSError, RuntimeError) as error:
            raise DataError(f"--on {address}: the Ray cluster cannot be reached ({error})") from None
    remote: Any = ray.remote(num_cpus=1, max_retries=5)(run_task)

    def run(work: Path, stage: str, pending: list[int]) -> Iterator[int]:
        waiting: list[Any] = []
        left = list(pending)
        while left or waiting:
            while left and len(waiting) < workers:
                waiting.append(remote.remote(str(work), stage, left.pop(0)))
            ready, waiting = ray.wait(waiting, num_returns=1)
            try:
                yield from ray.get(ready)
            except RayTaskError as error:
                raise DataError(str(error.cause)) from None if isinstance(error.cause, DataError) else error

    try:
        yield run
    finally:
        if mine:
            ray.shutdown()


def run_part(work: Path, part: str) -> None:
    """Runs a part of a stage: "STAGE:I/N" runs the tasks I, I + N, ... that are not done.

    Raises ValueError for another form, DataError for a task that fails or a stage before that is not done.
    """
    stage, _, share = part.partition(":")
    index, _, count = share.partition("/")
    if stage not in STAGES or not index.isdecimal() or not count.isdecimal() or int(index) >= int(count):
        raise ValueError(f"--part {part}: legal: STAGE:I/N with I below N, and a stage of {', '.join(STAGES)}")
    corpus = _corpus(str(work))
    corpus.require(stage)
    for number in range(int(index), corpus.tasks(stage), int(count)):
        run_task(str(work), stage, number)


def write_slurm(work: Path, corpus_file: Path, workers: int) -> Path:
    """Writes an array script for each stage and `submit.sh`, which submits them in order; returns its path."""
    folder = work / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "jaxllm.cli", "data", "prepare", str(corpus_file.resolve())]
    run = " ".join(map(shlex.quote, command))
    submit = ["#!/bin/bash", "set -euo pipefail", "after="]
    for stage in (*STAGES, "finish"):
        array = [] if stage == "finish" else [f"#SBATCH --array=0-{workers - 1}"]
        part = " --part finish" if stage == "finish" else f' --part "{stage}:$SLURM_ARRAY_TASK_ID/{workers}"'
        script = folder / f"{stage}.sbatch"
        lines = ["#!/bin/bash", f"#SBATCH --job-name=corpus-{stage}", "#SBATCH --cpus-per-task=1", *array]
        lines += [f"#SBATCH --output={folder}/{stage}-%A-%a.log", "set -euo pipefail", f"exec {run}{part}", ""]
        script.write_text("\n".join(lines))
        submit.append(
            f'after=$(sbatch --parsable "$@" ${{after:+--dependency=afterok:$after}} {shlex.quote(str(script))})'
        )
        submit.append(f'echo "{stage}: job $after"')
    path = folder / "submit.sh"
    path.write_text("\n".join([*submit, ""]))
    path.chmod(0o755)
    return path


def submit_slurm(script: Path) -> str | None:
    """Submits the jobs if this machine has sbatch; returns what it printed, or None without sbatch.

    Raises DataError with the message of sbatch if it refuses.
    """
    if shutil.which("sbatch") is None:
        return None
    found = subprocess.run([str(script)], capture_output=True, text=True, env=os.environ.copy())
    if found.returncode:
        raise DataError(f"{script}: sbatch refuses: {found.stderr.strip() or found.stdout.strip()}")
    return found.stdout
