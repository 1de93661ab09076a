"""Request schemas of the Responses API: every published field, honoured or refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from jaxllm.serve.api.request_fields import (
    WHOLE_NUMBER,
    Count,
    Fraction,
    Name,
    RequestModel,
    Seed,
    Temperature,
    UnsupportedField,
)
from jaxllm.serve.api.request_schemas import FunctionName, JsonObject, TextFormat

_HOSTED = "tools run in the client here"
_PREFIXES = "prefixes are kept while there is room"
ItemId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(RequestModel):
    """Text part of an input."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Annotated[Any, UnsupportedField("prefixes are found without marks")] = None


class OutputTextPart(RequestModel):
    """Text part of an earlier answer. Its log-probabilities are not read."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[Any, UnsupportedField("nothing is cited here", [])] = None
    logprobs: list[Any] | None = None


class RefusalPart(RequestModel):
    """Refusal in an earlier answer of another model."""

    type: Literal["refusal"]
    refusal: str


class MessageItem(RequestModel):
    """Message of the conversation: its role, and its text or text parts."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Annotated[InputText | OutputTextPart | RefusalPart, Field(discriminator="type")]]
    id: ItemId | None = None
    status: ItemStatus | None = None
    phase: Annotated[Any, UnsupportedField("models here write one kind of message", "final_answer")] = None


class FunctionCallItem(RequestModel):
    """Function call of an earlier answer."""

    type: Literal["function_call"]
    call_id: ItemId
    name: FunctionName
    arguments: Annotated[str, Field(json_schema_extra={"format": "json"})]
    id: ItemId | None = None
    status: ItemStatus | None = None
    caller: Annotated[Any, UnsupportedField(_HOSTED, {"type": "direct"})] = None
    namespace: Annotated[Any, UnsupportedField("functions have one namespace")] = None
    async_: Annotated[Any, UnsupportedField("calls are answered in order", False)] = Field(default=None, alias="async")


class FunctionOutputItem(RequestModel):
    """Result of a function call."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: str | list[InputText]
    id: ItemId | None = None
    status: ItemStatus | None = None
    name: Annotated[Any, UnsupportedField("call_id names the call")] = None
    caller: Annotated[Any, UnsupportedField(_HOSTED, {"type": "direct"})] = None
    namespace: Annotated[Any, UnsupportedField("functions have one namespace")] = None


class SummaryText(RequestModel):
    """Summary of reasoning, of another model."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(RequestModel):
    """Reasoning text of an earlier answer."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(RequestModel):
    """Reasoning of an earlier answer; the chat template decides whether the model sees it again."""

    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: list[SummaryText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    status: ItemStatus | None = None
    encrypted_content: Annotated[Any, UnsupportedField("reasoning is not encrypted here")] = None


def _kind(value: Any) -> str:
    """Type of an input item; that of a message may be absent."""
    found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "message" if found is None else str(found)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionTool(RequestModel):
    """Function that the model may call and the client runs."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        default=None, json_schema_extra={"properties": {"type": {"const": "object"}}}
    )
    strict: bool | None = Field(default=None, description="Hold the arguments to the schema. Forced calls always are.")
    defer_loading: Annotated[Any, UnsupportedField(_HOSTED, False)] = None
    allowed_callers: Annotated[Any, UnsupportedField(_HOSTED, ["direct"])] = None
    async_: Annotated[Any, UnsupportedField("calls are answered in order", False)] = Field(default=None, alias="async")
    output_schema: Annotated[Any, UnsupportedField("results are not checked")] = None


class FunctionChoice(RequestModel):
    """Tool choice: the function that must be called."""

    type: Literal["function"]
    name: FunctionName


class AllowedChoice(RequestModel):
    """Tool choice: a subset of the tools in the prompt may, or must, be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, max_length=128)]


class SchemaFormat(RequestModel):
    """Text format: JSON that a schema validates, whatever ``strict`` says."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(RequestModel):
    """Format of the answer's text."""

    format: Annotated[TextFormat | JsonObject | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[Any, UnsupportedField("models here have no such setting", "medium")] = None


class ReasoningConfig(RequestModel):
    """Reasoning effort, as ``reasoning_effort`` of a chat completion."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Annotated[Any, UnsupportedField("reasoning is returned as it was generated")] = None
    generate_summary: Annotated[Any, UnsupportedField("reasoning is returned as it was generated")] = None
    context: Annotated[Any, UnsupportedField("the chat template decides what reasoning is read again", "auto")] = None
    mode: Annotated[Any, UnsupportedField("an effort policy has a model name of its own", "standard")] = None


class ResponseStreamOptions(RequestModel):
    """Options of a streamed response."""

    include_obfuscation: Annotated[Any, UnsupportedField("events are not padded", False)] = None


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class ResponseInputs(RequestModel):
    """Fields that say what the model reads, which `/v1/responses` and `/v1/responses/input_tokens` share."""

    model: Name
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="True by default; false: at most one call.")
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None,
        description="auto: the oldest turns are left out where the conversation does not fit; disabled by default.",
    )
    conversation: Annotated[Any, UnsupportedField("conversations have no names; see previous_response_id")] = None


class InputTokensRequest(ResponseInputs):
    """Body of `POST /v1/responses/input_tokens`."""

    personality: Annotated[Any, UnsupportedField("write it into the instructions")] = None


class ResponseRequest(ResponseInputs):
    """Body of `POST /v1/responses`."""

    max_output_tokens: Count | None = Field(default=None, description="As many as fit into the context by default.")
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE_NUMBER] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(default=None, description="Keep the response for previous_response_id; true by default.")
    metadata: Metadata | None = None
    user: Name | None = Field(default=None, description="Written to the log.")
    safety_identifier: Name | None = Field(default=None, description="Written to the log.")
    prompt_cache_key: Name | None = Field(
        default=None, description="Prefixes are found by their tokens, with any key; see cache_salt to keep them apart."
    )
    access_programs: Annotated[Any, UnsupportedField("all may use the server's models")] = None
    background: Annotated[Any, UnsupportedField("see /v1/batches", False)] = None
    background_options: Annotated[Any, UnsupportedField("see /v1/batches")] = None
    context_management: Annotated[Any, UnsupportedField("see truncation", [])] = None
    image: Annotated[Any, UnsupportedField("models here write text")] = None
    max_tool_calls: Annotated[Any, UnsupportedField("it counts calls of hosted tools, of which there are none")] = None
    moderation: Annotated[Any, UnsupportedField("nothing is moderated here")] = None
    prompt: Annotated[Any, UnsupportedField("prompts are not stored here")] = None
    prompt_cache_options: Annotated[Any, UnsupportedField(_PREFIXES)] = None
    prompt_cache_retention: Annotated[Any, UnsupportedField(_PREFIXES, "in_memory")] = None
    service_tier: Annotated[Any, UnsupportedField("there is one tier", "auto", "default")] = None
    # Extensions of OpenAI's API:
    seed: Seed | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE_NUMBER] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
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
