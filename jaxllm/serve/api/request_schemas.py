"""Request schemas: every field that OpenAI publishes, honoured or refused by name, and extensions of this server."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from jaxllm.serve.api.request_fields import (
    WHOLE_NUMBER,
    Count,
    Name,
    RequestModel,
    Token,
    UnsupportedField,
)
from jaxllm.serve.api.sampling_fields import SamplingFields

_STORES = "nothing is stored here, so a completion could not be asked for again later"

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


def _needs(field: str, switch: str) -> dict[str, Any]:
    """JSON schema: ``field`` is null, or ``switch`` is true."""
    on = {"required": [switch], "properties": {switch: {"const": True}}}
    return {"anyOf": [{"properties": {field: {"type": "null"}}}, on]}


class TextFormat(RequestModel):
    """Response format: unconstrained text."""

    type: Literal["text"]


class JsonObject(RequestModel):
    """Response format: any JSON object."""

    type: Literal["json_object"]


class JsonSchema(RequestModel):
    """Named JSON schema. The generated text always validates, whatever ``strict`` says."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(RequestModel):
    """Response format: JSON that a schema validates."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class TextPart(RequestModel):
    """Text part of a message."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Annotated[Any, UnsupportedField("prefixes are found without marks")] = None


class Function(RequestModel):
    """Function and arguments (JSON) of a tool call."""

    name: Name
    arguments: Annotated[str, Field(json_schema_extra={"format": "json"})]


class ToolCall(RequestModel):
    """Tool call of an earlier assistant message."""

    id: Name
    type: Literal["function"]
    function: Function


Content = str | list[TextPart]


class SystemMessage(RequestModel):
    """System (or developer) message: instructions to the model."""

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(RequestModel):
    """User message."""

    role: Literal["user"]
    content: Content
    name: Name | None = None


class AssistantMessage(RequestModel):
    """Assistant message: an earlier answer of the model."""

    role: Literal["assistant"]
    content: Content | None = None
    name: Name | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    audio: Annotated[Any, UnsupportedField("this model writes text")] = None
    function_call: Annotated[Any, UnsupportedField("it was replaced by tool_calls")] = None


class ToolMessage(RequestModel):
    """Tool message: the result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Name


class FunctionDefinition(RequestModel):
    """Definition of a function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        default=None, description="JSON schema of the arguments, an object; by default there are no arguments."
    )
    strict: bool | None = Field(
        default=None,
        description="Hold the arguments to the schema. Forced calls always are.",
    )


class Tool(RequestModel):
    """Tool that the model may call: a function."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionReference(RequestModel):
    """Name of one of the given functions."""

    name: FunctionName


class NamedTool(RequestModel):
    """Tool choice: the function that must be called."""

    type: Literal["function"]
    function: FunctionReference


class AllowedSet(RequestModel):
    """Subset of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=128)]


class AllowedTools(RequestModel):
    """Tool choice: a subset of the tools in the prompt may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedSet


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class ChatRequest(SamplingFields):
    """Body of `POST /v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra={"allOf": [_needs("stream_options", "stream"), _needs("top_logprobs", "logprobs")]}
    )
    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE_NUMBER] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Extension: variables of the chat template, such as enable_thinking."
    )
    add_generation_prompt: bool | None = Field(
        default=None,
        description="Extension: end the prompt with the beginning of the assistant's turn; true by default.",
    )
    continue_final_message: bool | None = Field(
        default=None, description="Extension: the answer continues the last message, whose turn is left open."
    )
    audio: Annotated[Any, UnsupportedField("this model writes text")] = None
    modalities: Annotated[Any, UnsupportedField("this model writes text", ["text"])] = None
    function_call: Annotated[Any, UnsupportedField("it was replaced by tool_choice", "none")] = None
    functions: Annotated[Any, UnsupportedField("they were replaced by tools", [])] = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="True by default; false: at most one call.")
    response_format: Annotated[TextFormat | JsonObject | JsonSchemaFormat, Field(discriminator="type")] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = Field(
        default=None, description="No effect: OpenAI finds stored completions by it."
    )
    store: Annotated[Any, UnsupportedField(_STORES, False)] = None
    moderation: Annotated[Any, UnsupportedField("nothing is moderated here")] = None
    prediction: Annotated[Any, UnsupportedField("predicted outputs are not used here")] = None
    prompt_cache_key: Annotated[Any, UnsupportedField("prefixes are found without a key; see cache_salt")] = None
    prompt_cache_options: Annotated[Any, UnsupportedField("prefixes are kept while there is room")] = None
    prompt_cache_retention: Annotated[Any, UnsupportedField("prefixes are kept while there is room", "in_memory")] = (
        None
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None,
        description="For the chat template, as reasoning_effort, or as enable_thinking (false for none and minimal); "
        "no effect where it reads neither.",
    )
    verbosity: Annotated[Any, UnsupportedField("models here have no such setting")] = None
    web_search_options: Annotated[Any, UnsupportedField("nothing is searched here")] = None
    service_tier: Annotated[Any, UnsupportedField("there is one tier", "auto", "default")] = None
    safety_identifier: Name | None = Field(default=None, description="Written to the log.")


Ids = Annotated[list[Token], Field(min_length=1)]
Prompts = str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]


class CompletionRequest(SamplingFields):
    """Body of `POST /v1/completions`."""

    model_config = ConfigDict(json_schema_extra={"allOf": [_needs("stream_options", "stream")]})
    prompt: Prompts | None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE_NUMBER] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE_NUMBER] | None = Field(
        default=None, description="16 by default."
    )
    best_of: Annotated[int, Field(ge=1, le=20), WHOLE_NUMBER] | None = None
    suffix: Annotated[Any, UnsupportedField("this model does not fill in the middle", "")] = None


class EmbeddingRequest(RequestModel):
    """Body of `POST /v1/embeddings`."""

    model: Name
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    add_special_tokens: bool | None = Field(default=None, description="Extension: true by default.")
    parse_special: bool | None = Field(default=None, description="Extension: true by default.")
    dimensions: Count | None = Field(default=None, description="Must be the model's own dimension.")
    user: Name | None = Field(default=None, description="Written to the log.")
    pooling: Literal["mean", "last"] | None = Field(
        default=None, description="Extension: mean of the hidden states of all tokens (default), or the last token's."
    )


_EITHER: list[Any] = [
    {"required": [given], "properties": {given: {"type": kind}, other: {"type": "null"}}}
    for given, kind, other in (("prompt", "string", "messages"), ("messages", "array", "prompt"))
]


class LoadAdapterRequest(RequestModel):
    """Body of `POST /v1/load_lora_adapter`: a directory in PEFT's format, which gets a name."""

    lora_name: Annotated[str, Field(min_length=1, max_length=200)]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class AdapterNameRequest(RequestModel):
    """Body of `POST /v1/unload_lora_adapter` and `POST /v1/rollback_lora_adapter`."""

    lora_name: Annotated[str, Field(min_length=1, max_length=200)]


class TokenizeRequest(RequestModel):
    """Body of `POST /tokenize`: a text, or a conversation."""

    model_config = ConfigDict(json_schema_extra={"oneOf": _EITHER})

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = Field(default=None, description="True by default for a prompt, not a chat.")
    parse_special: bool | None = Field(default=None, description="True by default for a prompt, not a chat.")
    add_generation_prompt: bool | None = Field(default=None, description="True by default; for messages.")
    continue_final_message: bool | None = Field(default=None, description="For messages.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="For messages.")
    tools: Annotated[list[Tool], Field(max_length=128)] | None = Field(default=None, description="For messages.")
    return_token_strs: bool | None = Field(default=None, description="The response has the text of each token too.")


class DetokenizeRequest(RequestModel):
    """Body of `POST /detokenize`."""

    model: Name | None = None
    tokens: list[Token]
