"""Request traces: arrival times, prompt lengths and completion lengths, from a file or drawn from distributions.

    poisson:4                 Poisson arrivals, 4 requests a second
    bursty:4                  gamma arrivals of that rate whose intervals vary three times as much (arXiv:2401.17644)
    uniform:4                 arrivals at equal intervals
    closed:64                 64 clients, each sending its next request when its last has ended
    FILE.jsonl                lines {"at": s, "prompt_tokens": n, "max_tokens": n}, or "prompt": text for prompt_tokens;
                              "prefix": name and "prefix_tokens": n where requests share the start of their prompts

Lengths are a fixed pair, ``1024/256``; a file of ``prompt,output`` lines; or a named distribution.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxllm.config import closest
from jaxllm.files import DataError

TEXT_BYTES = 4
"""Bytes of text that count as one token, where a trace has text."""
MOST_REPEATS = 8
"""Times that a trace is repeated at most, to be long enough at a high rate."""
BURSTINESS = 3.0
"""Coefficient of variation of the intervals of bursty arrivals."""


@dataclass(frozen=True)
class TraceRequest:
    """Request of a trace.

    Attributes:
        at: arrival time in seconds.
        prompt: prompt length in tokens.
        tokens: number of tokens to generate.
        prefix: name of a prefix that requests share; empty: none.
        prefix_tokens: length of that prefix, at most ``prompt``.
        key: client that sends it, for policies and priorities.
    """

    at: float
    prompt: int
    tokens: int
    prefix: str = ""
    prefix_tokens: int = 0
    key: str = ""


@dataclass(frozen=True)
class LengthDistribution:
    """Log-normal distribution of prompt and completion lengths.

    Attributes:
        prompt, tokens: median length of prompts and completions, in tokens.
        source: where the medians are from.
        spread: standard deviation of the logarithm of the lengths; published for none of them, so it is assumed.
        longest: lengths beyond it are cut.
    """

    prompt: float
    tokens: float
    source: str
    spread: float = 1.0
    longest: int = 8192

    @classmethod
    def of_means(cls, prompt: float, tokens: float, source: str, spread: float = 1.0) -> LengthDistribution:
        """Distribution of which the means are known: the median is the mean / exp(spread^2 / 2)."""
        factor = math.exp(-(spread**2) / 2)
        return cls(prompt * factor, tokens * factor, source, spread)

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Draws int[count, 2] lengths."""
        medians = np.log([self.prompt, self.tokens])
        drawn = np.exp(rng.normal(medians, self.spread, (count, 2)))
        return np.clip(np.rint(drawn), 1, self.longest).astype(int)


LENGTHS = {
    "sharegpt": LengthDistribution.of_means(161.31, 337.99, "means of arXiv:2309.06180, section 6.1"),
    "alpaca": LengthDistribution.of_means(19.31, 58.45, "means of arXiv:2309.06180, section 6.1"),
    "conversation": LengthDistribution(1020, 129, "medians of arXiv:2311.18677, section 3"),
    "code": LengthDistribution(1500, 13, "medians of arXiv:2311.18677, section 3"),
}
"""Length distributions by name: log-normal, with the mean or the median that is published for a data set."""


def draw_lengths(name: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draws int[count, 2] prompt and completion lengths: of a named distribution, a pair ``1024/256`` or a CSV file.

    Raises:
        DataError: the name is none of these, or the file is malformed.
    """
    if name in LENGTHS:
        return LENGTHS[name].draw(rng, count)
    pair = name.split("/")
    if len(pair) == 2 and all(part.isdigit() and int(part) > 0 for part in pair):
        return np.tile([int(part) for part in pair], (count, 1))
    path = Path(name)
    if not path.is_file():
        raise DataError(
            f"lengths = {name!r}: no such file or distribution.{closest(name, LENGTHS)} Legal: {', '.join(LENGTHS)}, "
            "PROMPT/OUTPUT such as 1024/256, or a CSV file of prompt,output lines."
        )
    rows = read_lengths(path)
    return rows[rng.integers(0, len(rows), count)]


def read_lengths(path: Path) -> np.ndarray:
    """Reads int[N, 2] lengths from lines ``prompt,output``; a first line of names is skipped.

    Raises:
        DataError: a line is malformed; names it.
    """
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for number, line in enumerate(csv.reader(file), 1):
            try:
                prompt, tokens = (int(part) for part in line[:2])
            except ValueError:
                if number == 1:
                    continue
                raise DataError(f"{path}:{number}: {','.join(line)!r}; legal: prompt,output, two numbers.") from None
            if min(prompt, tokens) < 1:
                raise DataError(f"{path}:{number}: lengths must be 1 or more.")
            rows.append((prompt, tokens))
    if not rows:
        raise DataError(f"{path} has no lengths.")
    return np.asarray(rows)


@dataclass(frozen=True)
class RequestTrace:
    """Trace of requests.

    Attributes:
        name: for reports.
        requests: in the order of arrival.
        clients: closed loop: number of clients that take the requests in turn, whatever their arrival times; None: open
            loop.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    clients: int | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and completion."""
        return max(one.prompt + one.tokens for one in self.requests)

    @property
    def rate(self) -> float:
        """Mean arrival rate, requests per second; inf if all arrive at once or in a closed loop."""
        span = self.requests[-1].at - self.requests[0].at
        return (len(self.requests) - 1) / span if span > 0 and self.clients is None else math.inf

    def at_rate(self, rate: float, seconds: float = 0.0) -> RequestTrace:
        """The same requests at another mean rate, repeated until they span so many seconds, ``MOST_REPEATS`` at most.

        Raises:
            ValueError: the trace has no rate: all arrive at once, or in a closed loop.
        """
        if not math.isfinite(self.rate):
            raise ValueError(f"the trace {self.name} has no arrival rate to change.")
        factor, first = self.rate / rate, self.requests[0].at
        period = factor * (self.requests[-1].at - first) + 1 / rate
        times = [factor * (one.at - first) for one in self.requests]
        moved = [
            replace(one, at=again * period + at)
            for again in range(min(MOST_REPEATS, max(1, math.ceil(seconds / period))))
            for one, at in zip(self.requests, times, strict=True)
        ]
        return RequestTrace(f"{self.name} at {rate:.4g}/s", tuple(moved))


def arrivals(kind: str, rate: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Arrival times of a process: poisson, bursty or uniform.

    Raises:
        DataError: there is no such process.
    """
    if kind == "poisson":
        gaps = rng.exponential(1 / rate, count)
    elif kind == "bursty":
        shape = 1 / BURSTINESS**2
        gaps = rng.gamma(shape, 1 / (rate * shape), count)
    elif kind == "uniform":
        gaps = np.full(count, 1 / rate)
    else:
        legal = ("poisson", "bursty", "uniform", "closed")
        raise DataError(f"trace = {kind!r}: no such arrivals.{closest(kind, legal)} Legal: {', '.join(legal)}.")
    return np.cumsum(gaps)


DEFAULT_LENGTHS = "sharegpt"


def make_trace(
    text: str,
    *,
    lengths: str = DEFAULT_LENGTHS,
    count: int = 500,
    seed: int = 0,
    prefixes: int = 0,
    prefix_tokens: int = 0,
) -> RequestTrace:
    """Trace of a specification, see the module.

    Args:
        text: ``poisson:RATE``, ``bursty:RATE``, ``uniform:RATE``, ``closed:CLIENTS``, a file, or the name of lengths
            with or without a rate, ``sharegpt:RATE``, which arrive as ``poisson:RATE`` then, by default one a second.
        lengths: see ``draw_lengths``; a file of requests has its own.
        count: number of requests.
        seed: seed of times and lengths.
        prefixes: number of prefixes of which each request has one; 0: none.
        prefix_tokens: tokens of each prefix, in addition to the drawn prompt.

    Raises:
        DataError: it is malformed; says what is legal.
    """
    kind, colon, value = text.partition(":")
    if kind in LENGTHS:
        if lengths not in (kind, DEFAULT_LENGTHS):
            raise DataError(f"trace = {text!r} says its lengths, and lengths = {lengths!r}; leave one out.")
        kind, colon, value, lengths = "poisson", ":", value if colon else "1", kind
        text = f"poisson:{value}"
    if text.endswith((".jsonl", ".json")) or not colon:
        return read_request_trace(Path(text))
    try:
        rate = float(value)
    except ValueError:
        rate = 0.0
    if not 0 < rate < math.inf or count < 1:
        raise DataError(f"trace = {text!r} with {count} requests; give {kind}:NUMBER above 0, and 1 request or more.")
    rng = np.random.default_rng(seed)
    drawn = draw_lengths(lengths, count, rng)
    shared = rng.integers(0, prefixes, count) if prefixes else np.zeros(count, int)
    times = np.zeros(count) if kind == "closed" else arrivals(kind, rate, count, rng)
    rows = zip(times.tolist(), drawn.tolist(), shared.tolist(), strict=True)
    made = tuple(
        TraceRequest(at, prompt + prefix_tokens, tokens, f"p{number}", prefix_tokens)
        if prefixes and prefix_tokens
        else TraceRequest(at, prompt, tokens)
        for at, (prompt, tokens), number in rows
    )
    return RequestTrace(f"{text} {lengths}", made, int(rate) if kind == "closed" else None)


def read_request_trace(path: Path) -> RequestTrace:
    """Trace of a JSON-lines file.

    Raises:
        DataError: the file cannot be read, or a line is malformed; names the line.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise DataError(
            f"trace = {str(path)!r}: {error.strerror}. Legal: poisson:RATE, bursty:RATE, uniform:RATE, "
            f"closed:CLIENTS, {', '.join(LENGTHS)} with :RATE or without, or a file of JSON lines."
        ) from error
    requests = []
    for number, line in enumerate(lines, 1):
        try:
            requests.append(_request(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f'{path}:{number}: {error!r}; legal: {{"at": 0.5, "prompt_tokens": 100, "max_tokens": 16}}, with '
                '"prompt": text instead of prompt_tokens, and "prefix" and "prefix_tokens" if it shares one.'
            ) from None
    if not requests:
        raise DataError(f"{path} has no requests.")
    return RequestTrace(path.name, tuple(sorted(requests, key=lambda one: one.at)))


def _request(found: Mapping[str, object]) -> TraceRequest:
    text = found.get("prompt")
    prompt = -(-len(str(text).encode()) // TEXT_BYTES) if text is not None else int(str(found["prompt_tokens"]))
    tokens, shared = int(str(found["max_tokens"])), int(str(found.get("prefix_tokens", 0)))
    if min(prompt, tokens) < 1 or not 0 <= shared <= prompt:
        raise ValueError("lengths must be 1 or more, and prefix_tokens at most the prompt")
    return TraceRequest(
        float(str(found["at"])), prompt, tokens, str(found.get("prefix", "")), shared, str(found.get("key", ""))
    )


def token_ids(requests: Sequence[TraceRequest], index: int, names: dict[str, int]) -> list[int]:
    """Token ids of a request's prompt: equal for equal prefixes, and different after them.

    Args:
        names: numbers of the prefixes so far, which this extends.
    """
    one = requests[index]
    shared = one.prefix_tokens if one.prefix else 0
    ids = [0] * one.prompt
    if shared:
        # Odd numbers stand for prefixes, even ones for requests; pages differ from their first token on.
        ids[0] = 2 * names.setdefault(one.prefix, len(names)) + 1
    if shared < one.prompt:
        ids[shared] = 2 * index + 2
    return ids
