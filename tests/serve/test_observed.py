"""What others observe of a server: metrics under vLLM's names, the Grafana dashboard, OpenTelemetry traces."""

from __future__ import annotations

import http.server
import json
import re
import sys
import threading
from typing import Any

import httpx
import pytest

from jaxllm.serve import ServeConfig, tracing
from jaxllm.serve.server_metrics import PREFIX
from jaxllm.serve.vllm_metrics import SUMMED, VLLM_NAMES
from tests import environment
from tests.serve import servers

DASHBOARDS = sorted((environment.ROOT / "deploy" / "grafana").glob("*.json"))
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Once", "max_tokens": 4, "temperature": 0.5, "ignore_eos": True}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def samples(url: str) -> dict[str, float]:
    """Samples of ``/metrics`` by name and labels."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def bare(name: str) -> str:
    return name.partition("{")[0]


def test_metrics_have_vllms_names_on_request_and_the_same_values():
    with servers.running(servers.tiny_backend, ServeConfig(port=0, name="tiny")) as (_, url):
        assert not any(name.startswith("vllm:") for name in samples(url))
    with servers.running(servers.tiny_backend, ServeConfig(port=0, name="tiny", metrics_names="vllm")) as (_, url):
        for _ in range(2):
            assert httpx.post(f"{url}/v1/completions", json=TEXT | {"prompt": "Once upon a time"}).status_code == 200
        found = samples(url)
    theirs = {name: value for name, value in found.items() if name.startswith("vllm:")}
    assert all('engine="0"' in name and 'model_name="tiny"' in name for name in theirs)
    there = {re.sub(r"_(total|bucket|sum|count|created)$", "", bare(name)) for name in theirs}
    without = {name for name in VLLM_NAMES.values() if not name.startswith("spec_decode")}
    assert there == {f"vllm:{name}" for name in {*without, *SUMMED}}
    for own, name in VLLM_NAMES.items():
        mine = sorted(
            v for n, v in found.items() if re.fullmatch(rf"{PREFIX}{own}(_total|_bucket|_sum|_count)?", bare(n))
        )
        other = sorted(
            v for n, v in theirs.items() if re.fullmatch(rf"vllm:{name}(_total|_bucket|_sum|_count)?", bare(n))
        )
        assert mine == other, name

    def total(name: str) -> float:
        return sum(value for sample, value in found.items() if bare(sample) == name)

    read = total(f"{PREFIX}prompt_tokens_total") + total(f"{PREFIX}prefix_cache_hit_tokens_total")
    assert read >= 2 * len("Once upon a time")
    assert total("vllm:prompt_tokens_total") == total("vllm:prefix_cache_queries_total") == read
    assert total("vllm:prefix_cache_hits_total") == total(f"{PREFIX}prefix_cache_hit_tokens_total") > 0


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_a_dashboard_asks_for_metrics_that_the_server_exports(file):
    board = json.loads(file.read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    wanted = {
        metric
        for panel in panels
        for target in panel["targets"]
        for metric in re.findall(r"\b(?:jaxllm|vllm):\w+", target["expr"])
    }
    assert len(wanted) > 10
    names = "vllm" if any(name.startswith("vllm:") for name in wanted) else "jaxllm"
    config = ServeConfig(port=0, name="tiny", metrics_names=names)  # type: ignore[arg-type]
    with servers.running(servers.tiny_backend, config) as (_, url):
        httpx.post(f"{url}/v1/completions", json=TEXT)
        there = {bare(name) for name in samples(url)}
    unknown = {"jaxllm:mfu", "jaxllm:mbu"}  # of devices whose data sheet is known: not of CPUs
    assert wanted - unknown <= there
    for panel in panels:  # none lies on another
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24


def test_there_is_a_dashboard():
    assert DASHBOARDS


@pytest.fixture
def spans(monkeypatch):
    """Spans that have ended."""
    pytest.importorskip("opentelemetry.sdk", reason="needs OpenTelemetry: pip install 'jaxllm[otel]'")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("jaxllm.serve.app.make_provider", lambda endpoint: provider)
    return exporter.get_finished_spans


def traced(**fields: Any) -> ServeConfig:
    return ServeConfig(port=0, name="tiny", otlp_traces_endpoint="http://127.0.0.1:1/v1/traces", **fields)


def test_a_request_is_a_span_without_its_texts(spans):
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a secret"}], "max_tokens": 3, "n": 2}
    with servers.running(servers.opener(servers.FixedRate(0.001)), traced()) as (_, url):
        httpx.post(f"{url}/v1/completions", json=TEXT | {"top_p": 0.9}, headers={"traceparent": PARENT})
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=chat | {"stream": True}) as answer:
            answer.read()
        httpx.post(f"{url}/v1/embeddings", json={"model": "tiny", "input": "abc"})
        httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "x", "nonsense": 1})
        for path in ("/health", "/ready", "/metrics", "/version"):
            httpx.get(f"{url}{path}")
    found = {span.name: span for span in spans()}
    assert [span.name for span in spans()] == [
        "text_completion tiny", "chat tiny", "embeddings tiny", "text_completion", "GET /version",
    ]  # fmt: skip
    one = found["text_completion tiny"]
    assert one.parent is not None
    assert (
        f"{one.context.trace_id:032x}-{one.parent.span_id:016x}" == "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
    )
    said = dict(one.attributes)
    assert said.pop("gen_ai.latency.time_to_first_token") > 0
    assert said.pop("jaxllm.request.id")
    assert said == {
        "http.request.method": "POST", "url.path": "/v1/completions", "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "jaxllm", "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 4, "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.input_tokens": said["gen_ai.usage.input_tokens"], "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
    }  # fmt: skip
    streamed = found["chat tiny"]
    assert streamed.attributes["gen_ai.usage.output_tokens"] == 6
    assert streamed.attributes["gen_ai.request.choice.count"] == 2
    assert found["text_completion"].attributes["http.response.status_code"] == 400
    assert all(span.status.is_ok or span.status.is_unset for span in spans())
    assert "secret" not in json.dumps([span.to_json() for span in spans()])


def test_requests_that_fail_are_failed_spans(spans):
    with servers.running(servers.opener(servers.FixedRate(0.05)), traced(request_seconds=0.1)) as (_, url):
        httpx.post(f"{url}/v1/completions", json=TEXT | {"max_tokens": 400})
    (span,) = spans()
    assert not span.status.is_ok
    assert span.attributes["error.type"] == "timeout"


def test_spans_reach_a_collector_over_http():
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http", reason="needs OpenTelemetry: pip install 'jaxllm[otel]'"
    )
    seen: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        provider = tracing.make_provider(f"http://127.0.0.1:{server.server_port}/v1/traces")
        provider.get_tracer("x").start_span("one span").end()
        provider.shutdown()
        server.shutdown()
    ((path, body),) = seen
    assert path == "/v1/traces"
    assert b"one span" in body
    assert b"jaxllm" in body


def test_traces_without_the_packages_are_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'jaxllm\[otel\]'"):
        traced()
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"otlp_traces_endpoint = 'localhost'; give a URL"):
        ServeConfig(otlp_traces_endpoint="localhost")
