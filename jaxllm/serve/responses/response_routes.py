"""Routes of the Responses API: create, retrieve and delete responses, their input items, and token counts."""

from __future__ import annotations

import asyncio
import functools
from typing import Annotated, Literal

from fastapi import FastAPI, Path, Query, Request
from starlette.responses import Response

from jaxllm.serve.api.chat_completions import chat_prompt
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.api.route_support import EVENT_STREAM, RequestService, errors, json_response
from jaxllm.serve.responses.response_handler import ResponseHandler, earlier_items
from jaxllm.serve.responses.response_objects import DeletedResponse, InputItemList, InputTokenCount, ResponseObject
from jaxllm.serve.responses.response_requests import InputTokensRequest, ResponseRequest
from jaxllm.serve.responses.response_store import ResponseStore
from jaxllm.serve.responses.response_translation import chat_request, input_items
from jaxllm.serve.tools.tool_choice import resolve_tool_choice

ResponseId = Annotated[str, Path(pattern=r"^resp_[0-9a-f]{24}$")]


def add_response_routes(app: FastAPI, service: RequestService) -> ResponseStore:
    """Adds the routes to an application; returns the store of their responses."""
    store = ResponseStore(service.config.stored_responses, service.config.stored_bytes)
    handler = functools.partial(ResponseHandler, store=store)

    def owner(request: Request) -> str:
        return str(request.scope["jaxllm.record"].get("key", ""))

    @app.post("/v1/responses", response_model=ResponseObject, responses={**EVENT_STREAM, **errors(404, 408, 429, 503)})
    async def create_response(body: ResponseRequest, request: Request) -> Response:
        """Response: the model's answer to an input, as output items."""
        return await service.answer(request, body, handler, "resp")

    @app.post("/v1/responses/input_tokens", response_model=InputTokenCount, responses=errors(404, 503))
    async def count_input_tokens(body: InputTokensRequest, request: Request) -> Response:
        """Number of tokens of an input, its instructions and tools."""
        service.check_model(body.model)
        dispatcher = service.ready()

        def count() -> int:
            items = (*earlier_items(store, body.previous_response_id, owner(request)), *input_items(body))
            chat = chat_request(body, items)
            choice = resolve_tool_choice(chat, dispatcher.chat_format)
            return len(chat_prompt(dispatcher.chat_format, chat, choice)[1])

        return json_response({"object": "response.input_tokens", "input_tokens": await asyncio.to_thread(count)})

    @app.get("/v1/responses/{response_id}", response_model=ResponseObject, responses=errors(404))
    async def retrieve_response(
        response_id: ResponseId, request: Request, stream: Annotated[Literal["false"] | None, Query()] = None
    ) -> Response:
        """Stored response; it cannot be streamed again."""
        return json_response(store.get(response_id, owner(request)).body)

    @app.delete("/v1/responses/{response_id}", response_model=DeletedResponse, responses=errors(404))
    async def delete_response(response_id: ResponseId, request: Request) -> Response:
        """Deletes a stored response; later ones keep their conversation."""
        store.delete(response_id, owner(request))
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.get("/v1/responses/{response_id}/input_items", response_model=InputItemList, responses=errors(404))
    async def list_input_items(
        response_id: ResponseId,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str | None, Query(max_length=128)] = None,
    ) -> Response:
        """Input items of a stored response's own request, newest first by default."""
        items = list(store.get(response_id, owner(request)).inputs)
        items = items if order == "asc" else items[::-1]
        if after is not None:
            names = [item["id"] for item in items]
            if after not in names:
                raise ApiError(400, f"there is no item {after[:100]!r} in this response's input.", param="after")
            items = items[names.index(after) + 1 :]
        page = items[:limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return json_response({"object": "list", "data": page, **ends, "has_more": len(items) > limit})

    return store
