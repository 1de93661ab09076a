"""What a server counts, in Prometheus' text format, under names that users of vLLM know."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from jaxllm.serve.backend import Backend

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
PREFIX = "jaxllm:"
_OF_PROGRAMS: dict[str, Any] = {
    "step_seconds": (CounterMetricFamily, "That steps of a program took."),
    "model_flops": (CounterMetricFamily, "Of the model, that they made use of."),
    "model_moved": (CounterMetricFamily, "Bytes of weights, keys and values that they read and wrote."),
    "mfu": (GaugeMetricFamily, "Share of the devices' FLOP/s, 1 is all, since the server began."),
    "mbu": (GaugeMetricFamily, "Share of the devices' bytes/s, likewise."),
}


class ServerMetrics:
    """Counts of one server.

    Args:
        name: of the model, the label ``model_name``.
    """

    def __init__(self, name: str):
        self.name = name
        self.registry = CollectorRegistry()
        self._backend: Backend | None = None

        def histogram(what: str, words: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(PREFIX + what, words, ["model_name"], registry=self.registry, buckets=buckets).labels(name)

        self.first_token = histogram("time_to_first_token_seconds", "From a request to its first token.", _SECONDS)
        self.gap = histogram("inter_token_latency_seconds", "Between pieces of one continuation, a token.", _GAPS)
        self.latency = histogram("e2e_request_latency_seconds", "From a request to its end.", _SECONDS)
        self.prompt = histogram("request_prompt_tokens", "Tokens of a request's prompts.", _TOKENS)
        self.made = histogram("request_generation_tokens", "Tokens made for a request.", _TOKENS)
        self._ended = Counter(
            PREFIX + "request_success", "Requests by how they ended.", ["model_name", "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self.refused = Counter(
            PREFIX + "requests_refused", "Requests for which the queue had no room.", ["model_name"],
            registry=self.registry,
        ).labels(name)  # fmt: skip
        self.streams = Gauge(
            PREFIX + "requests_open", "Requests under way.", ["model_name"], registry=self.registry
        ).labels(name)
        self.registry.register(self)  # type: ignore[arg-type]

    def attach(self, backend: Backend) -> None:
        """From now on the engine's own numbers are given too."""
        self._backend = backend

    def collect(self) -> Any:
        """The engine's numbers, read when they are asked for."""
        if self._backend is None:
            return
        load = self._backend.load()
        gauges = {
            "num_requests_running": ("Continuations that are worked on.", load.running),
            "num_requests_waiting": ("Continuations that wait.", load.waiting),
            "kv_cache_usage_perc": ("Share of pages in use, 1 is all.", load.pages_held / max(1, load.pages)),
        }
        for name, (words, value) in gauges.items():
            family = GaugeMetricFamily(PREFIX + name, words, labels=["model_name"])
            family.add_metric([self.name], value)
            yield family
        for name, value in load.counters.items():
            family = CounterMetricFamily(
                PREFIX + name, f"The engine's {name.replace('_', ' ')}.", labels=["model_name"]
            )
            family.add_metric([self.name], value)
            yield family
        for field, (kind, words) in _OF_PROGRAMS.items():
            family = kind(PREFIX + field, words, labels=["model_name", "bucket"])
            for bucket, use in sorted(load.programs.items()):
                if (value := getattr(use, field.removeprefix("step_").removeprefix("model_"))) is not None:
                    family.add_metric([self.name, bucket], value)
            if family.samples:
                yield family

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)

    def watch(self, prompt_tokens: int) -> RequestTimer:
        """Watches one request from now on; to be closed."""
        return RequestTimer(self, prompt_tokens)

    def end(self, reason: str) -> None:
        """Counts a request that has ended."""
        self._ended.labels(self.name, reason).inc()


class RequestTimer:
    """One request's times.

    Attributes:
        ended: how: "stop", "length", "timeout", "error"; "abort" where the client has left.
    """

    def __init__(self, metrics: ServerMetrics, prompt_tokens: int):
        self._metrics, self._prompt, self._made = metrics, prompt_tokens, 0
        self._began = time.perf_counter()
        self._last: dict[Any, float] = {}
        self.ended = "abort"
        metrics.streams.inc()

    def piece(self, which: Any, tokens: int, finish: str | None) -> None:
        """A continuation has gained tokens, or ended."""
        if tokens:
            now = time.perf_counter()
            before = self._last.get(which)
            if before is None:
                if not self._last:
                    self._metrics.first_token.observe(now - self._began)
            else:
                self._metrics.gap.observe((now - before) / tokens)
            self._last[which] = now
            self._made += tokens
        if finish is not None and finish != "cancelled":
            self.ended = finish

    def close(self) -> None:
        """Counts it."""
        metrics = self._metrics
        metrics.streams.dec()
        metrics.latency.observe(time.perf_counter() - self._began)
        metrics.prompt.observe(self._prompt)
        metrics.made.observe(self._made)
        metrics.end(self.ended)
