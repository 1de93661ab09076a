"""Isolated compilation: runs a function in a child process set up to compile for a topology; its result is JSON.

A compiler needs its environment set before JAX starts, loads 600 MB, writes much to stderr, and sometimes aborts the
process instead of raising an error; none of that should happen in the caller's process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sharding.mesh import ShardingError
from sharding.topology import CompilerMissing, Topology

Progress = Callable[[float, str], None]
"""Called about once a second with the seconds since the start and the current stage, finally with "done"."""

# Variables that the child does not inherit: settings for the caller's own devices. The flags of one compiler abort
# another, and TPU_* and MEGASCALE_* of a real slice would describe the wrong one.
_DROPPED = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORM_NAME", "JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR")
_DROPPED_PREFIXES = ("TPU_", "MEGASCALE_", "JAX_COORDINATOR")
_QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
    # For all targets: an installed CUDA plugin without NVIDIA's libraries prints an error whenever JAX starts.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "PYTHONUNBUFFERED": "1",
}
# The child takes the caller's sys.path, so that it imports the same modules.
_BOOT = (
    "import json, sys; request = json.loads(sys.stdin.readline()); sys.path[:] = request['path']; "
    "from sharding.isolate import _serve; _serve(request)"
)
_SCALE = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
_OUT_OF_HBM = (
    # libtpu, before and after it schedules the program.
    re.compile(r"\(([\d.]+)([KMGTP]?)\) exceeds available HBM \(([\d.]+)([KMGTP]?)\)"),
    re.compile(r"Used ([\d.]+)([KMGTP]?) of ([\d.]+)([KMGTP]?) hbm"),
)

# Errors whose message is complete: raised again as they are.
_TYPED: dict[str, type[Exception]] = {"ShardingError": ShardingError, "CompilerMissing": CompilerMissing}

_tell: Callable[[dict[str, Any]], None] | None = None  # in a child: sends a message to the caller


class IsolatedError(RuntimeError):
    """Failure in the child: the function raised an exception, or the process died.

    Attributes:
        error: class name of the child's exception; ``""`` if the process died without one.
        traceback: traceback in the child, or the end of its stderr.
    """

    def __init__(self, message: str, error: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.error = error
        self.traceback = traceback


class OutOfDeviceMemory(RuntimeError):
    """Compilation error: the program does not fit in the memory of a device.

    Attributes:
        topology: name of the topology.
        need: bytes that the program needs on one device.
        limit: bytes of device memory available to a program.
    """

    def __init__(self, topology: str, need: int, limit: int) -> None:
        there, wanted, over = (f"{size / 2**30:.2f} GiB" for size in (limit, need, need - limit))
        super().__init__(
            f"the program needs {wanted} on each device of {topology}, but there are {there}: {over} too much. "
            "Shard over more devices, reduce the batch size, or recompute more (model.remat)."
        )
        self.topology = topology
        self.need = need
        self.limit = limit

    @classmethod
    def from_message(cls, message: str, topology: str) -> OutOfDeviceMemory | None:
        """Error parsed from a compiler's message; None if the message is about something else."""
        for pattern in _OUT_OF_HBM:
            if found := pattern.search(message):
                need, need_unit, limit, limit_unit = found.groups()
                return cls(topology, round(float(need) * _SCALE[need_unit]), round(float(limit) * _SCALE[limit_unit]))
        return None


def stage(text: str) -> None:
    """Reports the current stage to the caller's ``progress``; does nothing outside a child process."""
    if _tell is not None:
        _tell({"stage": text})


def run_isolated(
    target: str,
    topology: str | Topology,
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float | None = None,
    progress: Progress | None = None,
    env: Mapping[str, str] | None = None,
) -> Any:
    """Result of ``target(topology=..., **kwargs)``, run in a child process set up to compile for ``topology``.

    The child is killed when this call ends for any reason, and exits by itself when this process is killed.

    Args:
        target: ``"package.module:function"``, importable from here; it gets a ``Topology`` and returns JSON-able data.
        topology: topology or its name.
        kwargs: JSON-able arguments.
        timeout: limit in seconds.
        progress: progress callback, see ``Progress``.
        env: more environment variables, such as ``LIBTPU_INIT_ARGS``. ``XLA_FLAGS`` and the like are not inherited.

    Returns:
        The return value of ``target``, after a round trip through JSON (tuples become lists).

    Raises:
        ShardingError: unknown topology, or raised by ``target``.
        CompilerMissing: the child cannot compile for the topology; names the extra to install.
        OutOfDeviceMemory: the program is too large for the memory of a device.
        IsolatedError: ``target`` raised another exception, or the child died.
        TimeoutError: the child was not done after ``timeout`` seconds.
        TypeError: ``kwargs`` are not JSON-able.
    """
    topology = Topology.parse(topology) if isinstance(topology, str) else topology
    module, colon, function = target.partition(":")
    if not (module and colon and function) or module == "__main__":
        raise ValueError(
            f"target {target!r} must have the form 'package.module:function' and be importable in a child process."
        )
    request = {"target": target, "topology": topology.name, "kwargs": dict(kwargs or {}), "path": sys.path}
    line = json.dumps(request) + "\n"
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-c", _BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=_environment(topology, env),
            text=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        messages: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(child.stdout, messages), daemon=True)
        reader.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # an early death of the child is reported below
                child.stdin.write(line)
                child.stdin.flush()  # stays open: its end tells the child that this process is gone
            answer = _wait(messages, started, timeout, progress, f"{target} on {topology}")
            if answer is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=10)  # the child is ending by itself: wait for its exit status
        finally:
            child.kill()
            status = child.wait()
            reader.join()
            child.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            if progress is not None:
                progress(time.monotonic() - started, "done")
        if answer is None:
            stderr.seek(0)
            tail = stderr.read()[-4000:].strip()
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            last = tail.splitlines()[-1] if tail else "nothing on stderr"
            raise IsolatedError(f"{target} on {topology}: the child process died ({how}): {last}", traceback=tail)
    return _result(answer, target, topology)


def _environment(topology: Topology, more: Mapping[str, str] | None) -> dict[str, str]:
    inherited = {
        key: value for key, value in os.environ.items() if key not in _DROPPED and not key.startswith(_DROPPED_PREFIXES)
    }
    return inherited | _QUIET | topology.environment() | dict(more or {})


def _read(stdout: Iterable[str], messages: queue.Queue[str | None]) -> None:
    try:
        for line in stdout:
            messages.put(line)
    finally:
        messages.put(None)


def _wait(
    messages: queue.Queue[str | None], started: float, timeout: float | None, progress: Progress | None, what: str
) -> dict[str, Any] | None:
    """Final message of the child; None if it ends without one."""
    at = "starting"
    while True:
        elapsed = time.monotonic() - started
        if timeout is not None and elapsed > timeout:
            raise TimeoutError(f"{what} was not done after {timeout:g} s (it was {at}).")
        if progress is not None:
            progress(elapsed, at)
        try:
            left = 1.0 if timeout is None else min(1.0, max(0.01, timeout - elapsed))
            line = messages.get(timeout=left)
        except queue.Empty:
            continue
        message = None if line is None else json.loads(line)
        if message is None or "stage" not in message:
            return message
        at = message["stage"]


def _result(answer: dict[str, Any], target: str, topology: Topology) -> Any:
    if "result" in answer:
        return answer["result"]
    if "need" in answer:
        raise OutOfDeviceMemory(topology.name, answer["need"], answer["limit"])
    if answer["error"] in _TYPED:
        raise _TYPED[answer["error"]](answer["message"])
    raise IsolatedError(
        f"{target} on {topology}: {answer['error']}: {answer['message']}{answer['where']}",
        answer["error"],
        answer["traceback"],
    )


def _serve(request: dict[str, Any]) -> None:
    """Entry point of the child: runs the target and writes the result as JSON lines to its original stdout."""
    global _tell
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the target or of a library goes to stderr
    lock = threading.Lock()

    def tell(message: dict[str, Any]) -> None:
        text = json.dumps(message)
        with lock:
            channel.write(text + "\n")
            channel.flush()

    _tell = tell
    threading.Thread(target=_die_with_caller, daemon=True).start()
    topology = Topology.parse(request["topology"])
    try:
        module, _, function = request["target"].partition(":")
        result = getattr(importlib.import_module(module), function)(topology=topology, **request["kwargs"])
        tell({"result": result})
    except BaseException as error:
        tell(_describe(error, topology))
    os._exit(0)  # the teardown of the compilers is slow and not always clean


def _die_with_caller() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


def _describe(error: BaseException, topology: Topology) -> dict[str, Any]:
    memory = (
        error if isinstance(error, OutOfDeviceMemory) else OutOfDeviceMemory.from_message(str(error), topology.name)
    )
    if memory is not None:
        return {"need": memory.need, "limit": memory.limit}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    own = [frame for frame in frames if frame.filename != __file__]
    where = f" (at {own[-1].filename}:{own[-1].lineno} in {own[-1].name})" if own else ""
    return {
        "error": type(error).__name__,
        "message": str(error),
        "where": where,
        "traceback": "".join(traceback.format_exception(error)),
    }
