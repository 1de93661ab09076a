"""Messages of Anthropic's API, `POST /v1/messages`: whole or streamed as events of content blocks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from jaxllm.infer.engine.stream_output import OutputDelta
from jaxllm.serve.api.chat_completions import ChatCompletionHandler
from jaxllm.serve.api.errors import ANTHROPIC_PATH, ApiError, dumps
from jaxllm.serve.api.prompt_encoding import with_model_sampling
from jaxllm.serve.generation import GenerationJob, RequestDispatcher
from jaxllm.serve.messages.message_requests import MessageRequest
from jaxllm.serve.messages.message_translation import CALL_PREFIX, chat_request
from jaxllm.serve.tools.output_parser import Delta


class MessageHandler:
    """Handler of one request of the Messages API, over a chat completion.

    Args:
        dispatcher: access to the engine.
        body: the request.
        head: id and model of the response.
        record: log record of the request.

    Raises:
        ApiError: a field is illegal or the prompt is too long.
    """

    def __init__(
        self, dispatcher: RequestDispatcher, body: MessageRequest, head: dict[str, Any], record: dict[str, Any]
    ):
        chat = with_model_sampling(chat_request(body, dispatcher.chat_format), dispatcher.backend.sampling)
        self._chat = ChatCompletionHandler(dispatcher, chat, head, record)
        self._id, self._model = head["id"].replace("-", "_"), head["model"]
        self._content: list[dict[str, Any]] = []
        self._arguments = ""

    @property
    def jobs(self) -> list[GenerationJob]:
        """The prompt and its sampling parameters."""
        return self._chat.jobs

    @jobs.setter
    def jobs(self, jobs: list[GenerationJob]) -> None:
        self._chat.jobs = jobs

    async def whole(self) -> dict[str, Any]:
        """Response body of a request that is not streamed."""
        async for one in self._events():
            if one["type"] == "message_delta":
                return self._message(one["delta"]["stop_reason"], one["delta"]["stop_sequence"])
        raise AssertionError("a completion always ends")

    async def events(self) -> AsyncGenerator[str, None]:
        """Server-sent events of a streamed request; an error is an event of the type ``error``."""
        try:
            async for one in self._events():
                yield _event(one)
        except ApiError as error:
            yield _event(error.body_for(ANTHROPIC_PATH))

    async def _events(self) -> AsyncGenerator[dict[str, Any], None]:
        yield {"type": "message_start", "message": self._message(None, None)}
        async for deltas, finish, output in self._chat.deltas():
            for delta in deltas:
                for one in self._blocks(delta):
                    yield one
            if finish is not None:
                if self._content:
                    yield self._end_block()
                reason, sequence = _stop_reason(finish, output)
                yield {
                    "type": "message_delta",
                    "delta": {"stop_reason": reason, "stop_sequence": sequence},
                    "usage": self._usage(),
                }
        yield {"type": "message_stop"}

    def _blocks(self, delta: Delta) -> list[dict[str, Any]]:
        """Events of a message delta: another kind of text, or another call, begins a new block."""
        out = []
        if thought := delta.get("reasoning_content"):
            out += self._begin("thinking", {"thinking": "", "signature": ""})
            self._content[-1]["thinking"] += thought
            out.append(self._delta({"type": "thinking_delta", "thinking": thought}))
        if text := delta.get("content"):
            out += self._begin("text", {"text": "", "citations": None})
            self._content[-1]["text"] += text
            out.append(self._delta({"type": "text_delta", "text": text}))
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                block = {"id": CALL_PREFIX + call["id"], "name": function["name"], "input": {}}
                out += self._begin("tool_use", block, anew=True)
                self._arguments = ""
            if function["arguments"]:
                self._arguments += function["arguments"]
                out.append(self._delta({"type": "input_json_delta", "partial_json": function["arguments"]}))
        return out

    def _begin(self, kind: str, fields: dict[str, Any], anew: bool = False) -> list[dict[str, Any]]:
        if self._content and self._content[-1]["type"] == kind and not anew:
            return []
        out = [self._end_block()] if self._content else []
        self._content.append({"type": kind, **fields})
        return [*out, {"type": "content_block_start", "index": len(self._content) - 1, "content_block": {
            "type": kind, **fields
        }}]  # fmt: skip

    def _end_block(self) -> dict[str, Any]:
        if self._content[-1]["type"] == "tool_use":
            self._content[-1]["input"] = _parsed(self._arguments)
        return {"type": "content_block_stop", "index": len(self._content) - 1}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _message(self, reason: str | None, sequence: str | None) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._model}
        content = [{**block} for block in self._content]
        return {
            **head, "content": content, "stop_reason": reason, "stop_sequence": sequence, "usage": self._usage()
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        """Token counts so far; the prompt's tokens of the prefix cache are known at the end."""
        usage = self._chat.usage
        prompt = usage.prompt or sum(len(job.prompt) for job in self.jobs)
        cached = usage.cached
        return {
            "input_tokens": prompt - cached,
            "output_tokens": usage.completion,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": None,
        }


def _stop_reason(finish: str, output: OutputDelta) -> tuple[str, str | None]:
    """Anthropic's (stop_reason, stop_sequence) of a finish reason."""
    if output.stop is not None:
        return "stop_sequence", output.stop
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(finish, "end_turn"), None


def _parsed(arguments: str) -> dict[str, Any]:
    """Arguments of a call; empty where the end of the completion has cut them."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _event(value: dict[str, Any]) -> str:
    """Text of one server-sent event, with its type as its name."""
    return f"event: {value['type']}\ndata: {dumps(value)}\n\n"
