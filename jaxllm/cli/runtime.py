"""Runtime of commands: the process group of a distributed run, the compilation cache, and how a process ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxllm.cli.errors import is_user_error

if TYPE_CHECKING:
    from jaxllm.parallel.distributed import DistributedConfig, ProcessGroup


@contextlib.contextmanager
def processes(config: DistributedConfig | None = None, advice: str | None = None) -> Iterator[ProcessGroup]:
    """Joins the process group of a distributed job while the context is open; detects the cluster by environment.

    Args:
        config: time limits.
        advice: what a user does after a process was lost; None: that of a training run.
    """
    from jaxllm.parallel.cluster_environment import detect, tpu_metadata
    from jaxllm.parallel.distributed import running
    from jaxllm.parallel.heartbeat import RESUME

    cluster = detect(os.environ, tpu_metadata)
    if cluster.processes > 1:
        print(f"joining as {cluster}", file=sys.stderr)

    def plain(error: BaseException) -> bool:
        return isinstance(error, Exception) and is_user_error(error)

    with running(cluster, config, plain=plain, advice=RESUME if advice is None else advice) as group:
        yield group


def is_first_process() -> bool:
    """Whether this process is the first of its distributed job, or the only one."""
    from jaxllm.parallel.cluster_environment import detect, tpu_metadata

    return detect(os.environ, tpu_metadata).rank == 0


def use_compilation_cache() -> None:
    """Enables JAX's persistent compilation cache, unless the user has configured its directory."""
    import jax

    from jaxllm.files import cache_root

    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(cache_root("") / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@contextlib.contextmanager
def ends_at_interrupt() -> Iterator[None]:
    """While this is open, Ctrl-C ends the process at once, whatever its threads do.

    For commands whose threads load and compile: these cannot be interrupted, and the interpreter waits for them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        os.write(2, b"\ninterrupted\n")
        os._exit(128 + number)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_process(status: int) -> int:
    """Returns an exit status; ends the process with it if threads still load or compile, which nothing interrupts."""
    if any(thread.name.startswith("jaxllm ") for thread in threading.enumerate()):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    return status
