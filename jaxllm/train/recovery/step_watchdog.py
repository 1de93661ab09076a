"""Watchdog of the training loop: names a step that does not come back, instead of a run that is silent for ever.

Devices that wait for each other raise no error. A thread measures how long the loop has waited for its current step or
its batch, and says so when that is too long; it says it again after twice, four times, ... that time. It does not end
the run, because a slow step and a hanging one look the same; lost processes are ended by ``jaxllm.parallel.heartbeat``.

In a run of several processes each posts its step and phase, and the warning names those that are behind: devices wait
in a collective for the process that has not reached it (as in C4, arXiv:2406.04594, by phases of the host alone). Each
also posts the times of its last steps, and process 0 names one that is slow (``jaxllm.parallel.elastic.slow_ranks``).
In an elastic run the same goes to the supervisor instead, which ends a process that hangs or is slow
(``jaxllm.parallel.elastic.rank_monitor``).
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

from jaxllm.parallel.distributed import ProcessGroup
from jaxllm.parallel.elastic.rank_monitor import BATCH, HOST, KEPT, LoopPosition, RankReporter
from jaxllm.parallel.elastic.rank_monitor import WAITING as DEVICES
from jaxllm.parallel.elastic.slow_ranks import SHARE, RankStepTimes, SlowRanks

TOPIC = "step phases"
PERIOD = 2.0
"""Seconds, at most, between two posts of a process's phase and times."""
SAVING, EVALUATING = "saves", "evaluates"


class StepPhase(NamedTuple):
    """Phase of a process in the training loop.

    Attributes:
        step: number of the step, from 1.
        what: ``DEVICES``, ``BATCH``, ``HOST``, ``SAVING`` or ``EVALUATING``.
        since: ``time.monotonic()`` of its beginning; in a posted phase, seconds that it has lasted.
    """

    step: int
    what: str
    since: float


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class StepWatchdog:
    """Watchdog thread for the time of a ``with`` block.

    Args:
        seconds: the loop may wait so long for one step; 0: no watchdog.
        report: receives the message, in the watchdog's thread.
        group: the processes of the run.
        reporter: sends the phases to the supervisor of an elastic run; None for others.
    """

    def __init__(
        self,
        seconds: float,
        report: Callable[[str], None] = _to_stderr,
        group: ProcessGroup = ProcessGroup(),  # noqa: B008
        reporter: RankReporter | None = None,
    ):
        self._seconds = seconds
        self._report = report
        self._group = group
        self._loop = threading.current_thread()
        self._phase: StepPhase | None = None
        self._reporter = reporter
        self._spent = {BATCH: 0.0, HOST: 0.0, DEVICES: 0.0}
        self._late = 0.0
        self._steps: tuple[RankStepTimes, ...] = ()
        self._compared = SlowRanks(group.size, SHARE if group.is_leader else 0.0)
        self._newest = [0] * group.size
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="step-watchdog", daemon=True)

    def __enter__(self) -> StepWatchdog:
        if self._reporter is not None:
            self._reporter.position = self.position
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._seconds:
            self._thread.join()

    @contextlib.contextmanager
    def waiting_for(self, step: int) -> Iterator[None]:
        """Context manager around a call that returns when the devices have taken or finished ``step``."""
        self._enter(step, DEVICES)
        try:
            yield
        finally:
            self._enter(step, HOST)

    @contextlib.contextmanager
    def busy(self, step: int, what: str) -> Iterator[None]:
        """Context manager around work between two steps that is no part of either: ``SAVING`` or ``EVALUATING``."""
        self._enter(step, what)
        before = self._lateness()
        try:
            yield
        finally:
            self._late += self._lateness() - before
            self._enter(step, HOST)

    def position(self) -> LoopPosition:
        """Position of the loop, for the supervisor of an elastic run."""
        phase = self._phase
        if phase is None:
            return LoopPosition()
        return LoopPosition(phase.step, phase.what, round(time.monotonic() - phase.since, 3), self._steps)

    def batches(self, batches: Iterator[tuple[int, Any]], first: int) -> Iterator[tuple[int, Any]]:
        """The same batches; waiting for one is watched.

        Args:
            batches: (step, batch) pairs, steps from 0.
            first: step of the first one.
        """
        number = first
        while True:
            self._enter(number + 1, BATCH)
            try:
                number, batch = next(batches)
            except StopIteration:
                return
            finally:
                self._enter(number + 1, HOST)
            yield number, batch
            self._end_step(number + 1)
            number += 1

    def _enter(self, step: int, what: str) -> None:
        """Ends the current phase, whose time counts for the step that the loop is in, and begins another."""
        now = time.monotonic()
        if self._phase is not None and self._phase.what in self._spent:
            self._spent[self._phase.what] += now - self._phase.since
        self._phase = StepPhase(step, what, now)

    def _end_step(self, step: int) -> None:
        self._enter(step, HOST)
        late = self._lateness()
        times = RankStepTimes(step, self._spent[BATCH], self._spent[HOST], self._spent[DEVICES], late - self._late)
        self._late, self._spent = late, dict.fromkeys(self._spent, 0.0)
        self._steps = (*self._steps, times)[-KEPT:]

    def _lateness(self) -> float:
        return 0.0 if self._reporter is None else self._reporter.late

    def _watch(self) -> None:
        reported: StepPhase | None = None
        limit = self._seconds
        while not self._ended.wait(min(PERIOD, self._seconds / 4)):
            phase = self._phase
            if phase is None:
                continue
            spent = time.monotonic() - phase.since
            with contextlib.suppress(Exception):  # the store is gone: the heartbeat says why
                about = [phase.step, phase.what, round(spent, 1), socket.gethostname(), self._steps]
                self._group.post(TOPIC, json.dumps(about))
                if self._group.is_leader and self._reporter is None:
                    self._name_slow()
            if phase != reported:
                limit = self._seconds
            if phase.what not in (BATCH, DEVICES) or spent < limit:
                continue
            self._report(self._warning(phase, spent))
            reported, limit = phase, 2 * limit

    def _name_slow(self) -> None:
        """Reports a process that is slow, from the times that all have posted."""
        for rank, text in sorted(self._group.posted(TOPIC).items()):
            *_, host, steps = json.loads(text)
            for times in (RankStepTimes(*one) for one in steps):
                if times.step > self._newest[rank]:
                    self._newest[rank] = times.step
                    if (found := self._compared.add(rank, times)) is not None:
                        self._report(f"warning: process {found.rank} {found}. Reported by process {rank} (on {host}).")

    def _warning(self, phase: StepPhase, spent: float) -> str:
        if phase.what == BATCH:
            frame = sys._current_frames().get(self._loop.ident or 0)
            stack = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else ""
            return (
                f"warning: step {phase.step} has waited {spent:.0f} s for its batch. The data source is slow or hangs, "
                f"at:\n{stack}If batches are that slow, raise observe.stalled_after."
            )
        return (
            f"warning: step {phase.step} has not come back for {spent:.0f} s. Its devices may wait for each other, "
            "for example because a process is lost or runs another program; then end the run, and it resumes from "
            f"its newest checkpoint. If steps are that slow, raise observe.stalled_after.{self._behind(phase)}"
        )

    def _behind(self, phase: StepPhase) -> str:
        """Names of the processes that are behind ``phase``, which waits for its devices."""
        if self._group.size == 1:
            return ""
        try:
            posted = {rank: json.loads(text) for rank, text in self._group.posted(TOPIC).items()}
        except Exception as error:
            return f" The phases of other processes cannot be read ({error})."
        late = [
            f"process {rank} (on {host}) {what} for step {step}, for {seconds:.0f} s"
            for rank, (step, what, seconds, host, _) in sorted(posted.items())
            if rank != self._group.rank and (step, what == DEVICES) < (phase.step, True)
        ]
        silent = [str(rank) for rank in range(self._group.size) if rank not in posted]
        if silent:
            late.append(f"process {', '.join(silent)} has not begun a step")
        if late:
            return f" Behind this process: {'; '.join(late)}."
        return " All processes wait for their devices in this step, so a device or a link between them hangs."
