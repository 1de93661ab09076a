"""Elastic supervisor: when a process is lost, hung or slow, the run goes on with the others within seconds.

    a process is killed or crashes     named; the others are ended at once, and those left form the next generation
    a process hangs or is slow         named by ``rank_monitor``; the same
    a slot that was out returns        the processes save at their next checkpoint and form again with it
    every process ends with 0          the supervisor ends
    a user error (2), SIGTERM, SIGINT  as in ``jaxllm.parallel.supervisor``

Processes of a generation that has lost one cannot go on in place: their devices wait in a collective that nothing
interrupts, and XLA has no way to leave it. So every generation has new processes. They cost no imports, because they
are forked (``warm_start``), and no compilation that was done before, because programs are in the persistent cache;
their state is in the peer servers' memory, which outlives them.
"""

from __future__ import annotations

import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.parallel.elastic.membership import ElasticPolicy, Membership
from jaxllm.parallel.elastic.process_starts import ProcessStarts
from jaxllm.parallel.elastic.rank_monitor import RankFailure, RankMonitor
from jaxllm.parallel.elastic.run_generation import REFORMED, RunGeneration
from jaxllm.parallel.elastic.warm_start import WarmProcess
from jaxllm.parallel.heartbeat import EXIT
from jaxllm.parallel.supervisor import WANTED, ProcessSpec, RestartPolicy, describe_exit

POLL = 0.02
SETTLE = 0.1
"""Seconds after the first loss in which further losses count as of the same moment."""
CAUSE = 3.0
"""Seconds to wait for the process whose end the others have followed."""
STARVED = 4.0
"""Multiple of ``hung_after`` that a silent process gets while its threads are ready to run."""
CONSEQUENCES = (EXIT, -signal.SIGABRT)
"""Ends of processes that follow the loss of another: by the heartbeat, and by JAX itself."""
INNOCENT = (0, REFORMED, *CONSEQUENCES)
"""Ends of processes that have not failed by themselves."""


class ElasticSupervisor:
    """Supervisor of an elastic run on one machine or several.

    Args:
        make: creates the processes of a generation by rank, from its slots, its coordinator's address and its
            variables.
        slots: number of slots.
        starts: where they are started; closed at the end.
        host: name by which processes reach this machine.
        patience: for failures in a row without a step in between; a generation that does a step ends the row.
        policy: what counts as a failure.
        say: prints a line for the user.
    """

    def __init__(
        self,
        make: Callable[[Sequence[int], str, Mapping[str, str]], Sequence[ProcessSpec]],
        slots: int,
        starts: ProcessStarts,
        host: str = "127.0.0.1",
        patience: RestartPolicy | None = None,
        policy: ElasticPolicy | None = None,
        say: Callable[[str], None] = lambda text: print(f"launch: {text}", file=sys.stderr, flush=True),
    ):
        self._make, self._starts, self._host = make, starts, host
        self._patience, self._policy, self._say = patience or RestartPolicy(), policy or ElasticPolicy(), say
        self._members = Membership(slots, self._policy)
        self._key = secrets.token_hex(4)
        self._running: list[WarmProcess] = []
        self._events: list[dict[str, Any]] = []
        self._stopping = 0
        self._signals: list[int] = []  # to be passed on to the processes
        self._failed_at = 0.0
        self._out: set[int] = set()  # slots that failed and are in no generation since

    def run(self) -> int:
        """Exit status of the run: 0, or that of the process that failed first."""
        passed = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
        old = {number: signal.signal(number, self._note_signal) for number in passed}
        monitor, code = RankMonitor(self._policy, host=self._host), 1
        try:
            code = self._generations(monitor)
            code = code if code >= 0 else 128 - code
            return code
        finally:
            self._kill()
            self._starts.close(code)
            monitor.close()
            for each, handler in old.items():
                signal.signal(each, handler)

    def _generations(self, monitor: RankMonitor) -> int:
        number, failures, slots = 0, 0, ()
        self._gather()
        while True:
            slots = self._wait_for_slots(slots)
            if not slots:
                return 128 + self._stopping
            self._events += [self._event("returned", slot=slot) for slot in slots if slot in self._out]
            self._out.difference_update(slots)
            number += 1
            generation = RunGeneration(
                number, slots, self._members.wanted, self._key, monitor.address, tuple(self._events)
            )
            monitor.watch(generation.name, len(slots))
            specs = self._make(slots, self._starts.coordinator(slots[0]), generation.environment())
            self._running += [self._starts.start(slot, spec) for slot, spec in zip(slots, specs, strict=True)]
            code = self._watch(generation, monitor)
            progressed = max(monitor.steps, default=0) > 0
            self._kill()
            if progressed:  # else its process 0 may not have come to write them
                del self._events[: len(generation.events)]
            if code is not None:
                return code
            failures = 0 if progressed else failures + 1
            if failures > self._patience.restarts:
                self._say(f"giving up after {self._patience.restarts} failures in a row without a step")
                return 1
            if failures > 1 and not self._sleep(self._patience.wait(failures - 1)):
                return 128 + self._stopping

    def _watch(self, generation: RunGeneration, monitor: RankMonitor) -> int | None:
        """Watches a generation to its end; exit status of the run, or None if another generation follows."""
        reforming = False
        while True:
            self._pause()
            failure = monitor.poll()
            codes = [process.poll() for process in self._running]
            self._say_recovered(monitor)
            if failure is not None and failure.kind == "hung" and self._is_starved(failure):
                failure = None
            if failure is not None and codes[failure.rank] is None and not self._stopping:
                self._lose(generation, [failure])
                return None
            if any(code not in (None, 0, REFORMED) for code in codes):
                return self._ended(generation, monitor)
            if None not in codes:
                if REFORMED not in codes:
                    return 0
                more = len(self._choose(generation.slots))
                self._say(f"all {len(codes)} processes have saved; forming again with {more} slots")
                return None
            if not reforming and max(monitor.steps) > 0:
                back = sorted(set(self._choose(generation.slots)) - set(generation.slots))
                if back:
                    self._say(f"{', '.join(map(self._starts.place, back))} returned; taken in after the current step")
                    reforming = True
            if reforming:
                monitor.ask_to_reform()

    def _ended(self, generation: RunGeneration, monitor: RankMonitor) -> int | None:
        """Looks at processes that ended with an error; exit status of the run, or None to go on without them."""
        began = time.monotonic()

        def causes() -> dict[int, int]:
            codes = enumerate(process.poll() for process in self._running)
            return {rank: code for rank, code in codes if code is not None and code not in INNOCENT}

        self._wait_until(lambda: bool(causes()), CAUSE)
        self._wait_until(lambda: all(process.poll() is not None for process in self._running), SETTLE)
        first = causes()
        # If a process was killed, or its host is gone, the user errors of others may have followed from that.
        killed = {rank: code for rank, code in first.items() if code < 0}
        if self._stopping or (not killed and any(code in WANTED for code in first.values())):
            everybody = self._running
            self._wait_until(lambda: all(one.poll() is not None for one in everybody), self._patience.grace)
            codes = [process.poll() for process in self._running]
            code = next((code for code in codes if code in WANTED), next((code for code in codes if code), 0))
            if not self._stopping:
                self._say(f"process {codes.index(code)} {describe_exit(code or 0)}; not restarted")
            return code or 0
        failed = {rank: f"{self._running[rank].describe_end()} after" for rank in killed or first}
        if not failed:
            codes = [process.poll() for process in self._running]
            ended = [rank for rank, code in enumerate(codes) if code in CONSEQUENCES]
            left = [rank for rank, code in enumerate(codes) if code is None]
            if left and len(left) < len(ended):
                failed = dict.fromkeys(left, "has not ended when the others gave up, after")
            elif left:
                failed = {rank: f"{self._running[rank].describe_end()} and others go on, after" for rank in ended}
        steps = monitor.steps
        if not failed:
            self._say("all processes have ended because one, or the memory of its host, did not answer; all form again")
        else:
            found = [RankFailure(r, "lost", began, f"{what} step {steps[r]}", steps[r]) for r, what in failed.items()]
            self._lose(generation, found)
        return None

    def _lose(self, generation: RunGeneration, failures: Sequence[RankFailure]) -> None:
        """Names the processes that failed, and puts their slots out."""
        now, offset = time.monotonic(), time.time() - time.monotonic()
        if not self._failed_at:
            self._failed_at = min(failure.since for failure in failures)
        for failure in failures:
            slot, process = generation.slots[failure.rank], self._running[failure.rank]
            process.give_up()
            out = self._members.exclude(slot, now)
            self._out.add(slot)
            self._say(
                f"process {failure.rank} ({self._starts.place(slot)}, pid {process.pid}) {failure.kind}: "
                f"{failure.what}; its slot is out for {out:g} s"
            )
            self._events.append(
                {
                    "event": failure.kind,
                    "time": round(failure.since + offset, 3),
                    "rank": failure.rank,
                    "slot": slot,
                    "place": self._starts.place(slot),
                    "what": failure.what,
                    "step": failure.step,
                    "named_after": round(now - failure.since, 3),
                }
            )
        left = self._choose(generation.slots)
        self._say(f"going on with {len(left)} of {self._members.wanted} processes")
        if spares := sorted(set(left) - set(generation.slots)):
            self._say(f"held until now, and taken in: {', '.join(map(self._starts.place, spares))}")

    def _is_starved(self, failure: RankFailure) -> bool:
        """Whether a silent process is only waiting for a processor, which is told for some time from one that hangs."""
        silent = time.monotonic() - failure.since
        return silent < STARVED * self._policy.hung_after and self._running[failure.rank].runnable()

    def _say_recovered(self, monitor: RankMonitor) -> None:
        if self._failed_at and monitor.steps and min(monitor.steps) > 0:
            took = time.monotonic() - self._failed_at
            self._say(f"step {min(monitor.steps)} is done, {took:.1f} s after the failure")
            self._failed_at = 0.0

    def _event(self, kind: str, **facts: Any) -> dict[str, Any]:
        return {"event": kind, "time": round(time.time(), 3), **facts}

    def _choose(self, before: Sequence[int]) -> tuple[int, ...]:
        """Slots that would form a generation now."""
        excluded = {self._starts.slot_of(word) for word in self._policy.excluded}
        present = self._starts.available().intersection(self._members.present(time.monotonic())) - excluded
        return self._members.choose(present, before)

    def _gather(self) -> None:
        """Waits until all slots are there, for some time."""
        everybody = range(self._members.slots)
        self._wait_until(
            lambda: bool(self._stopping) or self._starts.available().issuperset(everybody), self._policy.gather
        )
        missing = set(everybody) - self._starts.available()
        if missing and not self._stopping:
            places = ", ".join(map(self._starts.place, sorted(missing)))
            self._say(f"{places} did not come within {self._policy.gather:g} s; starting without")
        self._out |= missing
        for word in self._policy.excluded:
            slot = self._starts.slot_of(word)
            self._say(f"{self._starts.place(slot)} is excluded" if slot is not None else f"no host is called {word}")

    def _wait_for_slots(self, before: Sequence[int]) -> tuple[int, ...]:
        """Slots of the next generation, once there are enough; empty if a signal came first."""
        said = False
        while not self._stopping:
            slots = self._choose(before)
            if len(slots) >= min(self._policy.least, self._members.wanted):
                return slots
            if not said:
                self._say(f"{len(slots)} slots are in, and {self._policy.least} are needed; waiting for the others")
                said = True
            self._pause()
        return ()

    def _sleep(self, seconds: float) -> bool:
        """Whether the pause passed without a signal to stop."""
        self._wait_until(lambda: bool(self._stopping), seconds)
        return not self._stopping

    def _wait_until(self, true: Callable[[], bool], seconds: float) -> None:
        """Waits until something is true, for so many seconds at most."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not true():
            self._pause()

    def _pause(self) -> None:
        """Waits for a moment, and passes on signals that came: their handler interrupts whatever is being sent."""
        time.sleep(POLL)
        while self._signals:
            number = self._signals.pop(0)
            for process in self._running:
                process.send_signal(number)

    def _note_signal(self, number: int, frame: object) -> None:
        if number in (signal.SIGINT, signal.SIGTERM):
            self._stopping = number
        self._signals.append(number)

    def _kill(self) -> None:
        for process in self._running:
            process.kill()
        for process in self._running:
            process.wait()
        self._running.clear()
