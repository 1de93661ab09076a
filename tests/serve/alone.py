"""Server in a process of its own, over a stub engine: ``python -m tests.serve.alone SECONDS``.

Prints its port, and ends as a signal tells it to. ``serve_stub`` is the same for a forked process.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from jaxllm.serve import ServeConfig, Server
from tests.serve import servers


def serve_stub(seconds: float, before: str = "", sequences: int = 64, folder: str | None = None) -> None:
    """Serves until SIGTERM; prints ``before`` and its port, and keeps batches in a folder."""
    backend = servers.FixedRate(seconds, sequences=sequences)
    config = ServeConfig(port=0, name="tiny", grace_seconds=20, batch_dir=folder)
    server = Server(config, servers.opener(backend))

    async def run() -> None:
        task = asyncio.create_task(server.serve())
        while not (server.started and server.service.dispatcher is not None):
            await asyncio.sleep(0.01)
        print(f"{before}{server.servers[0].sockets[0].getsockname()[1]}", flush=True)
        await task

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


if __name__ == "__main__":
    serve_stub(float(sys.argv[1]))
