"""Monitor of the processes of an elastic run: their heartbeats and phases, and who is hung or slow.

Every process sends a datagram a few times a second (``RankReporter``): where its training loop is, and the times of its
last steps. The supervisor receives them (``RankMonitor``), independently of ``jax.distributed``, whose store ends with
process 0. A process is named

    hung    when its datagrams stop, or when all others wait for their devices in a step that it has not reached
    slow    by ``jaxllm.parallel.elastic.slow_ranks``
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxllm.parallel.elastic.membership import ElasticPolicy
from jaxllm.parallel.elastic.run_generation import RunGeneration
from jaxllm.parallel.elastic.slow_ranks import RankStepTimes, SlowRank, SlowRanks

BEAT = 0.1
"""Seconds between two datagrams of a process."""
TICK = 0.01
"""Seconds between two looks of a process at its own clock."""
KEPT = 8
"""Steps whose times each datagram repeats, because datagrams may be lost."""
WAITING, BATCH, HOST = "waits for its devices", "waits for its batch", "is busy on its host"
"""Phases of a training loop, as ``step_watchdog`` posts them; saves and evaluations are others."""
ENDED = "has ended its loop"
"""Phase of a process that sends no more datagrams because its run is complete."""


class RankFailure(NamedTuple):
    """Failure of a process, as the monitor has found it.

    Attributes:
        rank: of the process.
        kind: "hung" or "slow".
        since: when it began, by ``time.monotonic()``.
        what: the finding in words.
        step: step in which it was found.
    """

    rank: int
    kind: str
    since: float
    what: str
    step: int


class LoopPosition(NamedTuple):
    """Position of a training loop.

    Attributes:
        step: number of the current step, from 1; 0 before the first.
        phase: what the loop does, as ``StepPhase.what``.
        seconds: for how long.
        steps: times of the last complete steps.
    """

    step: int = 0
    phase: str = ""
    seconds: float = 0.0
    steps: tuple[RankStepTimes, ...] = ()


class RankReporter:
    """Sends the position of this process's training loop to the supervisor, in a thread, for a ``with`` block.

    Args:
        generation: of this process.
        rank: of this process.

    Attributes:
        position: returns the position of the training loop; called in the thread.
        late: seconds in all in which the thread was due to run and did not.
        reform: whether the supervisor has asked that all processes form again.
    """

    def __init__(self, generation: RunGeneration, rank: int):
        host, _, port = generation.monitor.rpartition(":")
        self._to = host, int(port)
        self._about = {"generation": generation.name, "rank": rank}
        self.position: Callable[[], LoopPosition] = LoopPosition
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxllm-rank-reporter", daemon=True)
        self.late = 0.0
        self.reform = False

    def __enter__(self) -> RankReporter:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
            link.setblocking(False)
            sent = before = time.monotonic()
            while not self._over.wait(TICK):
                now = time.monotonic()
                self.late += max(0.0, now - before - 2 * TICK)
                before = now
                if now - sent < BEAT:
                    continue
                sent = now
                with contextlib.suppress(OSError):
                    link.sendto(json.dumps({**self._about, "at": self.position()}).encode(), self._to)
                with contextlib.suppress(OSError, ValueError):
                    self.reform = json.loads(link.recv(2**16)) == self._about["generation"] or self.reform
            for _ in range(3):  # a datagram may be lost
                with contextlib.suppress(OSError):
                    link.sendto(json.dumps({**self._about, "at": LoopPosition(phase=ENDED)}).encode(), self._to)


@dataclass
class _Heard:
    """Last datagram of one process."""

    when: float
    address: Any = None
    at: LoopPosition = field(default_factory=LoopPosition)
    newest: int = 0


class RankMonitor:
    """Receives the positions of the processes of one generation after another.

    Args:
        policy: what counts as hung and slow.
        clock: seconds.
        host: name by which processes reach this machine.

    Attributes:
        address: ``HOST:PORT``.
    """

    def __init__(self, policy: ElasticPolicy, clock: Callable[[], float] = time.monotonic, host: str = "127.0.0.1"):
        self._policy, self._clock = policy, clock
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((host if host == "127.0.0.1" else "", 0))
        self._socket.setblocking(False)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self.watch("", 0)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def watch(self, generation: str, ranks: int) -> None:
        """Begins to watch a generation; forgets the one before."""
        self._generation, self._began = generation, self._clock()
        self._ranks = [_Heard(self._began) for _ in range(ranks)]
        self._slow = SlowRanks(ranks, self._policy.slow)

    @property
    def steps(self) -> list[int]:
        """Last complete step of each process; 0 before the first of its generation."""
        return [one.newest for one in self._ranks]

    def ask_to_reform(self) -> None:
        """Asks process 0 that all processes save and form again."""
        if self._ranks and self._ranks[0].address is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(json.dumps(self._generation).encode(), self._ranks[0].address)

    def poll(self) -> RankFailure | None:
        """Reads what has arrived; returns a process that is hung or slow."""
        slow: SlowRank | None = None
        with contextlib.suppress(BlockingIOError):
            while True:
                data, address = self._socket.recvfrom(2**16)
                with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
                    slow = self._receive(json.loads(data), address) or slow
        if slow is not None:
            return RankFailure(slow.rank, "slow", self._clock() - slow.lasting, str(slow), slow.step)
        return self._hung()

    def _receive(self, about: dict[str, Any], address: Any) -> SlowRank | None:
        if about["generation"] != self._generation:
            return None
        step, phase, seconds, steps = about["at"]
        one = self._ranks[about["rank"]]
        one.when, one.address = self._clock(), address
        if phase == ENDED:
            one.when = math.inf
        one.at = LoopPosition(step, phase, seconds, tuple(RankStepTimes(*times) for times in steps))
        found = None
        for times in one.at.steps:
            if times.step > one.newest:
                one.newest = times.step
                found = self._slow.add(about["rank"], times) or found
        return found

    def _hung(self) -> RankFailure | None:
        now, limit = self._clock(), self._policy.hung_after
        heard = [one for one in self._ranks if one.address is not None]
        if len(heard) < len(self._ranks) or len(heard) < 2:
            return None  # still starting; who does not start is the start timeout's matter
        for rank, one in enumerate(self._ranks):
            others = [other for other in self._ranks if other is not one]
            # If none is heard, this process itself did not run.
            if now - one.when > limit and min(now - other.when for other in others) < limit / 2:
                return RankFailure(rank, "hung", one.when, f"no heartbeat for {now - one.when:.1f} s", one.at.step)
        return _behind_all(self._ranks, limit, now)


def _behind_all(ranks: Sequence[_Heard], limit: float, now: float) -> RankFailure | None:
    """The one process that all others wait for, each in a step that it has not given to its devices."""
    for rank, one in enumerate(ranks):
        others = [other.at for other in ranks if other is not one]
        if one.at.phase not in (BATCH, HOST) or one.at.step == 0 or one.at.seconds < limit:
            continue
        if all(at.phase == WAITING and at.step >= one.at.step and at.seconds >= limit for at in others):
            what = f"{one.at.phase} for step {one.at.step}, for {one.at.seconds:.1f} s, and the others wait for it"
            return RankFailure(rank, "hung", now - one.at.seconds, what, one.at.step)
    return None
