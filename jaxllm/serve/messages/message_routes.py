"""Routes of Anthropic's Messages API: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request
from starlette.responses import Response

from jaxllm.serve.api.chat_completions import chat_prompt
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.api.route_support import EVENT_STREAM, RequestService, errors, json_response
from jaxllm.serve.generation import RequestDispatcher
from jaxllm.serve.messages.message_handler import MessageHandler
from jaxllm.serve.messages.message_objects import AnthropicError, GeneratedMessage, TokenCount
from jaxllm.serve.messages.message_requests import ConversationFields, CountTokensRequest, MessageRequest
from jaxllm.serve.messages.message_translation import chat_request
from jaxllm.serve.tools.tool_choice import resolve_tool_choice

VERSIONS = ("2023-06-01", "2026-10-21")
"""Legal values of the header ``anthropic-version``."""


def add_message_routes(app: FastAPI, service: RequestService) -> None:
    """Adds the routes to an application."""
    refusals = errors(404, 408, 429, 503, model=AnthropicError)

    @app.post("/v1/messages", response_model=GeneratedMessage, responses={**EVENT_STREAM, **refusals})
    async def messages(body: MessageRequest, request: Request) -> Response:
        """Message: the assistant's next turn of a conversation, in Anthropic's format."""
        _check_version(request)
        return await service.answer(request, body, MessageHandler, "msg")

    @app.post("/v1/messages/count_tokens", response_model=TokenCount, responses=errors(404, 503, model=AnthropicError))
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        """Number of tokens of a conversation, its system prompt and tools."""
        _check_version(request)
        service.check_model(body.model)
        return json_response({"input_tokens": await asyncio.to_thread(_count, service.ready(), body)})


def _check_version(request: Request) -> None:
    """Checks the header ``anthropic-version``, which may be absent.

    Raises:
        ApiError: it names another version.
    """
    given = request.headers.get("anthropic-version", VERSIONS[0])
    if given not in VERSIONS:
        raise ApiError(400, f"anthropic-version: {given[:50]!r} is not supported; give {' or '.join(VERSIONS)}.")


def _count(dispatcher: RequestDispatcher, body: ConversationFields) -> int:
    chat = chat_request(body, dispatcher.chat_format)
    choice = resolve_tool_choice(chat, dispatcher.chat_format)
    return len(chat_prompt(dispatcher.chat_format, chat, choice)[1])
