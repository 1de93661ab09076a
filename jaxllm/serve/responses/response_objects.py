"""Response schemas of the Responses API, for the published OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from jaxllm.serve.api.response_schemas import ResponseModel, TokenLogprob

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(ResponseModel):
    """Generated text."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(ResponseModel):
    """Generated message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class OutputReasoningText(ResponseModel):
    """Generated reasoning text."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(ResponseModel):
    """Generated reasoning."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Any]
    content: list[OutputReasoningText]


class OutputFunctionCall(ResponseModel):
    """Generated function call."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class InputTokenDetails(ResponseModel):
    """Input tokens of a response: those of the prefix cache, and the others, which later requests may find there."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokenDetails(ResponseModel):
    """Output tokens of a response that are reasoning, exact to the tokens of one step."""

    reasoning_tokens: int


class ResponseTokenUsage(ResponseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokenDetails
    output_tokens: int
    output_tokens_details: OutputTokenDetails
    total_tokens: int


class IncompleteDetails(ResponseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseErrorDetail(ResponseModel):
    """Why a response has failed."""

    code: str
    message: str


class ResponseObject(ResponseModel):
    """Response of `POST /v1/responses` and of `GET /v1/responses/ID`."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseErrorDetail | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputMessage | OutputReasoning | OutputFunctionCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int | None
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseTokenUsage | None
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(ResponseModel):
    """Response of `DELETE /v1/responses/ID`."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(ResponseModel):
    """Response of `GET /v1/responses/ID/input_items`."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokenCount(ResponseModel):
    """Response of `POST /v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"]
    input_tokens: int
