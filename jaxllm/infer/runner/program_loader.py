"""Program loader: makes the programs of an engine ready, the first ones at once and the others in the background.

An engine can run every step with its first programs, the largest ones, padded. It serves as soon as they are ready;
the others are compiled behind it, the most useful first, and ``ModelRunner.choose`` takes each from the next step on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

Loaded = TypeVar("Loaded")
_LOG = logging.getLogger("jaxllm.infer")
THREADS = "jaxllm compile"
"""Name of the threads that compile."""
_NICENESS = 10
"""Niceness of the background threads, where the system has one per thread: serving comes first."""


@runtime_checkable
class Named(Protocol):
    """Program that has a name."""

    @property
    def name(self) -> str:
        """Name of the program."""
        ...


class ProgramLoader(Mapping[str, Loaded]):
    """Mapping of the programs that are ready, by name; asking for one that is still in the queue waits for it.

    Args:
        programs: all programs, in the order in which they are wanted.
        load: loads or compiles a program.
        first: number of programs that are made ready here; the others by ``start``.
        progress: called with "compiling" (with "ready" from ``start`` on), the number of programs that are ready, and
            the number of all. An exception that it raises before ``start`` ends the loading.

    Raises:
        Exception: one of ``load`` or of ``progress``.
    """

    def __init__(
        self,
        programs: Sequence[Any],
        load: Callable[[Any], Loaded],
        first: int,
        progress: Callable[[str, int, int], None] | None = None,
    ):
        self.total, self._load, self._progress = len(programs), load, progress
        self._ready: dict[str, Loaded] = {}
        self._failures: dict[str, Exception] = {}
        self._queue, self._later, self._running = list(programs[:first]), list(programs[first:]), set[str]()
        self._changed, self._threads = threading.Condition(), list[threading.Thread]()
        self._stage, self._stopped = "compiling", False
        self._tell()
        with _foreground():
            self._begin(min(_cores(), first))
            try:
                # Interruptible, unlike the threads.
                with self._changed:
                    self._changed.wait_for(lambda: self._failures or len(self._ready) >= first)
            except BaseException:
                self.stop()
                raise
        if self._failures:
            self.stop()
            raise next(iter(self._failures.values()))

    def __getitem__(self, name: str) -> Loaded:
        if (found := self._ready.get(name)) is not None:
            return found
        with self._changed:
            while name not in self._ready:
                if name in self._failures:
                    raise self._failures[name]
                waiting = [program for program in self._queue if program.name == name]
                if self._stopped or not (waiting or name in self._running):
                    raise KeyError(name)
                for program in waiting:
                    self._queue.remove(program)
                    self._queue.insert(0, program)
                self._changed.wait()
            return self._ready[name]

    def __hash__(self) -> int:
        return id(self)

    def __contains__(self, name: object) -> bool:
        return name in self._ready

    def __iter__(self) -> Iterator[str]:
        return iter(self._ready)

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def complete(self) -> bool:
        """Whether all programs are ready."""
        return len(self._ready) == self.total

    def start(self) -> None:
        """Starts to make the other programs ready, in background threads that end with the process."""
        self._stage, self._queue, self._later = "ready", self._later, []
        self._tell()
        if self._queue:
            self._begin(max(1, _cores() - 1))

    def _begin(self, many: int) -> None:
        _alive.add(self)
        _stop_at_exit()
        for _ in range(many):
            thread = threading.Thread(target=self._work, args=(self._stage,), name=THREADS, daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait(self) -> None:
        """Waits until all programs are ready.

        Raises:
            Exception: a program could not be compiled.
        """
        for thread in self._threads:
            thread.join()
        for failure in self._failures.values():
            raise failure

    def stop(self) -> None:
        """Starts no further program; one that is being compiled is finished."""
        with self._changed:
            self._stopped = True
            self._queue.clear()
            self._changed.notify_all()

    def _work(self, stage: str) -> None:
        """Makes programs ready until there are none left."""
        if stage == "ready":
            with contextlib.suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (program := self._next(stage)) is not None:
            try:
                self._add(program, self._load(program))
                self._tell()
            except Exception as error:
                if stage == "ready":
                    # The engine goes on with the programs that it has; whoever waits for this one gets the error.
                    _LOG.warning("program %s could not be compiled: %s", program.name, error)
                with self._changed:
                    self._failures[program.name] = error
                    self._running.discard(program.name)
                    self._changed.notify_all()

    def _next(self, stage: str) -> Named | None:
        if stage == "ready":
            _idle.wait()  # the first programs of another engine come first
        with self._changed:
            if self._stopped or not self._queue or (self._failures and stage == "compiling"):
                return None
            program = self._queue.pop(0)
            self._running.add(program.name)
            return program

    def _add(self, program: Named, one: Loaded) -> None:
        with self._changed:
            # A new dictionary, since the engine's thread may be going through this one.
            self._ready = {**self._ready, program.name: one}
            self._running.discard(program.name)
            self._changed.notify_all()

    def _tell(self) -> None:
        if self._progress is not None and not self._stopped:
            self._progress(self._stage, len(self._ready), self.total)


_alive: weakref.WeakSet[ProgramLoader] = weakref.WeakSet()
_idle = threading.Event()
_idle.set()
_lock = threading.Lock()
_compiling = 0


@contextlib.contextmanager
def _foreground() -> Iterator[None]:
    """While this is open in any thread, background threads start no program."""
    global _compiling
    with _lock:
        _compiling += 1
        _idle.clear()
    try:
        yield
    finally:
        with _lock:
            _compiling -= 1
            if not _compiling:
                _idle.set()


def _cores() -> int:
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@functools.cache
def _stop_at_exit() -> None:
    """Starts a thread, once, that stops all loaders when the main thread has ended.

    Functions of ``atexit`` would be too late: JAX clears what it traces with in one of its own.
    """
    threading.Thread(target=_stop_all, name="end of program loaders").start()


def _stop_all() -> None:
    """Ends all threads before the interpreter does: a thread inside the compiler would crash it."""
    threading.main_thread().join()
    _idle.set()
    loaders = list(_alive)
    for loader in loaders:
        loader.stop()
    for loader in loaders:
        for thread in loader._threads:
            thread.join()
