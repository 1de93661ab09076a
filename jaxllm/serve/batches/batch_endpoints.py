"""Routes that a batch can call: each validates a line's body and answers it whole, without HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from jaxllm.serve.api.chat_completions import ChatCompletionHandler
from jaxllm.serve.api.embeddings import embed
from jaxllm.serve.api.errors import ApiError, validation_error
from jaxllm.serve.api.prompt_encoding import encode_prompts
from jaxllm.serve.api.request_schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from jaxllm.serve.api.route_support import RequestHandler, RequestService
from jaxllm.serve.api.text_completions import TextCompletionHandler
from jaxllm.serve.batches.batch_slots import BatchSlots
from jaxllm.serve.responses.response_handler import ResponseHandler
from jaxllm.serve.responses.response_requests import ResponseRequest
from jaxllm.serve.responses.response_store import ResponseStore

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
"""Routes that can be in a batch."""
PRIORITY = -120
"""Priority of lines without one, where the policy honours priorities: an hour of waiting makes up for it."""


class BatchEndpoints:
    """Answers requests of batches.

    Args:
        service: state of the server.
        store: store of responses.
    """

    def __init__(self, service: RequestService, store: ResponseStore):
        self._service = service
        self._kinds: dict[str, tuple[type, Callable[..., RequestHandler], str]] = {
            "/v1/chat/completions": (ChatRequest, ChatCompletionHandler, "chatcmpl"),
            "/v1/completions": (CompletionRequest, TextCompletionHandler, "cmpl"),
            "/v1/responses": (ResponseRequest, functools.partial(ResponseHandler, store=store), "resp"),
        }

    async def answer(self, url: str, body: dict[str, Any], slots: BatchSlots, record: dict[str, Any]) -> dict[str, Any]:
        """Response body of a request.

        Args:
            url: one of ``ENDPOINTS``.
            body: the request, not yet validated.
            slots: slots of the engine that batches may use.
            record: log record of the request.

        Raises:
            ApiError: the response would have an error status.
        """
        if url == "/v1/embeddings":
            return await self._embed(_validated(EmbeddingRequest, body), slots, record)
        schema, kind, prefix = self._kinds[url]
        request = _validated(schema, body)
        if request.stream:
            raise ApiError(400, "a batch has no streams; leave the field out.", param="stream")
        handler = await self._service.prepare(request, kind, prefix, record)
        if request.priority is None and self._service.ready().backend.supports_priority:
            handler.jobs = [
                dataclasses.replace(job, service=dataclasses.replace(job.service, priority=PRIORITY))
                for job in handler.jobs
            ]
        async with slots.taken(sum(job.sequences for job in handler.jobs)):
            return await handler.whole()

    async def _embed(self, body: Any, slots: BatchSlots, record: dict[str, Any]) -> dict[str, Any]:
        dispatcher = self._service.ready()
        self._service.check_base(body.model)
        prompts = await asyncio.to_thread(
            encode_prompts, dispatcher.backend.tokenizer, body.input, "input",
            add_special_tokens=body.add_special_tokens, parse_special=body.parse_special,
        )  # fmt: skip
        async with slots.taken(1):
            return await embed(dispatcher, body, prompts, record)


def _validated(schema: Any, body: dict[str, Any]) -> Any:
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        raise validation_error(list(error.errors()), body) from None
