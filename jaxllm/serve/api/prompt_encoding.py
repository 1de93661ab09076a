"""Prompt encoding: token ids of prompts and conversations, and sampling parameters from request fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.files import DataError
from jaxllm.infer.engine.policies import Service
from jaxllm.infer.grammar import Grammar
from jaxllm.infer.sampling_params import SEEDS, SamplingParams
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.api.request_schemas import SamplingFields
from jaxllm.serve.backend import Backend
from jaxllm.serve.tools.tool_choice import ChatFormat
from jaxllm.text import Tokenizer

RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Chat-template variables that ``chat_template_kwargs`` must not set."""


def encode_text(tokenizer: Tokenizer, text: str | None, *, begin: bool = True) -> list[int]:
    """Token ids of a prompt; with ``begin``, preceded by the token that begins a document for this model.

    Raises:
        ApiError: the vocabulary cannot spell the text.
    """
    try:
        ids = [int(i) for i in tokenizer.encode(text or "", bos=begin and tokenizer.adds_bos)]
    except DataError as error:
        raise ApiError(400, str(error), param="prompt") from None
    if not ids and begin and tokenizer.start_id is not None:
        ids = [tokenizer.start_id]
    return ids


def encode_prompts(tokenizer: Tokenizer, given: Any, param: str) -> list[list[int]]:
    """Token ids of one or several prompts, each given as text or as token ids.

    Raises:
        ApiError: a prompt is empty, or a token id is outside the vocabulary; ``param`` is the field at fault.
    """
    if given is None or isinstance(given, str):
        found = [encode_text(tokenizer, given)]
    elif isinstance(given[0], str):
        found = [encode_text(tokenizer, text) for text in given]
    elif isinstance(given[0], int):
        found = [list(given)]
    else:
        found = [list(ids) for ids in given]
    if not all(found):
        raise ApiError(400, f"{param} is empty, and this tokenizer has no token that begins a text.", param=param)
    if wrong := [token for ids in found for token in ids if token >= tokenizer.vocab_size]:
        message = f"token id {wrong[0]} is outside the vocabulary of {tokenizer.vocab_size} tokens."
        raise ApiError(400, message, param=param)
    return found


def render_chat(
    chat_format: ChatFormat,
    messages: Sequence[Any],
    *,
    variables: Mapping[str, Any] | None = None,
    tools: list[dict[str, Any]] | None = None,
    generation_prompt: bool = True,
) -> str:
    """Renders a conversation with the chat template; with ``generation_prompt``, up to the assistant's turn.

    Raises:
        ApiError: the model has no chat template, or the template refuses the conversation.
    """
    if (template := chat_format.backend.template) is None:
        raise ApiError(
            400, "this model has no chat template; use /v1/completions.",
            param="messages",
        )  # fmt: skip
    if taken := [name for name in variables or {} if name in RESERVED_VARIABLES]:
        raise ApiError(
            400,
            f"chat_template_kwargs must not set {taken[0]!r}; use the request's fields.",
            param="chat_template_kwargs",
        )
    try:
        return template.render(
            chat_format.messages([template_message(m) for m in messages], tools),
            tools if chat_format.template_has_tools else None,
            add_generation_prompt=generation_prompt,
            **(variables or {}),
        )
    except DataError as error:
        raise ApiError(400, str(error), param="messages") from None


def encode_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a rendered conversation, in which names of special tokens are those tokens.

    Raises:
        ApiError: the vocabulary cannot spell the text, or there are no tokens.
    """
    try:
        ids = [int(i) for i in tokenizer.encode(text, specials=True)]
    except DataError as error:
        raise ApiError(400, str(error), param="messages") from None
    if not ids:
        raise ApiError(400, "the chat template renders an empty prompt for this conversation.", param="messages")
    return ids


def template_message(message: Any) -> dict[str, Any]:
    """Message in the form chat templates read: one text, tool-call arguments as an object, role developer as system."""
    out = message.model_dump(exclude_none=True)
    if out["role"] == "developer":
        out["role"] = "system"
    if isinstance(out.get("content"), list):
        out["content"] = "".join(part["text"] for part in out["content"])
    out.setdefault("content", "")
    for call in out.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            message_ = f"the arguments of the tool call {call['id']!r} are not JSON."
            raise ApiError(400, message_, param="messages") from None
    return out


def with_model_sampling(body: SamplingFields, sampling: Mapping[str, float]) -> Any:
    """The request with the model's sampling defaults in fields that it does not give; a beam search samples nothing."""
    if (body.beams or 1) > 1:
        return body
    return body.model_copy(update={k: value for k, value in sampling.items() if getattr(body, k) is None})


def sampling_params(body: SamplingFields, max_tokens: int, **fields: Any) -> SamplingParams:
    """Sampling parameters of the engine from a request's fields; ``fields`` override them.

    Raises:
        ApiError: a value is illegal, or values exclude each other.
    """
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    given: dict[str, Any] = {
        "n": body.n,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "seed": None if body.seed is None else body.seed % SEEDS,
        "stop": stop,
        "stop_ids": tuple(body.stop_token_ids or ()),
        "ignore_eos": body.ignore_eos,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "repetition_penalty": body.repetition_penalty,
        "logit_bias": None if body.logit_bias is None else {int(t): value for t, value in body.logit_bias.items()},
        "typical_p": body.typical_p,
        "min_tokens": body.min_tokens,
        "bad_words": None if body.bad_words is None else tuple(body.bad_words),
        "allowed_tokens": None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        "include_stop": body.include_stop_str_in_output,
        "beams": body.beams,
        "length_penalty": body.length_penalty,
        "grammar": grammar_of(body),
        **fields,
    }
    try:
        return SamplingParams(max_tokens=max_tokens, **{k: v for k, v in given.items() if v is not None})
    except ValueError as error:
        name = str(error).split(" ")[0]
        raise ApiError(400, str(error), param=name if name in given else None) from None


def scheduling_of(body: SamplingFields, backend: Backend, record: Mapping[str, Any]) -> Service:
    """Scheduling hints of a request: its priority, and the index of its API key.

    Raises:
        ApiError: a priority is given, and the scheduling policy ignores priorities.
    """
    if body.priority and not backend.supports_priority:
        raise ApiError(
            400, "this server does not schedule by priority; leave the field out, or serve with --policy priority.",
            param="priority",
        )  # fmt: skip
    return Service(priority=body.priority or 0, key=str(record.get("key", "")))


def grammar_of(body: SamplingFields) -> Grammar | None:
    """Grammar that a request's ``structured_outputs`` or ``response_format`` asks for; None for neither.

    Raises:
        ApiError: several grammars are given, or ``structured_outputs`` is empty.
    """
    forms = []
    if (asked := body.structured_outputs) is not None:
        made = {"json_": Grammar.json_schema, "regex": Grammar.regex, "choice": Grammar.choice, "grammar": Grammar.ebnf}
        forms = [make(value) for name, make in made.items() if (value := getattr(asked, name)) is not None]
        if len(forms) != 1:
            raise ApiError(400, "give one of json, regex, choice and grammar.", param="structured_outputs")
    given = getattr(body, "response_format", None)
    if given is not None and given.type != "text":
        schema = {"type": "object"} if given.type == "json_object" else given.json_schema.schema_ or {}
        forms.append(Grammar.json_schema(schema))
    if len(forms) > 1:
        message = "give one of response_format and structured_outputs."
        raise ApiError(400, message, param="structured_outputs")
    return forms[0] if forms else None


def remaining_tokens(backend: Backend, prompt: Sequence[int], param: str) -> int:
    """Number of tokens that can be generated after a prompt before the model's context is full.

    Raises:
        ApiError: the prompt fills the context (``context_length_exceeded``).
    """
    if len(prompt) >= backend.max_len:
        raise ApiError(
            400,
            f"the prompt has {len(prompt)} tokens; prompt and completion together have at most {backend.max_len}.",
            param=param,
            code="context_length_exceeded",
        )
    return backend.max_len - len(prompt)
