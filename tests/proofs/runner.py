"""Proof runner: runs all units that a proof still lacks, in worker processes, with a live view."""

from __future__ import annotations

import concurrent.futures
import datetime
import functools
import gc
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tests import environment
from tests.proofs import harness, stored
from tests.proofs.harness import Errors, Proof, ProofError, Unit
from tests.proofs.journal import Journal, Origin

_BARREN = 3  # chunks in a row without a new example before a strategy counts as exhausted
_PLAIN_SECONDS = 15.0  # between progress lines where there is no terminal


class Case:
    """Progress of one proof: which units are done, which come next."""

    def __init__(self, proof: Proof, done: Iterable[Unit]):
        self.proof = proof
        self.done: dict[int, Unit] = {}
        self.seen: set[str] = set()
        self.worst: Errors = {}
        self.flying: set[int] = set()
        self.failed: set[int] = set()
        self._barren = 0
        for unit in done:
            self.add(unit)

    @property
    def run(self) -> int:
        """Trials that count: seeds, cases, or distinct examples."""
        return len(self.done) if self.proof.strategy is None else len(self.seen)

    @property
    def complete(self) -> bool:
        return self.run >= self.proof.count

    @property
    def seconds(self) -> float:
        return sum(unit.seconds for unit in self.done.values())

    def add(self, unit: Unit) -> None:
        if unit.index in self.done or (self.proof.strategy is None and unit.index >= self.proof.count):
            return
        before = self.run
        self.done[unit.index] = unit
        self.seen.update(unit.seen)
        self.worst = harness.merge(self.worst, unit.worst)
        self._barren = 0 if self.run > before else self._barren + 1
        if self._barren >= _BARREN and not self.complete:
            raise ProofError(
                f"{self.proof.name}: the strategy gives no new examples after {self.run} of {self.proof.count}: "
                "widen it or lower the count."
            )

    def next(self) -> int | None:
        """A unit to start now; None if enough are done or under way.

        After a failure the other listed cases still run, since each says something of its own; trials do not.
        """
        if self.failed and self.proof.cases is None:
            return None
        size = 1 if self.proof.strategy is None else self.proof.chunk
        if self.run + size * len(self.flying) + len(self.failed) >= self.proof.count:
            return None
        taken = self.flying | self.failed
        return next(i for i in itertools.count() if i not in self.done and i not in taken)

    def record(self, origin: Origin, seed: int, covers: str) -> dict[str, Any]:
        """Record of a proof for docs/proofs/<issue>.json. `covers`: digest of the code, see `covered_code`."""
        record = {
            "name": self.proof.name,
            "asked": self.proof.count,
            "run": self.run,
            "worst_error": stored.flat(self.worst),
            "bound": stored.flat(self.proof.bounds),
            "seconds": round(self.seconds, 1),
            "longest": round(max(unit.seconds for unit in self.done.values()), 1),
            "seed": seed,
            "commit": origin.commit,
            "dirty": origin.dirty,
            "code": origin.code,
            "covers": covers,
            "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": origin.versions,
        }
        if self.proof.bounds and self.proof.cases is not None:
            each = {label: stored.flat(self.done[i].worst) for i, label in enumerate(self.proof.labels())}
            record["each"] = each
        if self.proof.counts:
            record["counts"] = functools.reduce(harness.add, (unit.counts for unit in self.done.values()), {})
        return record


def run(
    cases: list[Case],
    journal: Journal,
    jobs: int,
    console: Console,
    *,
    failed: Callable[[Unit], None] = lambda unit: None,
    completed: Callable[[Case], None] = lambda case: None,
) -> None:
    """Runs what the cases lack; each passed unit is in the journal before the next one starts.

    Args:
        failed: called with each unit that failed; its traceback is in it.
        completed: called with each case when its last unit is in.

    Raises:
        ProofError: a strategy is exhausted before its count.
    """
    with _View(cases, console) as view:
        for group, width in (
            ([c for c in cases if c.proof.parallel], jobs),
            ([c for c in cases if not c.proof.parallel], 1),
        ):
            for case in group:
                if case.complete:
                    completed(case)
            if any(not c.complete for c in group):
                with _executor(width) as executor:
                    try:
                        for case, unit in _units(group, journal, width, executor):
                            if unit.failure:
                                failed(unit)
                                continue
                            view.update(case)
                            if case.complete:
                                completed(case)
                    except BaseException:
                        executor.shutdown(wait=False, cancel_futures=True)
                        raise


def _units(group: list[Case], journal: Journal, width: int, executor) -> Iterator[tuple[Case, Unit]]:
    flying: dict[Future, Case] = {}
    while True:
        for case in group:
            while len(flying) < width and (index := case.next()) is not None:
                case.flying.add(index)
                proof = case.proof
                future = executor.submit(work, proof.issue, proof.name, journal.seed, index, sorted(case.seen))
                flying[future] = case
        if not flying:
            return
        for future in concurrent.futures.wait(flying, return_when=concurrent.futures.FIRST_COMPLETED).done:
            case, unit = flying.pop(future), future.result()
            case.flying.discard(unit.index)
            before = case.complete
            if unit.failure:
                case.failed.add(unit.index)
            else:
                journal.add(unit)
                case.add(unit)
            if not before:  # two chunks may end a case, only the first is news
                yield case, unit


def work(issue: str, name: str, seed: int, index: int, seen: list[str]) -> Unit:
    """One unit, in a worker process."""
    proof = harness.load(issue)[name]
    unit = harness.run_unit(proof, seed, index, seen=seen)
    if proof.kind != "seeds":
        jax.clear_caches()  # every example has shapes of its own: their programs would pile up
        gc.collect()  # those that engines hold, which are in cycles
    return unit


class _InProcess:
    """Executor that runs a call at once, so that one job needs no second process."""

    def __enter__(self) -> _InProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def submit(self, function: Callable[..., Unit], *arguments: Any) -> Future:
        future: Future = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, **options: bool) -> None:
        pass


def _executor(width: int):
    if width == 1:
        return _InProcess()
    context = multiprocessing.get_context("spawn")  # not fork: JAX's threads do not survive one
    return concurrent.futures.ProcessPoolExecutor(width, context, _take_cores, (context.Value("i", 0), width))


def _take_cores(workers: Any, width: int) -> None:
    with workers.get_lock():
        number, workers.value = workers.value, workers.value + 1
    environment.take_cores(number % width, width)


class _View:
    """Bars on a terminal, a line now and then elsewhere."""

    def __init__(self, cases: list[Case], console: Console):
        self.console = console
        self._last = time.monotonic()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[worst]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks = {
            case.proof.name: self._bars.add_task(
                case.proof.name, total=case.proof.count, completed=min(case.run, case.proof.count), worst=_worst(case)
            )
            for case in cases
        }

    def __enter__(self) -> _View:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def update(self, case: Case) -> None:
        done = min(case.run, case.proof.count)
        self._bars.update(self._tasks[case.proof.name], completed=done, worst=_worst(case))
        if not self.console.is_terminal and (case.complete or time.monotonic() - self._last > _PLAIN_SECONDS):
            self._last = time.monotonic()
            self.console.print(f"{case.proof.name}: {done} of {case.proof.count}, {case.seconds:.0f} s  {_worst(case)}")


def _worst(case: Case) -> str:
    return ", ".join(
        f"{name} {case.worst[name]:.2g} (bound {case.proof.bounds[name]:.2g})" for name in sorted(case.worst)
    )
