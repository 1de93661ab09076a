"""HTTP application: routes of the OpenAI-compatible API, health checks, metrics and the chat page.

    app = create_app(ServeConfig(name="tiny"))
    async with AsyncEngine(engine) as running:
        app.state.service.open_for(EngineBackend(running, template))

Routes exist before the engine is loaded; until it is ready they answer 503, and ``/ready`` says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import importlib.metadata
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from jaxllm.infer.adapter_catalogue import AdapterNotFoundError, AdapterRevision
from jaxllm.infer.start_progress import StartProgress
from jaxllm.serve.adapter_routes import add_adapter_routes
from jaxllm.serve.api import response_schemas as shapes
from jaxllm.serve.api.chat_completions import ChatCompletionHandler
from jaxllm.serve.api.embeddings import embed
from jaxllm.serve.api.errors import ApiError, validation_error
from jaxllm.serve.api.event_stream import ClientDisconnected, EventStream, cancel_on_disconnect
from jaxllm.serve.api.logprobs import display_text, token_bytes
from jaxllm.serve.api.prompt_encoding import encode_prompts, tokenize_request
from jaxllm.serve.api.request_schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from jaxllm.serve.api.route_support import EVENT_STREAM, RequestHandler, errors, json_response
from jaxllm.serve.api.text_completions import TextCompletionHandler
from jaxllm.serve.backend import Backend
from jaxllm.serve.batches.batch_routes import add_batch_routes
from jaxllm.serve.config import ServeConfig
from jaxllm.serve.generation import RequestDispatcher
from jaxllm.serve.messages.message_routes import add_message_routes
from jaxllm.serve.middleware import RequestMiddleware, error_response
from jaxllm.serve.responses.response_routes import add_response_routes
from jaxllm.serve.scoring.scoring_routes import add_scoring_routes
from jaxllm.serve.server_metrics import ServerMetrics
from jaxllm.serve.tracing import TracingMiddleware, make_provider

# Content security policy of the chat page: inline code and this server only, never inside a frame.
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
GENERATING = (
    *("ChatRequest", "CompletionRequest", "ResponseRequest", "InputTokensRequest"),
    *("MessageRequest", "CountTokensRequest"),
)
"""Schemas of requests whose model may be an adapter or an effort policy."""
_INFERENCE_ERRORS = errors(404, 408, 429, 503)


class ApiService:
    """State that the routes of one server share.

    Attributes:
        config: settings of the server.
        name: name of the model.
        efforts: effort policies by model name.
        metrics: Prometheus metrics.
        dispatcher: passes requests to the engine; None until the engine is ready.
        start: progress of loading the model and of compiling its programs, for ``/ready``.
        draining: the server is stopping and takes no new requests.
        failure: message for ``/health`` if the model could not be loaded.
        when_open, when_closing: what routes do once the engine is ready, and before it is closed.
    """

    def __init__(self, config: ServeConfig):
        self.config, self.name = config, config.name or "model"
        self.efforts = dict(config.efforts)
        self.metrics = ServerMetrics(self.name, config.metrics_names)
        self.dispatcher: RequestDispatcher | None = None
        self.start = StartProgress()
        self.draining = False
        self.failure: str | None = None
        self.when_open: list[Callable[[], Awaitable[None]]] = []
        self.when_closing: list[Callable[[], Awaitable[None]]] = []
        self._began = int(time.time())

    def open_for(self, backend: Backend) -> None:
        """Makes the server ready: from now on requests go to ``backend``."""
        self.metrics.attach(backend)
        self.dispatcher = RequestDispatcher(backend, self.config, self.metrics)

    async def open_routes(self) -> None:
        """Lets routes do what needs the engine; call it after ``open_for``."""
        for opened in self.when_open:
            await opened()

    async def close_routes(self) -> None:
        """Lets routes end what needs the engine, before it is closed."""
        for closed in self.when_closing:
            await closed()

    def ready(self) -> RequestDispatcher:
        """The dispatcher of a ready server.

        Raises:
            ApiError: 503; the model is still being loaded, or the server is stopping.
        """
        if self.dispatcher is None or self.draining:
            why = "the server is stopping" if self.draining else "the model is still being loaded"
            raise ApiError(503, f"{why}; try again later.", code="not_ready", headers={"Retry-After": "5"})
        return self.dispatcher

    def readiness(self) -> Response:
        """Response of ``/ready``: what the server does, and how many of the engine's programs are loaded."""
        done, total = self.start.programs
        body = {"programs_done": done, "programs": total}
        try:
            self.ready()
        except ApiError as error:
            stage = "compiling" if self.start.stage == "ready" else self.start.stage
            status = "stopping" if self.draining else stage if self.failure is None else "failed"
            return json_response({"status": status, **body, **error.body()}, 503, error.headers)
        return json_response({"status": "ready", **body})

    def check_model(self, name: str | None) -> AdapterRevision | None:
        """Adapter that a request's model name means, in its newest revision; None for the base and effort policies.

        Raises:
            ApiError: 404; it is another model's.
        """
        if name is None or name == self.name or name in self.efforts:
            return None
        host = None if self.dispatcher is None else self.dispatcher.backend.adapter_host
        with contextlib.suppress(AdapterNotFoundError):
            if host is not None:
                return host.adapters.find(name)
        also = "" if host is None else f" and {len(host.adapters)} adapters, which /v1/models lists"
        also += f" and effort policies: {', '.join(self.efforts)}" if self.efforts else ""
        raise ApiError(
            404, f"there is no model {name[:100]!r}; this server serves {self.name!r}{also}.", param="model",
            code="model_not_found",
        )  # fmt: skip

    def check_base(self, name: str | None) -> None:
        """Checks that a request's model name is the base's.

        Raises:
            ApiError: 404; it is another model's, or an adapter's.
        """
        kind = "an effort policy" if name in self.efforts else "an adapter"
        if self.check_model(name) is not None or name in self.efforts:
            raise ApiError(404, f"{name!r} is {kind}; embeddings are of {self.name!r} alone.", param="model")

    def card(self, other: str | None = None) -> dict[str, Any]:
        """Entry of the model, or of an adapter or effort policy, for ``/v1/models``."""
        own = {"id": self.name} if other is None else {"id": other, "parent": self.name}
        return own | {
            "object": "model",
            "created": self._began,
            "owned_by": "jaxllm",
            "max_model_len": self.ready().backend.max_len,
            "sampling": dict(self.ready().backend.sampling),
        }

    async def prepare(
        self,
        body: Any,
        kind: Callable[..., RequestHandler],
        prefix: str,
        record: dict[str, Any],
    ) -> RequestHandler:
        """Handler of a chat or text completion, whose jobs are checked and not yet admitted.

        Args:
            body: the request.
            kind: handler class.
            prefix: prefix of the response's id.
            record: log record of the request.

        Raises:
            ApiError: the engine is not ready, there is no such model, or a field is illegal.
        """
        dispatcher = self.ready()
        adapter, effort = self.check_model(body.model), self.efforts.get(body.model or "")
        record.update({} if adapter is None else {"adapter": adapter.name, "revision": adapter.number})
        record.update({} if effort is None else {"effort": body.model})
        record.update({name: getattr(body, name, None) for name in ("user", "safety_identifier", "stream")})
        head = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model or self.name,
        }
        # In a thread: rendering and tokenizing a long prompt would block the event loop.
        handler = await asyncio.to_thread(kind, dispatcher, body, head, record)
        handler.jobs = [dataclasses.replace(job, adapter=adapter, effort=effort) for job in handler.jobs]
        if effort is not None:
            dispatcher.check_effort(handler.jobs)
        if self.config.log_prompts:
            record["prompts"] = [dispatcher.backend.tokenizer.decode(job.prompt, specials=True) for job in handler.jobs]
        return handler

    async def answer(self, request: Request, body: Any, kind: Callable[..., RequestHandler], prefix: str) -> Response:
        """Response to a chat or text completion, streamed or whole; ``prefix`` is that of the response's id."""
        request.scope["jaxllm.request"] = body
        handler = await self.prepare(body, kind, prefix, request.scope["jaxllm.record"])
        release = self.ready().admit(sum(job.sequences for job in handler.jobs))
        if body.stream:
            return EventStream(handler.events(), self.config.write_seconds, release)
        try:
            return json_response(await cancel_on_disconnect(request.receive, handler.whole()))
        finally:
            release()


def create_app(
    config: ServeConfig, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[Any]] | None = None
) -> FastAPI:
    """Creates the server's ASGI application; ``app.state.service`` is its ``ApiService``."""
    app = FastAPI(
        title="jaxllm", version=importlib.metadata.version("jaxllm"), docs_url=None, redoc_url=None, lifespan=lifespan,
        redirect_slashes=False,
    )  # fmt: skip
    service = app.state.service = ApiService(config)
    _add_error_handlers(app)
    _add_inference_routes(app, service)
    add_batch_routes(app, service, add_response_routes(app, service))
    add_message_routes(app, service)
    add_scoring_routes(app, service)
    _add_status_routes(app, service)
    if config.adapter_dirs:
        add_adapter_routes(app, service)
    _add_page(app)
    app.add_middleware(RequestMiddleware, config=config)
    if config.otlp_traces_endpoint is not None:
        app.add_middleware(TracingMiddleware, provider=make_provider(config.otlp_traces_endpoint))
    if config.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=config.origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    _adjust_openapi(app, service)
    return app


def _add_inference_routes(app: FastAPI, service: ApiService) -> None:
    @app.post(
        "/v1/chat/completions", response_model=shapes.ChatCompletion, responses={**EVENT_STREAM, **_INFERENCE_ERRORS}
    )
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Chat completion: the assistant's next message of a conversation."""
        return await service.answer(request, body, ChatCompletionHandler, "chatcmpl")

    @app.post("/v1/completions", response_model=shapes.TextCompletion, responses={**EVENT_STREAM, **_INFERENCE_ERRORS})
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Text completion of one or several prompts."""
        return await service.answer(request, body, TextCompletionHandler, "cmpl")

    @app.post("/v1/embeddings", response_model=shapes.Embeddings, responses=_INFERENCE_ERRORS)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Embeddings of one or several texts."""
        dispatcher = service.ready()
        service.check_base(body.model)
        record, request.scope["jaxllm.request"] = request.scope["jaxllm.record"], body
        record["user"] = body.user
        prompts = await asyncio.to_thread(
            encode_prompts, dispatcher.backend.tokenizer, body.input, "input",
            add_special_tokens=body.add_special_tokens, parse_special=body.parse_special,
        )  # fmt: skip
        return json_response(await cancel_on_disconnect(request.receive, embed(dispatcher, body, prompts, record)))

    @app.post("/tokenize", response_model=shapes.Tokenized, responses=errors(404, 503))
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text or of a conversation."""
        backend = service.ready().backend
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages.", param="prompt")
        ids = await asyncio.to_thread(tokenize_request, service.ready().chat_format, body)
        out: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": backend.max_len}
        if body.return_token_strs:
            out["token_strs"] = [display_text(token_bytes(backend.tokenizer, token)) for token in ids]
        return json_response(out)

    @app.post("/detokenize", response_model=shapes.Detokenized, responses=errors(404, 503))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids; special tokens are written by name."""
        tokenizer = service.ready().backend.tokenizer
        service.check_model(body.model)
        try:
            return json_response({"prompt": tokenizer.decode(body.tokens, specials=True)})
        except ValueError as error:
            raise ApiError(400, str(error), param="tokens") from None


def _add_status_routes(app: FastAPI, service: ApiService) -> None:
    @app.get("/v1/models", response_model=shapes.ModelList, responses=errors(503))
    async def models() -> Response:
        """List of models: the one that this server serves, and its adapters and effort policies, whose parent it is."""
        host = service.ready().backend.adapter_host
        names = [] if host is None else host.adapters.names
        return json_response(
            {"object": "list", "data": [service.card(), *map(service.card, [*names, *service.efforts])]}
        )

    @app.get("/v1/models/{name:path}", response_model=shapes.ModelCard, responses=errors(404, 503))
    async def model(name: str) -> Response:
        """Model by name."""
        adapter = service.check_model(name)
        return json_response(service.card(name if adapter is not None or name in service.efforts else None))

    @app.get("/health", response_model=shapes.Status, responses=errors(503))
    async def health() -> Response:
        """Liveness check: 200 while the process runs and loading has not failed."""
        if service.failure is not None:
            raise ApiError(503, service.failure, code="failed")
        return json_response({"status": "ok"})

    @app.get("/ready", response_model=shapes.Readiness, responses={**errors(), 503: {"model": shapes.Readiness}})
    async def ready() -> Response:
        """Readiness check: 200 once the server answers requests and until it stops; says what it does meanwhile."""
        return service.readiness()

    @app.get("/version", response_model=shapes.Version, responses=errors())
    async def version() -> Response:
        """Versions of jaxllm and jax."""
        return json_response({"version": app.version, "jax": importlib.metadata.version("jax")})

    @app.get("/config", response_model=shapes.Settings, responses=errors(503))
    async def settings() -> Response:
        """Effective settings: sizes, dtypes, devices, bytes of weights and cache; no keys."""
        backend = service.ready().backend
        own = {**dataclasses.asdict(service.config), "name": service.name}
        own |= {name: len(own[name]) for name in ("api_keys", "admin_keys")}
        return json_response({"server": own, "backend": await asyncio.to_thread(backend.describe)})

    @app.get("/metrics", response_class=PlainTextResponse, responses=errors())
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain")


def _add_page(app: FastAPI) -> None:
    page = resources.files("jaxllm.serve").joinpath("page.html").read_text("utf-8")

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        """Chat page."""
        return HTMLResponse(page, headers={"Content-Security-Policy": _CONTENT_SECURITY_POLICY})


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error_response(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def not_legal(request: Request, error: RequestValidationError) -> Response:
        return error_response(validation_error(list(error.errors()), error.body), request.url.path)

    @app.exception_handler(HTTPException)
    async def not_there(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no path {request.url.path[:200]!r}."
        elif error.status_code == 400:
            message = (
                "the body cannot be read as JSON: it is nested too deeply, has too long a number, or is not UTF-8."
            )
        elif error.status_code == 405:
            message = f"{request.url.path[:200]} does not support the method {request.method[:20]}."
        return error_response(ApiError(error.status_code, message, headers=error.headers), request.url.path)

    @app.exception_handler(ClientDisconnected)
    async def gone(request: Request, error: ClientDisconnected) -> Response:
        return Response(status_code=499)  # nginx's status for a closed connection; nobody reads the response

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        message = "internal error; the server's log has the details."
        return error_response(ApiError(500, message, code="internal_error"), request.url.path)


def _adjust_openapi(app: FastAPI, service: ApiService) -> None:
    """Adjusts the OpenAPI schema: adds what is known of this model and server, removes FastAPI's own error schemas."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        schema = copy.deepcopy(generated())
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        shapes = schema["components"]["schemas"]
        for foreign in ("HTTPValidationError", "ValidationError"):
            shapes.pop(foreign, None)
        host = None if service.dispatcher is None else service.dispatcher.backend.adapter_host
        names = [service.name, *([] if host is None else host.adapters.names), *service.efforts]
        for request in ("EmbeddingRequest", "ScoreRequest", "RerankRequest", "PoolingRequest"):
            shapes[request]["properties"]["model"] = {"enum": [service.name]}
        for request in GENERATING:
            shapes[request]["properties"]["model"] = {"enum": names}
        if service.config.batch_dir is not None:
            shapes["Body_upload_file_v1_files_post"]["additionalProperties"] = False
        for request in ("TokenizeRequest", "DetokenizeRequest"):
            shapes[request]["properties"]["model"] = {"enum": [*names, None]}
        (name,) = schema["paths"]["/v1/models/{name}"]["get"]["parameters"]
        name["schema"] = {"enum": names}
        if service.dispatcher is not None:
            _bound_by_backend(shapes, service.dispatcher.backend)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def _bound_by_backend(shapes: dict[str, Any], backend: Backend) -> None:
    """Bounds of fields that the model and its engine set."""
    _bound_tokens(shapes, backend.tokenizer.vocab_size)
    shapes["MessageRequest"]["properties"]["max_tokens"]["maximum"] = backend.max_len - 1
    known = {("EmbeddingRequest", "dimensions"): [backend.embedding_dim, None]}
    if not backend.supports_priority:
        prioritised = (request for request in GENERATING if "priority" in shapes[request]["properties"])
        known |= {(request, "priority"): [0, None] for request in prioritised}
    for (request, field), values in known.items():
        described = shapes[request]["properties"][field]
        shapes[request]["properties"][field] = {"enum": values, "description": described["description"]}


def _bound_tokens(schema: Any, size: int) -> None:
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        if isinstance(part, dict) and part.get("format") == "token":
            part.pop("exclusiveMaximum", None)
            part["maximum"] = size - 1
        _bound_tokens(part, size)


__all__ = ["ApiService", "create_app"]
