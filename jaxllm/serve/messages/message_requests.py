"""Request schemas of Anthropic's Messages API: every published field, honoured or refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from jaxllm.serve.api.request_fields import (
    WHOLE_NUMBER,
    Count,
    Fraction,
    Name,
    RequestModel,
    Seed,
    Stop,
    UnsupportedField,
)
from jaxllm.serve.api.request_schemas import FunctionName

_SERVER_TOOLS = "tools run in the client here"


class CacheControl(RequestModel):
    """Mark of a cached prefix. Prefixes are cached without marks, as long as there is room, so it changes nothing."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(RequestModel):
    """Text block of a message or of the system prompt."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[Any, UnsupportedField("documents are not cited here", [])] = None


class ThinkingBlock(RequestModel):
    """Reasoning of an earlier answer; the chat template decides whether the model sees it again."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[Any, UnsupportedField("reasoning is not signed here", "")] = None


class ToolUseBlock(RequestModel):
    """Tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
    name: FunctionName
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Annotated[Any, UnsupportedField(_SERVER_TOOLS, {"type": "direct"})] = None
    toolset_name: Annotated[Any, UnsupportedField(_SERVER_TOOLS)] = None


class ToolResultBlock(RequestModel):
    """Result of a tool call; with ``is_error`` the model reads it after the word "Error:"."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: Annotated[Any, UnsupportedField(_SERVER_TOOLS)] = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class UserTurn(RequestModel):
    """Turn of the user: text, and results of tool calls."""

    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(min_length=1)]


class AssistantTurn(RequestModel):
    """Turn of the assistant: an earlier answer of the model."""

    role: Literal["assistant"]
    content: str | list[AssistantBlock]


class SystemTurn(RequestModel):
    """Instructions within a conversation; the chat template decides whether they may stand there."""

    role: Literal["system"]
    content: str | list[TextBlock]


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Schema of a tool's input, which is an object."""
    if schema.get("type") != "object":
        raise ValueError('a tool\'s input is an object: give {"type": "object", "properties": ...}')
    return schema


class ClientTool(RequestModel):
    """Tool that the client runs: a name, a description and the JSON schema of its input."""

    name: FunctionName
    input_schema: Annotated[dict[str, Any], AfterValidator(_of_object)] = Field(
        json_schema_extra={"properties": {"type": {"const": "object"}}, "required": ["type"]}
    )
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = Field(default=None, description="Hold the input to the schema. Forced calls always are.")
    cache_control: CacheControl | None = None
    eager_input_streaming: Annotated[Any, UnsupportedField("input is streamed as soon as it is certain", False)] = None
    input_examples: Annotated[Any, UnsupportedField("write examples in the description", [])] = None
    defer_loading: Annotated[Any, UnsupportedField(_SERVER_TOOLS, False)] = None
    allowed_callers: Annotated[Any, UnsupportedField(_SERVER_TOOLS, ["direct"])] = None


class ToolChoiceMode(RequestModel):
    """Tool choice: the model decides (auto), or must call a tool (any)."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class ToolChoiceNone(RequestModel):
    """Tool choice: no call."""

    type: Literal["none"]


class ToolChoiceOne(RequestModel):
    """Tool choice: the tool that must be called."""

    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool | None = None


AnthropicToolChoice = Annotated[ToolChoiceMode | ToolChoiceNone | ToolChoiceOne, Field(discriminator="type")]


class ThinkingMode(RequestModel):
    """Reasoning: adaptive leaves it to the model; disabled needs a chat template with ``enable_thinking``."""

    type: Literal["adaptive", "disabled"]
    display: Annotated[Any, UnsupportedField("reasoning is returned as it was generated")] = None


class JsonOutput(RequestModel):
    """Output format: JSON that a schema validates."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    """Format of the answer."""

    format: JsonOutput | None = None
    effort: Annotated[Any, UnsupportedField("an effort policy has a model name of its own")] = None


class MessageMetadata(RequestModel):
    """Metadata of a request: the user's id is written to the log."""

    user_id: Name | None = None


class ConversationFields(RequestModel):
    """Fields that say what the model reads, which `/v1/messages` and `/v1/messages/count_tokens` share."""

    model: Name
    messages: Annotated[list[Turn], Field(min_length=1, max_length=100_000)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ClientTool], Field(max_length=128)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingMode | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Annotated[Any, UnsupportedField("there is one speed", "standard")] = None


class CountTokensRequest(ConversationFields):
    """Body of `POST /v1/messages/count_tokens`."""


class MessageRequest(ConversationFields):
    """Body of `POST /v1/messages`."""

    max_tokens: Count
    metadata: MessageMetadata | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE_NUMBER] | None = None
    top_p: Fraction | None = None
    service_tier: Annotated[Any, UnsupportedField("there is one tier", "auto", "standard_only")] = None
    container: Annotated[Any, UnsupportedField(_SERVER_TOOLS)] = None
    diagnostics: Annotated[Any, UnsupportedField("nothing is diagnosed here")] = None
    inference_geo: Annotated[Any, UnsupportedField("there is one place")] = None
    # Extensions of Anthropic's API, of whose version 2026-10-21 temperature, top_k and top_p are no longer part:
    seed: Seed | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE_NUMBER] | None = Field(
        default=None, description="Higher is scheduled first, 0 by default; needs --policy priority."
    )
    cache_salt: Name | None = Field(
        default=None, description="The prefix cache is shared only with requests of the same cache_salt."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables of the chat template, such as enable_thinking."
    )
