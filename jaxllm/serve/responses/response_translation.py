"""Translation of the Responses API into chat completions: items to messages, tools, text format and reasoning."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from jaxllm.serve.api.errors import ApiError, validation_error
from jaxllm.serve.api.request_schemas import ChatRequest
from jaxllm.serve.responses.response_requests import AllowedChoice, FunctionChoice, ResponseInputs, ResponseRequest
from jaxllm.serve.responses.response_store import Item

CALL_PREFIX = "call_"
"""Prefix of call ids in this API; chat templates read the id without it."""
_ID_PREFIX = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def new_id(kind: str) -> str:
    """New id of an item of a type."""
    return f"{_ID_PREFIX[kind]}_{secrets.token_hex(16)}"


def input_items(body: ResponseInputs) -> tuple[Item, ...]:
    """Input of a request as items, each with a type and an id; texts of messages are parts."""
    if isinstance(body.input, str):
        content = [{"type": "input_text", "text": body.input}]
        return ({"id": new_id("message"), "type": "message", "role": "user", "content": content},)
    return tuple(_item(one.model_dump(exclude_none=True, by_alias=True)) for one in body.input)


def _item(given: Item) -> Item:
    kind = given.setdefault("type", "message")
    given.setdefault("id", new_id(kind))
    if kind == "message" and isinstance(given["content"], str):
        part = "output_text" if given["role"] == "assistant" else "input_text"
        given["content"] = [{"type": part, "text": given["content"]}]
    if kind == "message" and given["role"] == "assistant":
        given.setdefault("status", "completed")
        for part in given["content"]:
            if part["type"] == "output_text":
                part |= {"annotations": [], "logprobs": part.get("logprobs", [])}
    return given


def chat_request(body: ResponseInputs, items: Sequence[Item]) -> ChatRequest:
    """Chat-completion request that does what a request of the Responses API asks for, over a conversation's items.

    Raises:
        ApiError: a field is not supported by this model.
    """
    messages = messages_of(items)
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    fields: dict[str, Any] = {"model": body.model, "messages": messages, **_tools(body)}
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if isinstance(body, ResponseRequest):
        fields |= {"chat_template_kwargs": body.chat_template_kwargs, **_sampling(body)}
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise validation_error(list(error.errors()), fields) from None


def _sampling(body: ResponseRequest) -> dict[str, Any]:
    same = ("stream", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "priority", "cache_salt", "user")
    fields = {name: getattr(body, name) for name in same}
    fields["max_completion_tokens"] = body.max_output_tokens
    if body.include or body.top_logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return fields


def _tools(body: ResponseInputs) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict")
    fields: dict[str, Any] = {"parallel_tool_calls": body.parallel_tool_calls}
    if body.tools:
        fields["tools"] = [
            {"type": "function", "function": {name: getattr(tool, name) for name in names}} for tool in body.tools
        ]
    choice = body.tool_choice
    if isinstance(choice, FunctionChoice):
        fields["tool_choice"] = _named(choice)
    elif isinstance(choice, AllowedChoice):
        allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
        fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    else:
        fields["tool_choice"] = choice
    form = None if body.text is None else body.text.format
    if form is not None and form.type == "json_schema":
        schema = {"name": form.name, "schema": form.schema_, "strict": form.strict, "description": form.description}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form is not None:
        fields["response_format"] = {"type": form.type}
    return fields


def _named(choice: FunctionChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Chat messages of items: reasoning, text and calls that follow each other are one message of the assistant."""
    out: list[dict[str, Any]] = []

    def answer(*taken: str) -> dict[str, Any]:
        """The assistant's message that goes on; a new one where the last has one of ``taken`` already."""
        if not out or out[-1]["role"] != "assistant" or any(name in out[-1] for name in taken):
            out.append({"role": "assistant"})
        return out[-1]

    for item in items:
        if item["type"] == "reasoning":
            parts = item.get("content") or item["summary"]
            answer("reasoning_content", "content", "tool_calls")["reasoning_content"] = _text(parts)
        elif item["type"] == "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            name = item["call_id"].removeprefix(CALL_PREFIX)
            calls = answer().setdefault("tool_calls", [])
            calls.append({"id": name, "type": "function", "function": call})
        elif item["type"] == "function_call_output":
            output, name = item["output"], item["call_id"].removeprefix(CALL_PREFIX)
            text = output if isinstance(output, str) else _text(output)
            out.append({"role": "tool", "content": text, "tool_call_id": name})
        elif item["role"] == "assistant":
            answer("content", "tool_calls")["content"] = _text(item["content"])
        else:
            out.append({"role": item["role"], "content": _text(item["content"])})
    for message in out:
        if message["role"] == "assistant" and "tool_calls" not in message:
            message.setdefault("content", "")
    return out


def _text(parts: Sequence[Item]) -> str:
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)


def turns(items: Sequence[Item]) -> list[int]:
    """Positions at which a conversation may begin: those of the user's messages, the first of which is always one."""
    starts = [i for i, item in enumerate(items) if item["type"] == "message" and item["role"] == "user"]
    return sorted({0, *starts})


def too_long(error: ApiError) -> bool:
    """Whether an error says that a conversation does not fit into the context."""
    return error.code == "context_length_exceeded"
