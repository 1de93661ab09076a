"""Load: many clients, misbehaving ones among them, leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from jaxllm.serve import ServeConfig, Server
from jaxllm.serve.server import BackendFactory
from tests import environment
from tests.infer.engines import check_books
from tests.proofs.harness import proof
from tests.serve import servers

CLIENTS = 200


class Rude:
    """Clients that ask again and again until a time, and what became of it.

    Args:
        port: of the server.
        rng: their whims.
        until: when they stop asking, by the loop's clock.
        most: tokens they ask for at most.
    """

    def __init__(self, port: int, rng: random.Random, until: float, most: int):
        self.port, self.rng, self.until, self.most = port, rng, until, most
        self.ends: Counter[str] = Counter()

    async def live(self) -> None:
        """Behaviour of one client."""
        loop = asyncio.get_running_loop()
        while loop.time() < self.until:
            how = self.rng.choice(["reads", "reads", "reads", "leaves", "dawdles", "oversize", "whole"])
            self.ends[await self.ask(how)] += 1

    async def ask(self, how: str) -> str:
        """One request; how it ended."""
        tokens = self.rng.randint(1, self.most)
        body: dict[str, Any] = {"model": "tiny", "prompt": "a" * self.rng.randint(1, 20), "max_tokens": tokens}
        body |= {"stream": how != "whole", "stream_options": {"include_usage": True}} if how != "whole" else {}
        body |= {"ignore_eos": True, "n": self.rng.choice([1, 1, 2])}
        if how == "oversize":
            body["user"] = "x" * 50_000
        sent = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**14)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(sent), sent)
            )
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head[9:12])
            if how == "oversize":
                assert status == 413, head
                return "oversize"
            if status == 429:
                assert b"\r\nretry-after: " in head.lower()
                await asyncio.sleep(0.2)
                return "told to wait"
            if status == 503:
                return "not taken"
            assert status == 200, head
            return await self.read(reader, how, body)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def read(self, reader: asyncio.StreamReader, how: str, body: dict[str, Any]) -> str:
        """Reads a response, which must be complete."""
        seen = b""
        leave = self.rng.randint(1, 2000) if how == "leaves" else None
        while part := await reader.read(4096):
            seen += part
            if leave is not None and len(seen) > leave:
                return "left"
            if how == "dawdles" and self.rng.random() < 0.2:
                await asyncio.sleep(self.rng.random())
        made = body["max_tokens"] * body["n"]
        assert seen.count(b'"finish_reason":"length"') == body["n"], seen[-500:]
        assert seen.count(b'"completion_tokens":%d' % made) == 1, seen[-500:]
        if how != "whole":
            assert seen.count(b"data: [DONE]") == 1
            assert seen.endswith(b"0\r\n\r\n")
        return how


def besiege(port: int, seed: int, seconds: float, most: int, clients: int) -> Counter[str]:
    """Many rude clients for so long."""

    async def main() -> Counter[str]:
        loop = asyncio.get_running_loop()
        rude = Rude(port, random.Random(seed), loop.time() + seconds, most)
        await asyncio.wait_for(asyncio.gather(*(rude.live() for _ in range(clients))), seconds + 120)
        return rude.ends

    return asyncio.run(main())


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def quiet(server: Server) -> bool:
    """Whether nothing is under way."""
    dispatcher = server.service.dispatcher
    assert dispatcher is not None
    load = dispatcher.backend.load()
    return dispatcher.open == load.running == load.waiting == 0 and not server.server_state.connections


def siege(open_: BackendFactory, seed: int, most: int, check: Callable[[], None]) -> dict[str, float]:
    """Resources held after a long siege and not after a short one: tasks, descriptors, share of memory."""
    short = "PYTEST_CURRENT_TEST" in os.environ
    clients, seconds = (20, 2.0) if short else (CLIENTS, 120.0)
    config = ServeConfig(port=0, name="tiny", max_body=40_000, queue=100)
    with servers.running(open_, config) as (server, url):
        port = int(url.rsplit(":", 1)[1])

        def after(length: float, number: int) -> tuple[int, int, int]:
            ends = besiege(port, seed + number, length, most, clients)
            assert ends["reads"] > 0, ends
            end = time.monotonic() + 60
            while not quiet(server):
                assert time.monotonic() < end, "something is still under way"
                time.sleep(0.05)
            check()
            gc.collect()
            return len(server.server_state.tasks), descriptors(), resident()

        before = after(seconds / 4, 0)
        then = after(seconds, 1)
        assert httpx.get(f"{url}/health").status_code == 200
    # A short siege has not met every size of buffer yet: its memory says nothing of a leak.
    grown = 0.0 if short else then[2] / before[2] - 1
    return {"tasks": then[0] - before[0], "descriptors": then[1] - before[1], "memory": grown}


BOUNDS = {"tasks": 0, "descriptors": 0, "memory": 0.05}


@proof("server", count=1, sample=1, bound=BOUNDS, parallel=False)
def siege_of_a_fixed_rate_engine(seed: int) -> dict[str, float]:
    """200 clients for two minutes that read, dawdle, leave, ask for too much; each request begun ends once."""
    backend = servers.FixedRate(0.01, sequences=64)

    def check() -> None:
        assert backend.held == 0
        assert backend.begun == backend.closed > 0

    return siege(servers.opener(backend), seed, 60, check)


@proof("server", count=1, sample=1, bound=BOUNDS, parallel=False)
def siege_of_a_tiny_model(seed: int) -> dict[str, float]:
    """The same over a real engine, whose pages and slots are all free in the end."""
    engine = servers.tiny_engine()

    def check() -> None:
        assert engine.scheduler.idle
        check_books(engine)
        assert all(pages.available == pages.count for pages in engine.scheduler.pages)

    return siege(servers.tiny_backend, seed, 40, check)


@proof("server", count=20, sample=1, bound={"lost": 0})
def sigterm_in_mid_load(seed: int) -> dict[str, float]:
    """A server process gets SIGTERM while clients read: every response that was begun is completed, then it exits."""
    rng = random.Random(seed)
    command = [sys.executable, "-m", "tests.serve.alone", "0.005"]
    process = subprocess.Popen(command, cwd=environment.ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())

        async def main() -> Counter[str]:
            ends: Counter[str] = Counter()

            async def one() -> None:
                await asyncio.sleep(rng.random())
                rude = Rude(port, rng, 0, 200)
                try:
                    ends[await rude.ask("reads")] += 1
                except (ConnectionError, asyncio.IncompleteReadError):
                    ends["not taken"] += 1  # nothing of an answer had come

            async def end() -> None:
                await asyncio.sleep(rng.uniform(0.3, 1.2))
                process.send_signal(signal.SIGTERM)

            await asyncio.wait_for(asyncio.gather(end(), *(one() for _ in range(50))), 60)
            return ends

        ends = asyncio.run(main())
        assert ends["reads"] > 0, ends
        assert process.wait(30) in (0, -signal.SIGTERM)
        return {"lost": 50 - ends["reads"] - ends["not taken"]}
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
