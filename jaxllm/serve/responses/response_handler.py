"""Responses of OpenAI's Responses API, `POST /v1/responses`: whole or streamed as numbered events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from jaxllm.serve.api.chat_completions import ChatCompletionHandler
from jaxllm.serve.api.errors import ApiError, dumps
from jaxllm.serve.api.prompt_encoding import with_model_sampling
from jaxllm.serve.generation import GenerationJob, RequestDispatcher
from jaxllm.serve.responses.response_items import OutputItems, ResponseEvent
from jaxllm.serve.responses.response_requests import ResponseRequest
from jaxllm.serve.responses.response_store import Item, ResponseStore, StoredResponse
from jaxllm.serve.responses.response_translation import chat_request, input_items, too_long, turns


class ResponseHandler:
    """Handler of one request of the Responses API, over a chat completion.

    Args:
        dispatcher: access to the engine.
        body: the request.
        head: id, time and model of the response.
        record: log record of the request.
        store: where the response is kept, and earlier ones are.

    Raises:
        ApiError: a field is illegal, the conversation is too long, or there is no such previous response.
    """

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        body: ResponseRequest,
        head: dict[str, Any],
        record: dict[str, Any],
        *,
        store: ResponseStore,
    ):
        self._body, self._head, self._store = body, head, store
        self._owner, self._id = str(record.get("key", "")), head["id"].replace("-", "_")
        self._inputs = input_items(body)
        self._context = (*earlier_items(store, body.previous_response_id, self._owner), *self._inputs)
        self._chat = _fitted(dispatcher, body, self._context, head, record)
        self._output = OutputItems()
        self._reasoning_tokens = 0

    @property
    def jobs(self) -> list[GenerationJob]:
        """The prompt and its sampling parameters."""
        return self._chat.jobs

    @jobs.setter
    def jobs(self, jobs: list[GenerationJob]) -> None:
        self._chat.jobs = jobs

    async def whole(self) -> dict[str, Any]:
        """Response body of a request that is not streamed."""
        body: dict[str, Any] = {}
        async for one in self._events():
            body = one.get("response", body)
        return body

    async def events(self) -> AsyncGenerator[str, None]:
        """Server-sent events of a streamed request, numbered; an error is the event ``response.failed``."""
        number = 0
        try:
            async for one in self._events():
                yield _event(one, number)
                number += 1
        except ApiError as error:
            failure = {"code": "server_error", "message": error.message}
            yield _event({"type": "response.failed", "response": self._response("failed", failure)}, number)

    async def _events(self) -> AsyncGenerator[ResponseEvent, None]:
        for kind in ("created", "in_progress"):
            yield {"type": f"response.{kind}", "response": self._response("in_progress")}
        scores: list[Any] = []
        status = "completed"
        async for deltas, finish, output in self._chat.deltas():
            status = "incomplete" if finish == "length" else "completed"
            scores += self._chat.logprobs_of(output)
            if any("reasoning_content" in delta for delta in deltas):
                self._reasoning_tokens += len(output.tokens)
            for delta in deltas:
                taken = scores if delta.get("content") else []
                for one in self._output.add(delta, taken):
                    yield one
                scores = [] if taken else scores
        if not self._output.items:  # the model has ended at once
            for one in self._output.begin_message():
                yield one
        for one in self._output.end(status):
            yield one
        body = self._response(status)
        if self._body.store is not False:
            context = (*self._context, *self._output.items)
            self._store.put(self._id, StoredResponse(body, self._inputs, context, self._owner))
        yield {"type": f"response.{status}", "response": body}

    def _response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Response object in its current state."""
        body, ended = self._body, status != "in_progress"
        form = None if body.text is None else body.text.format
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._head["model"],
            "output": list(self._output.items) if ended else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"} if form is None else _dumped(form)},
            "tool_choice": _choice(body),
            "tools": [{"strict": None, "parameters": None, **_dumped(tool)} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self._usage() if status in ("completed", "incomplete") else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._chat.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {
                "cached_tokens": usage.cached,
                "cache_write_tokens": usage.prompt - usage.cached,
            },
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": min(self._reasoning_tokens, usage.completion)},
            "total_tokens": usage.prompt + usage.completion,
        }


def earlier_items(store: ResponseStore, previous: str | None, owner: str) -> tuple[Item, ...]:
    """Items of the conversation up to a previous response; none without one.

    Raises:
        ApiError: 404; there is no such response.
    """
    return () if previous is None else store.get(previous, owner, "previous_response_id").context


def _fitted(
    dispatcher: RequestDispatcher,
    body: ResponseRequest,
    items: tuple[Item, ...],
    head: dict[str, Any],
    record: dict[str, Any],
) -> ChatCompletionHandler:
    """Chat completion of a conversation; with truncation, of as many of its last turns as fit into the context.

    Raises:
        ApiError: it does not fit, a field is illegal, or the engine would refuse it.
    """

    def handler(begin: int) -> ChatCompletionHandler:
        chat = chat_request(body, items[begin:])
        try:
            return ChatCompletionHandler(
                dispatcher, with_model_sampling(chat, dispatcher.backend.sampling), head, record
            )
        except ApiError as error:
            error.param = "input" if error.param == "messages" else error.param
            raise

    try:
        return handler(0)
    except ApiError as error:
        starts = turns(items)[1:]
        if body.truncation != "auto" or not too_long(error) or not starts:
            raise
    found, low, high = handler(starts[-1]), 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            found, high = handler(starts[middle]), middle
        except ApiError as error:
            if not too_long(error):
                raise
            low = middle + 1
    return found


def _choice(body: ResponseRequest) -> Any:
    choice = body.tool_choice
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else _dumped(choice)


def _dumped(model: Any) -> dict[str, Any]:
    return model.model_dump(exclude_none=True, by_alias=True)


def _event(value: ResponseEvent, number: int) -> str:
    """Text of one server-sent event, with its type as its name."""
    return f"event: {value['type']}\ndata: {dumps({**value, 'sequence_number': number})}\n\n"
