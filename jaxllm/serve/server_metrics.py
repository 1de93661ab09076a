"""Prometheus metrics of the server with the prefix ``jaxllm:``, and on request under vLLM's names too."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from jaxllm.serve.backend import Backend
from jaxllm.serve.config import MetricsNames
from jaxllm.serve.vllm_metrics import vllm_families

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
PREFIX = "jaxllm:"
_PROGRAM_METRICS: dict[str, Any] = {
    "step_seconds": (CounterMetricFamily, "Seconds in steps of a compiled program."),
    "model_flops": (CounterMetricFamily, "Model FLOPs of the steps."),
    "model_moved": (CounterMetricFamily, "Bytes of weights and KV cache that the steps read and wrote."),
    "mfu": (GaugeMetricFamily, "Model FLOPs utilisation since the start, 0 to 1."),
    "mbu": (GaugeMetricFamily, "Memory bandwidth utilisation since the start, 0 to 1."),
}


class ServerMetrics:
    """Prometheus metrics of one server.

    Args:
        name: name of the model, the label ``model_name``.
        names: "vllm": metrics that vLLM has are exported under its names too.
    """

    def __init__(self, name: str, names: MetricsNames = "jaxllm"):
        self.name, self._names = name, names
        self.registry = CollectorRegistry()
        self._backend: Backend | None = None

        def histogram(metric: str, help_: str, buckets: tuple[float, ...]) -> Any:
            family = Histogram(PREFIX + metric, help_, ["model_name"], registry=self.registry, buckets=buckets)
            return family.labels(name)

        self.first_token = histogram("time_to_first_token_seconds", "Time to the first token of a request.", _SECONDS)
        self.inter_token = histogram("inter_token_latency_seconds", "Time per token after the first.", _GAPS)
        self.latency = histogram("e2e_request_latency_seconds", "Duration of a request.", _SECONDS)
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.generated_tokens = histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        self._ended = Counter(
            PREFIX + "request_success", "Requests by finish reason.", ["model_name", "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self.refused = Counter(
            PREFIX + "requests_refused", "Requests refused because the queue was full.", ["model_name"],
            registry=self.registry,
        ).labels(name)  # fmt: skip
        self.open_requests = Gauge(
            PREFIX + "requests_open", "Requests in progress.", ["model_name"], registry=self.registry
        ).labels(name)
        self.registry.register(self)  # type: ignore[arg-type]

    def attach(self, backend: Backend) -> None:
        """Adds the metrics of an engine."""
        self._backend = backend

    def collect(self) -> Any:
        """Metrics of the engine, read when Prometheus scrapes (``prometheus_client`` collector)."""
        if self._backend is None:
            return
        load = self._backend.load()
        gauges = {
            "num_requests_running": ("Running sequences.", load.running),
            "num_requests_waiting": ("Queued sequences.", load.waiting),
            "kv_cache_usage_perc": ("Share of KV cache pages in use, 0 to 1.", load.pages_held / max(1, load.pages)),
        }
        gauges |= {name: (f"The engine's {name.replace('_', ' ')}.", value) for name, value in load.gauges.items()}
        for name, (help_, value) in gauges.items():
            family = GaugeMetricFamily(PREFIX + name, help_, labels=["model_name"])
            family.add_metric([self.name], value)
            yield family
        for name, value in load.counters.items():
            family = CounterMetricFamily(
                PREFIX + name, f"The engine's {name.replace('_', ' ')}.", labels=["model_name"]
            )
            family.add_metric([self.name], value)
            yield family
        if load.accepted_by_position is not None:
            family = CounterMetricFamily(
                PREFIX + "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position in the draft.",
                labels=["model_name", "position"],
            )  # fmt: skip
            for position, count in enumerate(load.accepted_by_position):
                family.add_metric([self.name, str(position)], count)
            yield family
        for field, (kind, help_) in _PROGRAM_METRICS.items():
            family = kind(PREFIX + field, help_, labels=["model_name", "bucket"])
            for bucket, use in sorted(load.programs.items()):
                if (value := getattr(use, field.removeprefix("step_").removeprefix("model_"))) is not None:
                    family.add_metric([self.name, bucket], value)
            if family.samples:
                yield family

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        own = generate_latest(self.registry)
        if self._names == "jaxllm":
            return own
        others = CollectorRegistry()
        others.register(_Collected(vllm_families(self.registry.collect(), PREFIX)))  # type: ignore[arg-type]
        return own + generate_latest(others)

    def start_request(self, prompt_tokens: int) -> RequestTimer:
        """Starts the timer of a request; the caller closes it."""
        return RequestTimer(self, prompt_tokens)

    def end(self, reason: str) -> None:
        """Counts an ended request by its finish reason."""
        self._ended.labels(self.name, reason).inc()


class _Collected:
    """Collector of families that are collected already."""

    def __init__(self, families: Iterable[Any]):
        self._families = list(families)

    def collect(self) -> list[Any]:
        """The families."""
        return self._families


class RequestTimer:
    """Measures one request for the latency histograms.

    Attributes:
        ended: finish reason: "stop", "length", "timeout", "error", or "abort" if the client has disconnected.
        first_token: seconds to the first token; None before it.
    """

    def __init__(self, metrics: ServerMetrics, prompt_tokens: int):
        self._metrics, self._prompt_tokens, self._generated = metrics, prompt_tokens, 0
        self._began = time.perf_counter()
        self._last: dict[Any, float] = {}
        self.ended = "abort"
        self.first_token: float | None = None
        metrics.open_requests.inc()

    def output(self, sequence: Any, tokens: int, finish: str | None) -> None:
        """Records that a sequence, named by any key, has gained tokens or ended."""
        if tokens:
            now = time.perf_counter()
            before = self._last.get(sequence)
            if before is None:
                if not self._last:
                    self.first_token = now - self._began
                    self._metrics.first_token.observe(self.first_token)
            else:
                self._metrics.inter_token.observe((now - before) / tokens)
            self._last[sequence] = now
            self._generated += tokens
        if finish is not None and finish != "cancelled":
            self.ended = finish

    def close(self) -> None:
        """Records the ended request in the metrics."""
        metrics = self._metrics
        metrics.open_requests.dec()
        metrics.latency.observe(time.perf_counter() - self._began)
        metrics.prompt_tokens.observe(self._prompt_tokens)
        metrics.generated_tokens.observe(self._generated)
        metrics.end(self.ended)
