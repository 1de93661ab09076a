"""The shapes of answers, for the published schema; a test holds answers to it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ResponseModel(BaseModel):
    """A part of an answer."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(ResponseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseModel):
    """A refusal."""

    error: ErrorDetail


class UsageCounts(ResponseModel):
    """Tokens read and made."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TopLogprob(ResponseModel):
    """One of the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token that was made."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """Of an answer."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(ResponseModel):
    """A function and its arguments, JSON."""

    name: str
    arguments: str


class AnswerCall(ResponseModel):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(ResponseModel):
    """What the model said; ``reasoning_content`` of models that mark their thoughts, ``tool_calls`` where it calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[AnswerCall] = []


class ChatChoice(ResponseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(ResponseModel):
    """Answers to a conversation."""

    id: str
    created: int
    model: str
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageCounts


class TextLogprobs(ResponseModel):
    """Of a text, token by token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(ResponseModel):
    """One continuation."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]


class TextCompletion(ResponseModel):
    """Continuations of texts."""

    id: str
    created: int
    model: str
    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: UsageCounts


class ModelCard(ResponseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(ResponseModel):
    """All of them."""

    object: Literal["list"]
    data: list[ModelCard]


class EmbeddingObject(ResponseModel):
    """Of one text; base64 of little-endian float32 where asked for."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ResponseModel):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(ResponseModel):
    """Of all texts."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class Tokenized(ResponseModel):
    """Tokens of a text."""

    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(ResponseModel):
    """Text of tokens."""

    prompt: str


class Status(ResponseModel):
    """How the server is."""

    status: str


class Version(ResponseModel):
    """What it runs."""

    version: str
    jax: str


class Settings(ResponseModel):
    """What is in effect."""

    server: dict[str, Any]
    backend: dict[str, Any]
