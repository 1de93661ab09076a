"""A thousand slow connections: they hold no slot, requests are answered all the while, and all of them end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import time

import httpx

from jaxllm.serve import ServeConfig
from tests import environment
from tests.proofs.harness import proof
from tests.serve import servers

SLOW, ASKED = 1000, 100
SENT = [
    b"", b"G", b"GET /health HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx: ",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{",
]  # fmt: skip
"""Beginnings of requests, of which no more comes but a byte now and then."""


async def _slow(port: int, rng: random.Random) -> bool:
    """One slow client; whether the server has ended its connection, and not it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(rng.choice(SENT))
        for _ in range(200):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    while await reader.read(4096):
                        pass
                    return True
            with contextlib.suppress(ConnectionError):
                writer.write(b"a")
        return False
    except ConnectionError:
        return True
    finally:
        writer.close()


async def _asks(url: str) -> int:
    """Requests that are answered, one after the other, on new connections."""
    answered = 0
    for _ in range(ASKED):
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
            answered += (await client.post("/v1/completions", json=body)).status_code == 200
    return answered


@proof("server", count=5, sample=1, bound={"refused": 0, "kept": 0}, parallel=False)
def slow_connections_hold_no_slot(seed: int) -> dict[str, float]:
    """1,000 connections that trickle, at a server that keeps 512 open: 100 requests are answered, the slow ones end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192) if hard > 0 else 8192, hard))
    try:
        backend = servers.FixedRate(0.001)
        config = ServeConfig(port=0, name="tiny", header_seconds=4.0, body_seconds=4.0)
        with servers.running(servers.opener(backend), config) as (server, url):
            rng = random.Random(environment.derive(seed, "slow"))

            async def main() -> tuple[list[bool], int]:
                slow = [asyncio.create_task(_slow(int(url.rsplit(":", 1)[1]), rng)) for _ in range(SLOW)]
                await asyncio.sleep(0.5)
                answered = await _asks(url)
                return list(await asyncio.gather(*slow)), answered

            ended, answered = asyncio.run(main())
            assert len(ended) == SLOW
            end = time.monotonic() + 30
            while server.server_state.connections and time.monotonic() < end:
                time.sleep(0.05)
            kept = len(server.server_state.connections) + ended.count(False)
            assert server.service.dispatcher is not None
            assert server.service.dispatcher.open == 0
            return {"refused": ASKED - answered, "kept": kept}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
