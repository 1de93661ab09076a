"""OpenTelemetry traces: one server span per request, with the attributes of the conventions for generative AI.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans. A span has sizes, settings and times, never texts. It
continues the trace of a request's ``traceparent`` header. The packages are an extra, ``jaxllm[otel]``, imported when
traces are switched on; exporter and sampling also follow the ``OTEL_*`` variables of the environment.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
UNTRACED = ("/health", "/ready", "/metrics")
"""Paths without spans: probes and scrapes."""
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""``gen_ai.operation.name`` by path; other paths have plain HTTP spans."""
SETTINGS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
}
"""Fields of a request and their attributes."""


class TracingError(ValueError):
    """Traces are switched on without the packages for them; the message gives the command that installs them."""


def check_tracing() -> None:
    """Checks that the packages for traces are installed.

    Raises:
        TracingError: they are not.
    """
    for name in PACKAGES:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise TracingError(f"traces need the package of {name}: pip install 'jaxllm[otel]'.")


def make_provider(endpoint: str) -> Any:
    """Tracer provider that sends spans in batches to an OTLP endpoint over HTTP, such as http://host:4318/v1/traces.

    Raises:
        TracingError: the packages are not installed.
    """
    check_tracing()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", "jaxllm")
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class TracingMiddleware:
    """ASGI middleware that makes a span of each request; around ``RequestMiddleware``, whose log record it reads.

    Args:
        app: application behind it.
        provider: tracer provider of OpenTelemetry.
    """

    def __init__(self, app: ASGIApp, provider: Any):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app, self._tracer = app, provider.get_tracer("jaxllm.serve")
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from opentelemetry.trace import SpanKind

        if scope["type"] != "http" or scope["path"] in UNTRACED:
            await self._app(scope, receive, send)
            return
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        operation = OPERATIONS.get(scope["path"])
        span = self._tracer.start_span(
            operation or f"{scope['method']} {scope['path']}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "url.path": scope["path"]},
        )
        try:
            await self._app(scope, receive, send)
        finally:
            record, body = scope.get("jaxllm.record", {}), scope.get("jaxllm.request")
            span.set_attributes(attributes(operation, record, body))
            if operation is not None and (model := getattr(body, "model", None)):
                span.update_name(f"{operation} {model}")
            self._set_status(span, record)
            span.end()

    def _set_status(self, span: Any, record: dict[str, Any]) -> None:
        """Marks a span as failed: the server's own errors, and answers that ended in the middle."""
        from opentelemetry.trace import Status, StatusCode

        status, finish = record.get("status", 500), record.get("finish")
        if status >= 500 or finish in ("error", "timeout"):
            span.set_attribute("error.type", finish if status < 500 else str(status))
            span.set_status(Status(StatusCode.ERROR))


def attributes(operation: str | None, record: dict[str, Any], body: Any) -> dict[str, Any]:
    """Attributes of a request's span, from its log record and its body; without what is not known."""
    found = {"http.response.status_code": record.get("status"), "jaxllm.request.id": record.get("id")}
    if operation is not None:
        finish = record.get("finish")
        found |= {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "jaxllm",
            "gen_ai.request.model": getattr(body, "model", None),
            "gen_ai.usage.input_tokens": record.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": record.get("completion_tokens"),
            "gen_ai.response.finish_reasons": None if finish is None else [finish],
            "gen_ai.latency.time_to_first_token": record.get("first_token_seconds"),
        }
        found |= {name: getattr(body, field, None) for field, name in SETTINGS.items()}
        if found["gen_ai.request.choice.count"] in (None, 1):
            found["gen_ai.request.choice.count"] = None  # required where it is not 1
    return {name: value for name, value in found.items() if value is not None}
