"""Remote decode engine: an engine of the decode pool in a process of its own, as the prefill pool's process sees it.

The scheduler of both pools is in the prefill pool's process. It sends every step's packed inputs to the decode
process, as it gives them to a runner of its own, and the tokens come back: a few kilobytes a step, up to two steps
ahead. KV cache pages go over a connection of their own, so that no step waits behind them: the devices of the prefill
engine read them behind the step that fills them, the host sends them, and the decode process copies them to its
devices and says when they are there.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.config import ConfigError
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.pools.phase_runner import Phase, PhaseRunner, near_copies
from jaxllm.infer.pools.pool_link import PoolLink
from jaxllm.infer.runner.runner_protocol import RunnerSpec, StepFailedError
from jaxllm.infer.runner.step.step_shape import StepShape
from pallas_kernels.paged_attention import Slots

LOST = "decode_pool_lost"
"""Code of the error of requests that a lost decode process has ended."""

LEAVING = "leaving"
"""Message of a decode process that takes no more sequences."""
LAST_WORDS = 1.0
"""Seconds that a message about a failure may be later than the end of the connection for pages."""


class DecodeProcessLostError(StepFailedError):
    """The decode process of a sequence has gone, or there is none; the same request may be sent again."""

    def __init__(self, message: str):
        super().__init__(message, LOST)


class RemoteResult:
    """Result of a step of a decode process; ``np.asarray`` of it is there when ``is_ready`` says so.

    Args:
        session: connection that it comes over.
    """

    def __init__(self, session: DecodeSession):
        self._session = session
        self._value: np.ndarray | None = None

    def is_ready(self) -> bool:
        """Whether the result has come."""
        return self._value is not None

    def put(self, value: np.ndarray) -> None:
        """Sets the result."""
        self._value = value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        while self._value is None:
            if self._session.lost:
                raise self._session.failure()
            time.sleep(1e-4)
        return np.asarray(self._value, dtype)


class RemoteArrival:
    """Pages on their way to a decode process, see ``PageArrival``.

    Args:
        session: connection that they go over.
        number: of this arrival.
        nbytes: bytes of the pages.
    """

    def __init__(self, session: DecodeSession, number: int, nbytes: int):
        self._session, self._number, self.nbytes = session, number, nbytes
        self.has_arrived = False

    def land(self) -> None:
        """Has the pages written, behind the steps that were started and before others."""
        self._session.link.send("land", self._number)

    def drop(self) -> None:
        """Has the contents dropped, those that are still on their way too."""
        self._session.drop(self._number)


class DecodeSession:
    """Prefill process's end of the two connections to a decode process.

    Args:
        link: steps, and what else is small.
        page_link: pages.
        pages: pages of each page pool of the decode process.

    Attributes:
        link, pages: as given.
    """

    def __init__(self, link: PoolLink, page_link: PoolLink, pages: tuple[int, ...]):
        self.link, self.pages, self._page_link = link, pages, page_link
        self._numbers = itertools.count()
        self._results: dict[int, RemoteResult] = {}
        self._arrivals: dict[int, RemoteArrival] = {}
        self._outbox: queue.SimpleQueue[tuple[int, int, list[int], list[Any]] | None] = queue.SimpleQueue()
        self._said = ""
        self._leaving, self._used, self._turn = False, False, threading.Lock()
        self._reader, *others = (
            threading.Thread(target=run, name="jaxllm-decode-session", daemon=True)
            for run in (self._read, self._read_pages, self._send_pages)
        )
        for one in (self._reader, *others):
            one.start()

    @property
    def lost(self) -> bool:
        """Whether the decode process has gone."""
        return not (self.link.open and self._page_link.open)

    @property
    def used(self) -> bool:
        """Whether the decode process has had a sequence since ``rest``."""
        return self._used

    @property
    def leaving(self) -> bool:
        """Whether the decode process takes no more sequences: it goes when it has none."""
        return self._leaving

    def enter(self) -> bool:
        """Whether the process takes another sequence; if so, it has one until ``rest``."""
        with self._turn:
            self._used = self._used or not self._leaving
            return not self._leaving

    def rest(self) -> None:
        """Says that the process has no sequence and no step in flight; one that is leaving may go."""
        with self._turn:
            self._used, goes = False, self._leaving
        if goes:
            self._let_go()

    def failure(self) -> DecodeProcessLostError:
        """Error of the requests that the decode process had; waits for what it may have said last."""
        self._reader.join(LAST_WORDS)
        why = self._said or self.link.reason or self._page_link.reason
        return DecodeProcessLostError(
            f"the decode process at {self.link.peer} was lost while it generated this completion ({why}). The prefill "
            "pool still has the prompt's KV cache: send the request again."
        )

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None) -> RemoteResult:
        """Has a step started."""
        number, result = next(self._numbers), RemoteResult(self)
        self._results[number] = result
        self.link.send("run", number, shape.tokens, shape.full, arrays=[packed, *([] if masks is None else [masks])])
        return result

    def seat(self, packed: np.ndarray) -> None:
        """Has a request's logits-processor state written into its slot."""
        self.link.send("seat", arrays=[packed])

    def receive(self, group: int, pages: list[int], parts: Sequence[Slots]) -> RemoteArrival:
        """Sends pages; see ``RemoteDecodeEngine``."""
        leaves = [x for part in near_copies(parts) for x in jax.tree.leaves(part)]
        for x in leaves:
            x.copy_to_host_async()
        number = next(self._numbers)
        arrival = self._arrivals[number] = RemoteArrival(self, number, sum(x.nbytes for x in leaves))
        self._outbox.put((number, group, pages, leaves))
        return arrival

    def drop(self, number: int) -> None:
        """Drops an arrival, see ``RemoteArrival``."""
        self._arrivals.pop(number, None)
        self.link.send("drop", number)

    def close(self) -> None:
        """Ends both connections; the decode process waits for the next."""
        self.link.close()
        self._page_link.close()
        self._outbox.put(None)

    def _let_go(self) -> None:
        self.link.close("it has left, and had no sequences")
        self.close()

    # In threads

    def _read(self) -> None:
        for message in self.link.messages():
            if message.name == "result" and (result := self._results.pop(message.values[0], None)) is not None:
                result.put(message.arrays[0])
            elif message.name == "arrived" and (arrival := self._arrivals.pop(message.values[0], None)) is not None:
                arrival.has_arrived = True
            elif message.name == LEAVING:
                with self._turn:
                    self._leaving, goes = True, not self._used
                if goes:
                    self._let_go()
            elif message.name == "failed":
                self._said = message.values[0]
                break
        self.close()

    def _read_pages(self) -> None:
        for _ in self._page_link.messages():
            pass
        self._reader.join(LAST_WORDS)
        self.link.close(f"its connection for pages has ended: {self._page_link.reason}")
        self.close()

    def _send_pages(self) -> None:
        while (item := self._outbox.get()) is not None:
            number, group, pages, leaves = item
            if number in self._arrivals:
                self._page_link.send("pages", number, group, pages, arrays=[np.asarray(x) for x in leaves])


class RemoteDecodeEngine:
    """Decode engine in another process, see ``DecodeEngine``; it is there while it has a session.

    Args:
        beside: runner of a prefill engine, of the same model and configuration.
        config: configuration of both.

    Attributes:
        session: connection to the process that is this engine now; None: there is none.
        spec: sizes, with the pages that this process has.
    """

    phase: Phase = "decode"
    program_cache = None

    def __init__(self, beside: PhaseRunner, config: EngineConfig):
        self._beside, self._config = beside, config
        self.session: DecodeSession | None = None
        self.spec: RunnerSpec = beside.spec

    @property
    def connected(self) -> bool:
        """Whether a process is this engine, as far as is known."""
        return self.session is not None and not self.session.lost

    @property
    def resting(self) -> bool:
        """Whether there is no process that has had a sequence since ``rest``."""
        return not (self.connected and self._open.used)

    def enter(self) -> bool:
        """Whether the process is there and takes another sequence; it has one then, until ``rest``."""
        return self.connected and self._open.enter()

    def rest(self) -> None:
        """Says that the process has no sequence and no step in flight; one that is leaving may go."""
        if self.connected:
            self._open.rest()

    def use(self, session: DecodeSession) -> None:
        """Makes a process this engine."""
        self.session = session
        self.spec = dataclasses.replace(self._beside.spec, pages=session.pages)

    def choose(self, requests: int, tokens: int, *, decode: bool, full: bool) -> StepShape:
        """See ``Runner``; all steps are of decoding, and a decode process has compiled all of them before it comes."""
        full = full or "plain" not in self._config.samplers
        return self._beside.shape(*self._config.program_rows(requests, tokens, decode=True), full)

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None = None) -> RemoteResult:
        """Has a step started, see ``Runner``."""
        return self._open.run(shape, packed, masks)

    def seat(self, replica: int, packed: np.ndarray) -> None:
        """Has a request's logits-processor state written into its slot, see ``Runner``."""
        self._open.seat(packed)

    def receive(self, group: int, pages: list[int], parts: Sequence[Slots]) -> RemoteArrival:
        """Starts to send pages, see ``DecodeEngine``; the caller does not wait."""
        return self._open.receive(group, pages, parts)

    def swap(self, params: Any) -> None:
        """Not supported: a decode process has weights of its own.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "engine: the decode pool is in other processes, which have weights of their own: start them, and this one, "
            "again with the new weights."
        )

    @property
    def _open(self) -> DecodeSession:
        assert self.session is not None, "a step for a decode engine that has no process"
        return self.session
