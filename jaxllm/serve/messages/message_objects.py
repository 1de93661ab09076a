"""Response schemas of Anthropic's Messages API, for the published OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from jaxllm.serve.api.response_schemas import ResponseModel


class AnthropicErrorDetail(ResponseModel):
    """Type and message of an error."""

    type: str
    message: str


class AnthropicError(ResponseModel):
    """Error response of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: None


class GeneratedText(ResponseModel):
    """Generated text."""

    type: Literal["text"]
    text: str
    citations: None


class GeneratedThinking(ResponseModel):
    """Generated reasoning; it is not signed."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class GeneratedToolUse(ResponseModel):
    """Generated tool call; its input is empty where max_tokens has cut it."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(ResponseModel):
    """Token counts of a message: what the prompt's tokens beside those of the prefix cache were, and the answer's."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: None


class GeneratedMessage(ResponseModel):
    """Response of `POST /v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[GeneratedText | GeneratedThinking | GeneratedToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(ResponseModel):
    """Response of `POST /v1/messages/count_tokens`."""

    input_tokens: int
