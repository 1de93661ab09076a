"""``jaxllm generate --batch``: answers a file of requests, with a progress line on the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxllm.cli.errors import UsageError

if TYPE_CHECKING:
    from jaxllm.infer import LLM
    from jaxllm.serve.batches.offline_batch import BatchProgress

_SECONDS = 0.2
"""Time between two progress lines on a terminal; elsewhere, a line is written every 100 times as long."""


def generate_batch(source: Path, out: Path, name: str, load: Callable[[], LLM], ahead: int = 0) -> int:
    """Answers the requests of a file; returns the exit status, 1 if a line could not be answered.

    Args:
        source: requests, as OpenAI's batch API has them.
        out: file of the answers.
        name: name of the model in requests.
        load: loads the model; it is called once the files are found in order.
        ahead: lines that the engine is given beyond those that it runs, see ``run_offline``.

    Raises:
        UsageError: a file is missing or in the way, or an extra is not installed.
    """
    try:
        from jaxllm.serve import ServeConfig, backend_factory
        from jaxllm.serve.batches.offline_batch import BatchPaths, open_batch, run_offline
    except ModuleNotFoundError as error:
        raise UsageError(f"--batch needs {error.name}: pip install 'jaxllm[serve]'.") from None
    from jaxllm.files import DataError

    paths = BatchPaths(source, out)
    try:
        lines, journal = open_batch(paths)
    except DataError as error:
        raise UsageError(f"--batch: {error}") from None
    config = ServeConfig(name=name, queue=max(ServeConfig.queue, ahead))
    ended = run_offline(lines, journal, paths, config, backend_factory(load), _progress_writer(), ahead)
    print(f"{ended.completed} of {ended.total} requests answered: {out}", file=sys.stderr)
    if ended.failed:
        print(f"{ended.failed} requests failed: {paths.errors}", file=sys.stderr)
    return 1 if ended.failed else 0


def _progress_writer() -> Callable[[BatchProgress], None]:
    """Function that writes the progress to stderr, now and then."""
    terminal = sys.stderr.isatty()
    every, began = _SECONDS if terminal else 100 * _SECONDS, time.monotonic()
    due, first = began, -1

    def write(progress: BatchProgress) -> None:
        nonlocal due, first
        now, done = time.monotonic(), progress.completed + progress.failed
        first = done if first < 0 else first
        if now < due and done < progress.total:
            return
        due = now + every
        failed = f", {progress.failed} failed" if progress.failed else ""
        left = ""
        if done > first and done < progress.total:
            left = f", {(now - began) / (done - first) * (progress.total - done):.0f} s left"
        text = f"{done} of {progress.total} requests{failed}{left}"
        print(f"\r\x1b[K{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)
        if terminal and done == progress.total:
            print(file=sys.stderr)

    return write
