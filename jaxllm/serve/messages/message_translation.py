"""Translation of Anthropic's requests into chat completions: messages, tools, reasoning and sampling fields."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from jaxllm.serve.api.errors import ApiError, validation_error
from jaxllm.serve.api.reasoning_switch import reasoning_off, require_reasoning
from jaxllm.serve.api.request_schemas import ChatRequest
from jaxllm.serve.messages.message_requests import (
    AssistantTurn,
    ConversationFields,
    MessageRequest,
    TextBlock,
    ToolResultBlock,
    UserTurn,
)
from jaxllm.serve.tools.tool_choice import ChatFormat

CALL_PREFIX = "toolu_"
"""Prefix of tool-call ids in this API; chat templates read the id without it."""


def chat_request(body: ConversationFields, chat_format: ChatFormat) -> ChatRequest:
    """Chat-completion request that does what a request of the Messages API asks for.

    Where the last message is the assistant's, the answer continues it.

    Raises:
        ApiError: a field is not supported by this model, or the conversation ends with a call.
    """
    fields: dict[str, Any] = {"model": body.model, "messages": _messages(body)}
    if isinstance(body.messages[-1], AssistantTurn):
        if "tool_calls" in fields["messages"][-1]:
            message = "the last message calls tools; end with their results."
            raise ApiError(400, message, param=f"messages[{len(body.messages) - 1}]")
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        fields |= {"tools": [_tool(tool) for tool in body.tools], **_tool_choice(body)}
    elif body.tool_choice is not None and body.tool_choice.type not in ("auto", "none"):
        raise ApiError(400, "tool_choice requires a call, but tools is empty.", param="tool_choice")
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    variables: dict[str, Any] = {}
    if body.thinking is not None and body.thinking.type == "disabled":
        variables = reasoning_off(chat_format, "thinking")
    elif body.thinking is not None:
        require_reasoning(chat_format, "thinking")
    if isinstance(body, MessageRequest):
        variables |= body.chat_template_kwargs or {}
        fields |= _sampling(body)
    if variables:
        fields["chat_template_kwargs"] = variables
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise validation_error(list(error.errors()), fields) from None


def _sampling(body: MessageRequest) -> dict[str, Any]:
    same = ("stream", "temperature", "top_k", "top_p", "seed", "ignore_eos", "priority", "cache_salt")
    fields = {name: getattr(body, name) for name in same}
    fields |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences or None}
    return {**fields, "user": None if body.metadata is None else body.metadata.user_id}


def _messages(body: ConversationFields) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    if body.system is not None:
        out.append({"role": "system", "content": _text(body.system)})
    for turn in body.messages:
        if isinstance(turn, UserTurn):
            out += _user(turn)
        elif isinstance(turn, AssistantTurn):
            out.append(_assistant(turn))
        else:
            out.append({"role": "system", "content": _text(turn.content)})
    return out


def _user(turn: UserTurn) -> list[dict[str, Any]]:
    """Messages of a user's turn: its tool results, and its text."""
    if isinstance(turn.content, str):
        return [{"role": "user", "content": turn.content}]
    out = [_result(block) for block in turn.content if isinstance(block, ToolResultBlock)]
    texts = [block for block in turn.content if isinstance(block, TextBlock)]
    return [*out, {"role": "user", "content": _text(texts)}] if texts else out


def _result(block: ToolResultBlock) -> dict[str, Any]:
    text = _text(block.content or "")
    return {
        "role": "tool",
        "content": f"Error: {text}" if block.is_error else text,
        "tool_call_id": block.tool_use_id.removeprefix(CALL_PREFIX),
    }


def _assistant(turn: AssistantTurn) -> dict[str, Any]:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    out: dict[str, Any] = {"role": "assistant"}
    texts, thoughts, calls = list[TextBlock](), list[str](), list[dict[str, Any]]()
    for block in turn.content:
        if block.type == "text":
            texts.append(block)
        elif block.type == "thinking":
            thoughts.append(block.thinking)
        else:
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"id": block.id.removeprefix(CALL_PREFIX), "type": "function", "function": function})
    out |= {"content": _text(texts)} if texts or not calls else {}
    out |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return out | ({"tool_calls": calls} if calls else {})


def _text(content: str | Iterable[TextBlock]) -> str:
    """Text of blocks, which are paragraphs."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _tool(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _tool_choice(body: ConversationFields) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return {}
    if choice.type == "none":
        return {"tool_choice": "none"}
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return {"tool_choice": "required" if choice.type == "any" else "auto", **parallel}
