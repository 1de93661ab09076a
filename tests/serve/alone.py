"""Server in a process of its own, over a stub engine: ``python -m tests.serve.alone SECONDS [BATCH_DIR]``.

Prints its port, and ends as a signal tells it to.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

from jaxllm.serve import ServeConfig, Server
from tests.serve import servers


def main() -> None:
    """Serves until SIGTERM."""
    folder = sys.argv[2] if len(sys.argv) > 2 else None
    backend = servers.FixedRate(float(sys.argv[1]), sequences=64 if folder is None else 8)
    config = ServeConfig(port=0, name="tiny", grace_seconds=20, batch_dir=folder)
    server = Server(config, servers.opener(backend))

    async def run() -> None:
        task = asyncio.create_task(server.serve())
        while not (server.started and server.service.dispatcher is not None):
            await asyncio.sleep(0.01)
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        await task

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


if __name__ == "__main__":
    main()
