"""Response schemas of the published OpenAPI document; a test validates responses against them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ResponseModel(BaseModel):
    """Base of all response schemas: no unknown fields."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(ResponseModel):
    """Error: message, type, field at fault and machine-readable code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    """Error response."""

    error: ErrorDetail


class PromptTokenDetails(ResponseModel):
    """Tokens of the prompts that the prefix cache had."""

    cached_tokens: int


class UsageCounts(ResponseModel):
    """Token counts of a request: prompt and completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokenDetails


class PromptLogprob(ResponseModel):
    """Log-probability of a token at a position of the prompt, its rank (1: the likeliest) and its text."""

    logprob: float
    rank: int
    decoded_token: str


class TopLogprob(ResponseModel):
    """One of the most likely tokens and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """Generated token, its log-probability, and the most likely alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """Log-probabilities of a chat completion."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(ResponseModel):
    """Function and arguments (JSON) of a generated tool call."""

    name: str
    arguments: str


class AnswerCall(ResponseModel):
    """Tool call that the model generated."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(ResponseModel):
    """Generated message; ``reasoning_content`` for models that mark their reasoning, ``tool_calls`` for calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnswerCall] = []


class ChatChoice(ResponseModel):
    """One completion of a chat."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None
    """Generated tokens, if ``return_token_ids`` asks for them."""


class ChatCompletion(ResponseModel):
    """Response of `POST /v1/chat/completions`."""

    id: str
    created: int
    model: str
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageCounts
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    """By token id, for each token of the prompt but the first, if requested."""


class TextLogprobs(ResponseModel):
    """Log-probabilities of a text completion, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(ResponseModel):
    """One completion of a text."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class TextCompletion(ResponseModel):
    """Response of `POST /v1/completions`."""

    id: str
    created: int
    model: str
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: UsageCounts


class ModelCard(ResponseModel):
    """Model of this server."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    sampling: dict[str, float] = {}
    """Extension: sampling parameters of requests that give none, from the model's ``generation_config.json``."""
    parent: str | None = None
    """Base of an adapter; absent for the base itself."""


class ModelList(ResponseModel):
    """Response of `GET /v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]


class EmbeddingObject(ResponseModel):
    """Embedding of one input: floats, or base64 of little-endian float32 if requested."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ResponseModel):
    """Token counts of an embedding request."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(ResponseModel):
    """Response of `POST /v1/embeddings`."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class Tokenized(ResponseModel):
    """Response of `POST /tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None
    """Text of each token, if ``return_token_strs`` asks for it."""


class Detokenized(ResponseModel):
    """Response of `POST /detokenize`."""

    prompt: str


class AdapterState(ResponseModel):
    """Response of the routes that load, unload and roll back adapters."""

    id: str
    object: Literal["adapter"]
    revision: int | None
    """Revision that the next requests get; null once the adapter is unloaded."""


class Status(ResponseModel):
    """Response of `GET /health`."""

    status: str


class Readiness(ResponseModel):
    """Response of `GET /ready`, with status 200 once the server answers requests, and 503 before and after."""

    status: Literal["loading", "compiling", "ready", "stopping", "failed"]
    """Stage of the server: it loads the model, compiles its first programs, answers requests, or stops."""
    programs_done: int
    """Compiled programs that are loaded; the others follow while requests are answered."""
    programs: int
    """Programs in all; 0 until the model is loaded."""
    error: ErrorDetail | None = None
    """Why requests are refused, with status 503."""


class Version(ResponseModel):
    """Response of `GET /version`."""

    version: str
    jax: str


class Settings(ResponseModel):
    """Response of `GET /config`: the effective settings."""

    server: dict[str, Any]
    backend: dict[str, Any]
