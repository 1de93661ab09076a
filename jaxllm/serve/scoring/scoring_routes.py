"""Scoring routes: `/score`, `/rerank`, `/pooling` and `/classify`, as vLLM, Jina and Cohere have them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from jaxllm.files import DataError
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.api.event_stream import cancel_on_disconnect
from jaxllm.serve.api.prompt_encoding import encode_prompts, remaining_tokens
from jaxllm.serve.api.route_support import RequestService, errors, json_response
from jaxllm.serve.generation import RequestDispatcher
from jaxllm.serve.scoring.scoring_schemas import (
    Classes,
    Pooled,
    PoolingRequest,
    RerankDocument,
    Reranking,
    RerankRequest,
    ScoreRequest,
    Scores,
)
from jaxllm.serve.scoring.text_scorer import Scored, TextCache, TextScorer, sigmoid

_REFUSAL = (
    "this model generates text: it has no reward head, and the server was not told that it is an embedding model; "
    "start it with --pooling mean or last if it is one, or use /v1/embeddings."
)
_LABEL = "LABEL_0"
"""Name of a reward model's only class, as transformers names classes without names."""


def add_scoring_routes(app: FastAPI, service: RequestService) -> None:
    """Adds the routes to an application."""
    refusals = errors(404, 429, 503)

    def begin(body: Any, request: Request) -> tuple[RequestDispatcher, TextScorer]:
        """(dispatcher, scorer) of a request.

        Raises:
            ApiError: the server is not ready, there is no such model, or it has no scores.
        """
        dispatcher = service.ready()
        service.check_base(body.model)
        request.scope["jaxllm.record"]["user"] = body.user
        if dispatcher.backend.scorer is None:
            raise ApiError(400, _REFUSAL, param="model", code="no_scores")
        return dispatcher, dispatcher.backend.scorer

    async def of_pairs(body: Any, request: Request, pairs: list[tuple[str, str]], param: str) -> list[Scored]:
        dispatcher, scorer = begin(body, request)
        known: TextCache = {}
        return await _run(dispatcher, request, [(lambda a=a, b=b: scorer.pair(a, b, known)) for a, b in pairs], param)

    async def of_texts(body: PoolingRequest, request: Request) -> list[Scored]:
        dispatcher, scorer = begin(body, request)
        prompts = await asyncio.to_thread(encode_prompts, dispatcher.backend.tokenizer, body.input, "input")
        dispatcher.check_prompt_count(prompts, "input")
        for ids in prompts:
            remaining_tokens(dispatcher.backend, ids, "input")
        return await _run(dispatcher, request, [(lambda ids=ids: scorer.text(ids)) for ids in prompts], "input")

    @app.post("/v1/score", response_model=Scores, responses=refusals, include_in_schema=False)
    @app.post("/score", response_model=Scores, responses=refusals)
    async def score(body: ScoreRequest, request: Request) -> Response:
        """Scores of pairs of texts: cosines of an embedding model, probabilities of a reward model."""
        first, second = ([one] if isinstance(one, str) else one for one in (body.text_1, body.text_2))
        first = first * len(second) if len(first) == 1 else first
        second = second * len(first) if len(second) == 1 else second
        if len(first) != len(second):
            message = f"text_1 has {len(first)} texts and text_2 {len(second)}; give one, or as many as the other has."
            raise ApiError(400, message, param="text_1")
        found = await of_pairs(body, request, list(zip(first, second, strict=True)), "text_2")
        data = [{"index": i, "object": "score", "score": float(one.values[0])} for i, one in enumerate(found)]
        return json_response({**_head("score", body.model), "data": data, "usage": _usage(found, request)})

    @app.post("/v2/rerank", response_model=Reranking, responses=refusals, include_in_schema=False)
    @app.post("/v1/rerank", response_model=Reranking, responses=refusals, include_in_schema=False)
    @app.post("/rerank", response_model=Reranking, responses=refusals)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Documents by their relevance to a query, the most relevant first."""
        texts = [one.text if isinstance(one, RerankDocument) else one for one in body.documents]
        found = await of_pairs(body, request, [(body.query, text) for text in texts], "documents")
        values = [float(one.values[0]) for one in found]
        order = sorted(range(len(values)), key=lambda i: (-values[i], i))[: body.top_n]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": values[i]} for i in order]
        if body.return_documents is not False:
            results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
        head = {name: value for name, value in _head("rerank", body.model).items() if name in ("id", "model")}
        return json_response({**head, "results": results, "usage": _usage(found, request)})

    @app.post("/pooling", response_model=Pooled, responses=refusals)
    async def pooling(body: PoolingRequest, request: Request) -> Response:
        """Pooled outputs of texts: embeddings, or rewards at the last token."""
        found = await of_texts(body, request)
        data = [{"index": i, "object": "pooling", "data": one.values.tolist()} for i, one in enumerate(found)]
        return json_response({**_head("pool", body.model), "data": data, "usage": _usage(found, request)})

    @app.post("/classify", response_model=Classes, responses=refusals)
    async def classify(body: PoolingRequest, request: Request) -> Response:
        """Classes of texts, of a model with a classification head: a reward model has one class."""
        if begin(body, request)[1].kind != "reward":
            message = "this is an embedding model, which has no classes; use /pooling or /v1/embeddings."
            raise ApiError(400, message, param="model", code="no_scores")
        found = await of_texts(body, request)
        data = [
            {"index": i, "label": _LABEL, "probs": sigmoid(one.values).tolist(), "num_classes": 1}
            for i, one in enumerate(found)
        ]
        return json_response({**_head("classify", body.model), "data": data, "usage": _usage(found, request)})


async def _run(
    dispatcher: RequestDispatcher, request: Request, calls: list[Callable[[], Scored]], param: str
) -> list[Scored]:
    """Results of calls that block, one after another in threads; the client's leaving ends them.

    Raises:
        ApiError: a text cannot be read, or the queue is full.
    """

    async def work() -> list[Scored]:
        try:
            return [await asyncio.to_thread(call) for call in calls]
        except DataError as error:
            raise ApiError(400, str(error), param=param) from None

    release = dispatcher.admit(1)
    try:
        return await cancel_on_disconnect(request.receive, work())
    finally:
        release()


def _head(prefix: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": "list", "created": int(time.time()), "model": model}


def _usage(found: list[Scored], request: Request) -> dict[str, int]:
    total = request.scope["jaxllm.record"]["prompt_tokens"] = sum(one.tokens for one in found)
    return {"prompt_tokens": total, "total_tokens": total}
