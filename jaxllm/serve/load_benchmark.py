"""Load test of any server with OpenAI's API: throughput, latencies and goodput.

Closed loop: a number of clients, each sending its next request when the last is answered. Open loop: requests arrive at
random (Poisson), all at once (burst) or from a trace, however slow the server is, so queueing time is measured too.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from jaxllm.files import DataError


@dataclass(frozen=True)
class LoadRequest:
    """Request of a load test: arrival time in seconds from the start, prompt, and ``max_tokens``."""

    at: float
    prompt: str
    tokens: int


@dataclass
class RequestResult:
    """Timing of one request as its client saw it, in seconds from the start of the test.

    Attributes:
        due, sent: when it was to be sent, and when it was sent.
        chunks: arrival time of each chunk of text.
        tokens: number of generated tokens, as the server counts.
        end: when the response ended.
        error: description of a failure; empty for success.
    """

    due: float
    sent: float
    chunks: list[float] = field(default_factory=list)
    tokens: int = 0
    end: float = 0.0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Time to the first token in seconds, from when the request was due."""
        return self.chunks[0] - self.due

    @property
    def tpot(self) -> float:
        """Time per output token after the first, in seconds."""
        return (self.chunks[-1] - self.chunks[0]) / max(1, self.tokens - 1)


class LoadClient:
    """Client that streams completions, each over a connection of its own.

    Args:
        url: URL of the server, with or without /v1.
        model: model name in requests.
        key: API key.

    Raises:
        DataError: the URL is malformed.
    """

    def __init__(self, url: str, model: str, key: str = ""):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise DataError(f"{url} is not the URL of a server; give http://HOST:PORT.")
        self.model, self._key, self._host = model, key, parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/").removesuffix("/v1")

    async def models(self) -> list[str]:
        """Names of the server's models."""
        text = "".join([line async for line in self._lines("GET", "/v1/models", b"")])
        return [one["id"] for one in json.loads(text)["data"]]

    async def send(self, request: LoadRequest, clock: Callable[[], float]) -> RequestResult:
        """Sends a request and reads its response; a failure is recorded in the result."""
        result = RequestResult(request.at, clock())
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async for line in self._lines("POST", "/v1/completions", json.dumps(body).encode()):
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise DataError(str(event["error"]))
                result.tokens = (event.get("usage") or {}).get("completion_tokens", result.tokens)
                if any(choice["text"] or choice["finish_reason"] for choice in event["choices"]):
                    result.chunks.append(clock())
            result.tokens = result.tokens or len(result.chunks)
            result.error = "" if result.chunks else "empty response"
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            result.error = f"{type(error).__name__}: {error}"[:200]
        result.end = clock()
        return result

    async def _lines(self, method: str, path: str, body: bytes) -> AsyncIterator[str]:
        """Lines of a response's body as they arrive."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=2**20)
        try:
            key = f"authorization: Bearer {self._key}\r\n" if self._key else ""
            writer.write(
                f"{method} {self._base}{path} HTTP/1.1\r\nhost: {self._host}\r\n{key}content-type: application/json\r\n"
                f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
                + body
            )
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            if int(head.split(" ", 2)[1]) != 200:
                raise DataError(f"{head.splitlines()[0]} {(await reader.read(2000)).decode(errors='replace')}")
            rest = b""
            async for part in _parts(reader, "transfer-encoding: chunked" in head):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    yield line.decode().rstrip("\r")
            if rest:
                yield rest.decode()
        finally:
            writer.close()


async def _parts(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    while True:
        if chunked:
            size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            if not size:
                return
            yield (await reader.readexactly(size + 2))[:-2]
        elif part := await reader.read(65536):
            yield part
        else:
            return


def random_requests(count: int, rate: float, prompt: int, tokens: int, seed: int) -> list[LoadRequest]:
    """Requests with random prompts that arrive as a Poisson process of ``rate`` per second; inf: all at once."""
    rng = np.random.default_rng(seed)
    times = np.zeros(count) if np.isinf(rate) else np.cumsum(rng.exponential(1 / rate, count))
    # The prompts differ from their first token on, so that the prefix cache never hits.
    words = (" ".join(map(str, rng.integers(0, 1000, max(1, prompt // 2)))) for _ in range(count))
    return [LoadRequest(float(at), text, tokens) for at, text in zip(times, words, strict=True)]


def read_trace(path: Path) -> list[LoadRequest]:
    """Requests of a trace file: lines of {"at": seconds, "prompt": text, "max_tokens": n}.

    Raises:
        DataError: the file is empty or a line is malformed; names the line.
    """
    requests = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            found = json.loads(line)
            requests.append(LoadRequest(float(found["at"]), str(found["prompt"]), int(found["max_tokens"])))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f'{path}:{number}: {error!r}; legal: {{"at": 0.5, "prompt": "...", "max_tokens": 16}}'
            ) from None
    if not requests:
        raise DataError(f"{path} has no requests.")
    return sorted(requests, key=lambda request: request.at)


async def run_open_loop(client: LoadClient, requests: Sequence[LoadRequest]) -> list[RequestResult]:
    """Open loop: sends each request when it is due."""
    clock = _clock()

    async def one(request: LoadRequest) -> RequestResult:
        await asyncio.sleep(max(0.0, request.at - clock()))
        return await client.send(request, clock)

    return list(await asyncio.gather(*map(one, requests)))


async def run_closed_loop(client: LoadClient, requests: Sequence[LoadRequest], clients: int) -> list[RequestResult]:
    """Closed loop: a number of concurrent clients, each sending its next request when the last is answered."""
    clock, queue, out = _clock(), iter(requests), []

    async def one_client(queue: Iterator[LoadRequest]) -> None:
        for request in queue:
            out.append(await client.send(LoadRequest(clock(), request.prompt, request.tokens), clock))

    await asyncio.gather(*(one_client(queue) for _ in range(clients)))
    return out


def _clock() -> Callable[[], float]:
    began = time.perf_counter()
    return lambda: time.perf_counter() - began


def summary(results: Sequence[RequestResult], ttft: float, tpot: float) -> dict[str, Any]:
    """Summary of a load test: throughput, latency percentiles and goodput.

    Args:
        results: results of all its requests.
        ttft, tpot: service-level objective in seconds: time to the first token, and per output token after it.

    Raises:
        DataError: no request succeeded.
    """
    good = [one for one in results if not one.error]
    if not good:
        raise DataError(f"no request succeeded; the first error: {results[0].error if results else 'no requests'}")
    seconds = max(one.end for one in results) - min(one.sent for one in results)
    kept = [one for one in good if one.ttft <= ttft and one.tpot <= tpot]
    gaps = np.concatenate([np.diff(one.chunks) for one in good])
    errors: Mapping[str, int] = {
        e: sum(one.error == e for one in results) for e in sorted({s.error for s in results} - {""})
    }
    return {
        "requests": len(results),
        "failed": len(results) - len(good),
        "errors": errors,
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "tokens_per_second": sum(one.tokens for one in good) / seconds,
        "ttft": _spread([one.ttft for one in good]),
        "itl": _spread(gaps) if len(gaps) else None,
        "tpot": _spread([one.tpot for one in good]),
        "latency": _spread([one.end - one.due for one in good]),
        "slo": {"ttft": ttft, "tpot": tpot},
        "goodput": len(kept) / seconds,
        "within_slo": len(kept) / len(results),
    }


def _spread(values: Any) -> dict[str, float]:
    found = np.percentile(np.asarray(values, float), [50, 90, 99])
    return {"mean": float(np.mean(values)), **dict(zip(("p50", "p90", "p99"), map(float, found), strict=True))}


def show(figures: Mapping[str, Any]) -> str:
    """Table of a summary, as text."""
    lines = [
        f"{figures['requests']} requests in {figures['seconds']:.2f} s, {figures['failed']} failed; "
        f"{figures['requests_per_second']:.2f} requests/s, {figures['tokens_per_second']:.1f} tokens/s",
        f"goodput {figures['goodput']:.2f} requests/s: {figures['within_slo']:.0%} within "
        f"{figures['slo']['ttft']} s to the first token and {figures['slo']['tpot']} s per output token",
        f"{'seconds':10}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
    ]
    for name in ("ttft", "itl", "tpot", "latency"):
        if (row := figures[name]) is not None:
            lines.append(f"{name:10}" + "".join(f"{row[column]:10.4f}" for column in ("mean", "p50", "p90", "p99")))
    return "\n".join([*lines, *(f"{many} x {error}" for error, many in figures["errors"].items())])


def plot(results: Sequence[RequestResult], path: Path) -> None:
    """Draws the cumulative distributions of TTFT, TPOT and latency over requests, as an image file."""
    from matplotlib.figure import Figure

    good = [one for one in results if not one.error]
    figure = Figure(figsize=(9, 3), layout="constrained")
    columns = {
        "to the first token": [one.ttft for one in good],
        "per output token": [one.tpot for one in good],
        "per request": [one.end - one.due for one in good],
    }
    for axes, (title, values) in zip(figure.subplots(1, 3, sharey=True), columns.items(), strict=True):
        axes.step(np.sort(values), np.arange(1, len(values) + 1) / len(values), where="post")
        axes.set(xlabel=f"seconds {title}", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    figure.supylabel("share of requests")
    figure.savefig(path)
