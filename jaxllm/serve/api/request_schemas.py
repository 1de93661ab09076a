"""What clients may ask: every field that OpenAI publishes, honoured or refused by name, and some of our own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxllm.serve.api.request_fields import (
    WHOLE_NUMBER,
    Count,
    Fraction,
    Name,
    Penalty,
    RequestModel,
    Seed,
    Stop,
    Temperature,
    Token,
    UnsupportedField,
)

_STORES = "nothing is stored here"

TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
GrammarText = Annotated[str, Field(min_length=1, max_length=100_000)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class StreamOptions(RequestModel):
    """Of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, UnsupportedField("chunks are not padded", False)] = None


class StructuredOutputs(RequestModel):
    """The form of a text, one of these; not OpenAI's."""

    json_: dict[str, Any] | None = Field(default=None, alias="json")
    regex: GrammarText | None = None
    choice: Annotated[list[Stop], Field(min_length=1, max_length=256)] | None = None
    grammar: GrammarText | None = None


class TextFormat(RequestModel):
    """Any text."""

    type: Literal["text"]


class JsonObject(RequestModel):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchema(RequestModel):
    """A schema with a name; it is held to strictly, whatever ``strict`` says."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(RequestModel):
    """JSON that a schema validates."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class SamplingFields(RequestModel):
    """What chat and completions share."""

    model: Name
    n: Annotated[int, Field(ge=1, le=128), WHOLE_NUMBER] | None = None
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=1024)] | None = None
    user: Name | None = Field(default=None, description="Written to the log.")
    # Not OpenAI's:
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE_NUMBER] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE_NUMBER] | None = None
    bad_words: Annotated[list[Stop], Field(max_length=64)] | None = None
    allowed_token_ids: Annotated[list[Token], Field(min_length=1, max_length=4096)] | None = None
    include_stop_str_in_output: bool | None = None
    beams: Annotated[int, Field(ge=1, le=16), WHOLE_NUMBER] | None = None
    length_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    structured_outputs: StructuredOutputs | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31), WHOLE_NUMBER] | None = Field(
        default=None, description="Higher goes first, 0 by default; of servers with that policy."
    )
    cache_salt: Name | None = Field(
        default=None, description="What was computed is shared only with requests of the same."
    )


class TextPart(RequestModel):
    """Text of a message."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Annotated[Any, UnsupportedField("prefixes are found without marks")] = None


class Function(RequestModel):
    """A call that the model made."""

    name: Name
    arguments: str


class ToolCall(RequestModel):
    """A call that the model made, with its number."""

    id: Name
    type: Literal["function"]
    function: Function


Content = str | list[TextPart]


class SystemMessage(RequestModel):
    """How the model is to behave."""

    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(RequestModel):
    """What a person says."""

    role: Literal["user"]
    content: Content
    name: Name | None = None


class AssistantMessage(RequestModel):
    """What the model said."""

    role: Literal["assistant"]
    content: Content | None = None
    name: Name | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    audio: Annotated[Any, UnsupportedField("this model writes text")] = None
    function_call: Annotated[Any, UnsupportedField("it was replaced by tool_calls")] = None


class ToolMessage(RequestModel):
    """What a tool gave back."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Name


class FunctionDefinition(RequestModel):
    """What the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        default=None, description="A JSON schema of an object; none: no arguments."
    )
    strict: bool | None = Field(
        default=None,
        description="Arguments keep to the schema; of calls that are forced they do whatever this says.",
    )


class Tool(RequestModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionReference(RequestModel):
    """One of the functions."""

    name: FunctionName


class NamedTool(RequestModel):
    """The function that is to be called."""

    type: Literal["function"]
    function: FunctionReference


class AllowedSet(RequestModel):
    """Functions, and whether one must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=128)]


class AllowedTools(RequestModel):
    """The functions that may be called, of all that the model is told of."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedSet


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE_NUMBER] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Not OpenAI's: variables of the chat template, such as enable_thinking."
    )
    add_generation_prompt: bool | None = Field(default=None, description="Not OpenAI's: the template's; true.")
    audio: Annotated[Any, UnsupportedField("this model writes text")] = None
    modalities: Annotated[Any, UnsupportedField("this model writes text", ["text"])] = None
    function_call: Annotated[Any, UnsupportedField("it was replaced by tool_choice", "none")] = None
    functions: Annotated[Any, UnsupportedField("they were replaced by tools", [])] = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="True by default; false: one call at most.")
    response_format: Annotated[TextFormat | JsonObject | JsonSchemaFormat, Field(discriminator="type")] | None = None
    metadata: Annotated[Any, UnsupportedField(_STORES, {})] = None
    store: Annotated[Any, UnsupportedField(_STORES, False)] = None
    moderation: Annotated[Any, UnsupportedField("nothing is moderated here")] = None
    prediction: Annotated[Any, UnsupportedField("predicted outputs are not used here")] = None
    prompt_cache_key: Annotated[Any, UnsupportedField("prefixes are found without a key; see cache_salt")] = None
    prompt_cache_options: Annotated[Any, UnsupportedField("prefixes are kept while there is room")] = None
    prompt_cache_retention: Annotated[Any, UnsupportedField("prefixes are kept while there is room", "in_memory")] = (
        None
    )
    reasoning_effort: Annotated[
        Any, UnsupportedField("see chat_template_kwargs for what the model's template knows")
    ] = None
    verbosity: Annotated[Any, UnsupportedField("models here have no such setting")] = None
    web_search_options: Annotated[Any, UnsupportedField("nothing is searched here")] = None
    service_tier: Annotated[Any, UnsupportedField("there is one tier", "auto", "default")] = None
    safety_identifier: Name | None = Field(default=None, description="Written to the log.")


Ids = Annotated[list[Token], Field(min_length=1)]
Prompts = str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: Prompts | None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE_NUMBER] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE_NUMBER] | None = Field(
        default=None, description="16 by default."
    )
    best_of: Annotated[int, Field(ge=1, le=20), WHOLE_NUMBER] | None = None
    suffix: Annotated[Any, UnsupportedField("this model writes on from a prompt only", "")] = None


class EmbeddingRequest(RequestModel):
    """`POST /v1/embeddings`."""

    model: Name
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = Field(default=None, description="The model's own number; it has no other.")
    user: Name | None = Field(default=None, description="Written to the log.")
    pooling: Literal["mean", "last"] | None = Field(
        default=None, description="Not OpenAI's: the mean of all tokens' states, the default, or the last token's."
    )


class TokenizeRequest(RequestModel):
    """`POST /tokenize`: of a text, or of a conversation."""

    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(RequestModel):
    """`POST /detokenize`."""

    model: Name | None = None
    tokens: list[Token]
