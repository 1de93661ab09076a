"""Decode process: an engine of the decode pool in a process of its own; the prefill pool's process tells it what to do.

    process = DecodeProcess.of(model, params, config, tokenizer=tokenizer)      # the same as in the prefill process
    process.serve("10.0.0.1:8998", secret)

It has weights, compiled programs and page pools, and neither scheduler nor requests: it repeats the calls of a runner
that arrive, in their order, and sends results back. When the prefill process has gone it connects again, until there is
another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.config import ConfigError
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.pools.decode_listener import HELLO, PAGES, REFUSED
from jaxllm.infer.pools.phase_runner import PhaseRunner
from jaxllm.infer.pools.pool_argument import PoolSizes
from jaxllm.infer.pools.pool_facts import pool_facts
from jaxllm.infer.pools.pool_link import PoolLink, PoolLinkError, PoolMessage, connect, parse_address
from jaxllm.infer.pools.pooled_runner import check_pools
from jaxllm.infer.pools.remote_engine import LEAVING
from jaxllm.infer.runner.paged_cache import with_whole_tiles
from jaxllm.infer.start_progress import Listener
from jaxllm.models import Functional
from jaxllm.text import Tokenizer
from pallas_kernels._compat import target_device
from pallas_kernels.paged_attention import Slots

RETRY = 0.5
"""Seconds between two attempts to connect."""


class DecodeProcess:
    """Decode engine that a prefill process uses over the network.

    Args:
        runner: the engine.
        facts: see ``pool_facts``.

    Attributes:
        runner: as given.
    """

    def __init__(self, runner: PhaseRunner, facts: dict[str, Any]):
        self.runner, self._facts = runner, facts
        self._stopped, self._links = threading.Event(), list[PoolLink]()
        self._leaving = threading.Event()

    @classmethod
    def of(
        cls,
        model: Functional,
        params: Any,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        vocab_size: int | None = None,
        longest: int | None = None,
        manifest: Path | None = None,
        strict: bool = False,
        shipped: Path | None = None,
        trusted: bool = False,
        progress: Listener | None = None,
    ) -> DecodeProcess:
        """Builds the engine on the first devices of this process, and compiles all of its programs.

        Args:
            model, params, config, tokenizer, vocab_size, longest: as ``Engine.of`` gets them in the prefill process.
            manifest, strict, shipped, trusted, progress: see ``Engine.of``.

        Raises:
            ValueError: there are fewer devices than ``config.pools`` says, or sizes that do not go together.
        """
        config = with_whole_tiles(config, target_device().platform)
        sizes = check_pools(config, None, "decode")
        assert isinstance(sizes, PoolSizes)
        most, many = model.config.vocab_size, sizes.decode.tensor
        size = min(most, tokenizer.vocab_size if tokenizer else most) if vocab_size is None else vocab_size
        runner = PhaseRunner(
            model, params, dataclasses.replace(config, pools=None), "decode", jax.devices()[:many], many, many,
            vocab_size=size, longest=longest, manifest=manifest, strict=strict, shipped=shipped, trusted=trusted,
            progress=progress,
        )  # fmt: skip
        return cls(runner, pool_facts(model, params, config, runner))

    def serve(self, address: str, secret: bytes, told: Callable[[str], None] = lambda _: None) -> None:
        """Connects to the prefill process and does what it says, again and again, until ``stop`` or ``leave``.

        Args:
            address: where the prefill process listens, such as "10.0.0.1:8998".
            secret: bytes that both know.
            told: called with a line when the process connects, and when the connection has ended.

        Raises:
            ConfigError: the prefill process serves another model or has other options, or has another secret.
            Exception: a program has failed; the prefill process has been told.
        """
        where = parse_address(address)
        while not (self._stopped.is_set() or self._leaving.is_set()):
            try:
                link, page_link = self._join(where, secret)
            except PoolLinkError as error:
                raise ConfigError(f"disaggregation: {error}") from None
            except OSError:
                self._stopped.wait(RETRY)
                continue
            self._links = [link, page_link]
            if self._stopped.is_set():  # while these links were made, so that `stop` has not seen them
                self.stop()
            if self._leaving.is_set():
                link.send(LEAVING)
            told(f"connected to the prefill process at {address}")
            session = _Session(self.runner, link, page_link)
            session.run()
            told(f"the connection to the prefill process at {address} has ended: {link.reason or page_link.reason}")

    def leave(self) -> None:
        """Ends ``serve`` when the process has no more sequences; it takes none from now on. From any thread."""
        self._leaving.set()
        for link in self._links[:1]:
            link.send(LEAVING)

    def stop(self) -> None:
        """Ends ``serve`` at once; may be called from any thread."""
        self._stopped.set()
        for link in self._links:
            link.close()

    def _join(self, where: tuple[str, int], secret: bytes) -> tuple[PoolLink, PoolLink]:
        """Connections for steps and for pages.

        Raises:
            PoolLinkError: see ``serve``.
            OSError: the prefill process is not there.
        """
        with contextlib.ExitStack() as stack:
            link = connect(where, secret)
            stack.callback(link.close)
            link.send(HELLO, self._facts, list(self.runner.spec.pages))
            answer = next(link.messages(), None)
            if answer is None:
                raise OSError(link.reason)
            if answer.name == REFUSED:
                raise PoolLinkError(answer.values[0])
            page_link = connect(where, secret)
            page_link.send(PAGES, *answer.values)
            stack.pop_all()
        return link, page_link


class _Session:
    """Connection to one prefill process.

    Args:
        runner: the engine.
        link, page_link: connections for steps and for pages.
    """

    def __init__(self, runner: PhaseRunner, link: PoolLink, page_link: PoolLink):
        self._runner, self._link, self._page_link = runner, link, page_link
        self._results: queue.SimpleQueue[tuple[int, jax.Array] | None] = queue.SimpleQueue()
        self._held: dict[int, tuple[int, list[int], Slots]] = {}
        self._dropped: set[int] = set()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._trees = [jax.tree.structure(pool.in_pages()) for pool in runner.pools]

    def run(self) -> None:
        """Does what the prefill process says, until either connection has ended.

        Raises:
            Exception: a program has failed.
        """
        threads = [
            threading.Thread(target=self._guarded, args=[one], name="jaxllm-decode-process", daemon=True)
            for one in (self._answer, self._receive)
        ]
        for one in threads:
            one.start()
        self._guarded(self._obey)
        self._results.put(None)
        for one in threads:
            one.join()
        if self._failure is not None:
            raise self._failure

    def _guarded(self, work: Callable[[], None]) -> None:
        """Runs a thread's work; at its end the session ends, and a failure is told."""
        try:
            work()
        except Exception as error:
            self._failure = self._failure or error
            self._link.send("failed", f"{type(error).__name__}: {error}")
            self._link.end_sending()
            if work != self._obey:  # which goes on until the prefill process has read that, and closes
                return
            for _ in self._link.messages():
                pass
        self._link.close("the session has ended")
        self._page_link.close("the session has ended")

    def _obey(self) -> None:
        for message in self._link.messages():
            if self._failure is None:
                self._do(message)

    def _do(self, message: PoolMessage) -> None:
        runner, values = self._runner, message.values
        if message.name == "run":
            number, tokens, full = values
            self._results.put((number, runner.run(runner.shape(tokens, True, full), *message.arrays)))
        elif message.name == "seat":
            runner.seat(0, *message.arrays)
        elif message.name == "land":
            with self._lock:
                group, pages, held = self._held.pop(values[0])
            runner.take(group, pages, held)
        elif message.name == "drop":
            with self._lock:
                if self._held.pop(values[0], None) is None:
                    self._dropped.add(values[0])
        else:
            raise PoolLinkError(f"the prefill process said {message.name!r}, which this version does not know")

    def _answer(self) -> None:
        while (item := self._results.get()) is not None:
            self._link.send("result", item[0], arrays=[np.asarray(item[1])])

    def _receive(self) -> None:
        for message in self._page_link.messages():
            number, group, pages = message.values
            tree = self._trees[group]
            each = len(message.arrays) // tree.num_leaves
            parts = [
                jax.tree.unflatten(tree, message.arrays[at : at + tree.num_leaves])
                for at in range(0, each * tree.num_leaves, tree.num_leaves)
            ]
            held = jax.block_until_ready(self._runner.assembled(parts))
            with self._lock:
                wanted = number not in self._dropped
                self._dropped = {other for other in self._dropped if other > number}  # they come in order
                if wanted:
                    self._held[number] = group, pages, held
            if wanted:
                self._link.send("arrived", number)
