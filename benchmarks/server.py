"""Server overhead per streamed token event: ``python -m benchmarks.server``.

An engine that keeps time and nothing else gives tokens to 64 streams; the server runs in a process of its own, whose
processor time is read before and after. Clients read raw bytes, in this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STREAMS, TOKENS, SECONDS = 64, 300, 0.03


def processor_seconds(pid: int) -> float:
    """Processor seconds of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def read(port: int, body: bytes) -> int:
    """Events of one stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    seen = await reader.read()
    writer.close()
    assert seen.count(b"data: [DONE]") == 1, seen[:300]
    return seen.count(b'"content":') - 1


async def streams(port: int, many: int, tokens: int) -> int:
    """Events of many streams at once."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": tokens, "stream": True}
    return sum(await asyncio.gather(*(read(port, json.dumps(body).encode()) for _ in range(many))))


def main() -> None:
    """Prints processor time a token event."""
    command = [sys.executable, "-m", "tests.serve.alone", str(SECONDS)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        asyncio.run(streams(port, 8, 10))
        for _ in range(3):
            before, began = processor_seconds(process.pid), time.perf_counter()
            events = asyncio.run(streams(port, STREAMS, TOKENS))
            taken, wall = processor_seconds(process.pid) - before, time.perf_counter() - began
            print(f"{STREAMS} streams, {events} token events: {1e3 * taken / events:.3f} ms of processor time each, "
                  f"{wall:.1f} s for {TOKENS * SECONDS:.1f} s of tokens")  # fmt: skip
        process.terminate()


if __name__ == "__main__":
    main()
