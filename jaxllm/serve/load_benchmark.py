"""Load for any server that speaks OpenAI's API, and what its readers see.

Closed: so many clients, each asking again when it is answered. Open: requests come when they come, at random (Poisson),
all at once (burst), or as a trace says, however slow the server is: what waits is measured too.
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
    """One request of a load: when, in seconds from the beginning; its prompt; how many tokens."""

    at: float
    prompt: str
    tokens: int


@dataclass
class RequestResult:
    """What a reader saw, in seconds from the beginning.

    Attributes:
        due, sent: when it was to be sent, and was.
        pieces: when each piece of the text came.
        tokens: made, as the server counts.
        end: when the answer was whole.
        error: what went wrong; empty otherwise.
    """

    due: float
    sent: float
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0
    end: float = 0.0
    error: str = ""

    @property
    def first(self) -> float:
        """Seconds to the first piece."""
        return self.pieces[0] - self.due

    @property
    def pace(self) -> float:
        """Seconds a token after the first."""
        return (self.pieces[-1] - self.pieces[0]) / max(1, self.tokens - 1)


class LoadClient:
    """Streams completions over a connection of its own for each.

    Args:
        url: of the server, with or without /v1.
        model: what to ask for.
        key: of the API.
    """

    def __init__(self, url: str, model: str, key: str = ""):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise DataError(f"{url} is no address of a server; give http://HOST:PORT.")
        self.model, self._key, self._host = model, key, parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/").removesuffix("/v1")

    async def models(self) -> list[str]:
        """What the server has."""
        text = "".join([line async for line in self._lines("GET", "/v1/models", b"")])
        return [one["id"] for one in json.loads(text)["data"]]

    async def ask(self, ask: LoadRequest, clock: Callable[[], float]) -> RequestResult:
        """Sends a request and reads its answer; what fails is in the result."""
        seen = RequestResult(ask.at, clock())
        body = {
            "model": self.model,
            "prompt": ask.prompt,
            "max_tokens": ask.tokens,
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
                seen.tokens = (event.get("usage") or {}).get("completion_tokens", seen.tokens)
                if any(choice["text"] or choice["finish_reason"] for choice in event["choices"]):
                    seen.pieces.append(clock())
            seen.tokens = seen.tokens or len(seen.pieces)
            seen.error = "" if seen.pieces else "nothing came"
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            seen.error = f"{type(error).__name__}: {error}"[:200]
        seen.end = clock()
        return seen

    async def _lines(self, method: str, path: str, body: bytes) -> AsyncIterator[str]:
        """Lines of a response's body as they come."""
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


def random_requests(many: int, rate: float, prompt: int, tokens: int, seed: int) -> list[LoadRequest]:
    """Requests with random words that come as a Poisson process does; all at once where the rate is infinite."""
    rng = np.random.default_rng(seed)
    times = np.zeros(many) if np.isinf(rate) else np.cumsum(rng.exponential(1 / rate, many))
    # Different beginnings, so that no prefix is found again.
    words = (" ".join(map(str, rng.integers(0, 1000, max(1, prompt // 2)))) for _ in range(many))
    return [LoadRequest(float(at), text, tokens) for at, text in zip(times, words, strict=True)]


def read_trace(path: Path) -> list[LoadRequest]:
    """A trace: lines of {"at": seconds, "prompt": text, "max_tokens": n}.

    Raises:
        DataError: a line is not that; names it.
    """
    asks = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            found = json.loads(line)
            asks.append(LoadRequest(float(found["at"]), str(found["prompt"]), int(found["max_tokens"])))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f'{path}:{number}: {error!r}; legal: {{"at": 0.5, "prompt": "...", "max_tokens": 16}}'
            ) from None
    if not asks:
        raise DataError(f"{path} has no requests.")
    return sorted(asks, key=lambda ask: ask.at)


async def run_open_loop(client: LoadClient, asks: Sequence[LoadRequest]) -> list[RequestResult]:
    """Sends each when it is due."""
    clock = _clock()

    async def one(ask: LoadRequest) -> RequestResult:
        await asyncio.sleep(max(0.0, ask.at - clock()))
        return await client.ask(ask, clock)

    return list(await asyncio.gather(*map(one, asks)))


async def run_closed_loop(client: LoadClient, asks: Sequence[LoadRequest], clients: int) -> list[RequestResult]:
    """So many at a time, each followed by the next."""
    clock, left, out = _clock(), iter(asks), []

    async def live(asks: Iterator[LoadRequest]) -> None:
        for ask in asks:
            out.append(await client.ask(LoadRequest(clock(), ask.prompt, ask.tokens), clock))

    await asyncio.gather(*(live(left) for _ in range(clients)))
    return out


def _clock() -> Callable[[], float]:
    began = time.perf_counter()
    return lambda: time.perf_counter() - began


def summary(seen: Sequence[RequestResult], first: float, pace: float) -> dict[str, Any]:
    """Figures of a load.

    Args:
        seen: all its requests.
        first, pace: what a good answer keeps: seconds to the first token, and for each token after it.
    """
    good = [one for one in seen if not one.error]
    if not good:
        raise DataError(f"no request was answered; the first says: {seen[0].error if seen else 'there is none'}")
    seconds = max(one.end for one in seen) - min(one.sent for one in seen)
    kept = [one for one in good if one.first <= first and one.pace <= pace]
    gaps = np.concatenate([np.diff(one.pieces) for one in good])
    errors: Mapping[str, int] = {e: sum(one.error == e for one in seen) for e in sorted({s.error for s in seen} - {""})}
    return {
        "requests": len(seen),
        "failed": len(seen) - len(good),
        "errors": errors,
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "tokens_per_second": sum(one.tokens for one in good) / seconds,
        "ttft": _spread([one.first for one in good]),
        "itl": _spread(gaps) if len(gaps) else None,
        "tpot": _spread([one.pace for one in good]),
        "latency": _spread([one.end - one.due for one in good]),
        "slo": {"ttft": first, "tpot": pace},
        "goodput": len(kept) / seconds,
        "within_slo": len(kept) / len(seen),
    }


def _spread(values: Any) -> dict[str, float]:
    found = np.percentile(np.asarray(values, float), [50, 90, 99])
    return {"mean": float(np.mean(values)), **dict(zip(("p50", "p90", "p99"), map(float, found), strict=True))}


def show(figures: Mapping[str, Any]) -> str:
    """The figures as a table."""
    lines = [
        f"{figures['requests']} requests in {figures['seconds']:.2f} s, {figures['failed']} failed; "
        f"{figures['requests_per_second']:.2f} requests/s, {figures['tokens_per_second']:.1f} tokens/s",
        f"goodput {figures['goodput']:.2f} requests/s: {figures['within_slo']:.0%} within "
        f"{figures['slo']['ttft']} s to the first token and {figures['slo']['tpot']} s a token",
        f"{'seconds':10}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
    ]
    for name in ("ttft", "itl", "tpot", "latency"):
        if (row := figures[name]) is not None:
            lines.append(f"{name:10}" + "".join(f"{row[column]:10.4f}" for column in ("mean", "p50", "p90", "p99")))
    return "\n".join([*lines, *(f"{many} x {error}" for error, many in figures["errors"].items())])


def plot(seen: Sequence[RequestResult], path: Path) -> None:
    """Shares of requests over seconds to the first token, a token, and in all; written as an image."""
    from matplotlib.figure import Figure

    good = [one for one in seen if not one.error]
    figure = Figure(figsize=(9, 3), layout="constrained")
    columns = {
        "to the first token": [one.first for one in good],
        "a token after it": [one.pace for one in good],
        "in all": [one.end - one.due for one in good],
    }
    for axes, (title, values) in zip(figure.subplots(1, 3, sharey=True), columns.items(), strict=True):
        axes.step(np.sort(values), np.arange(1, len(values) + 1) / len(values), where="post")
        axes.set(xlabel=f"seconds {title}", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    figure.supylabel("share of requests")
    figure.savefig(path)
