"""From what a client wrote to tokens, and from its fields to the engine's parameters."""

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


def encode_text(tokenizer: Tokenizer, text: str | None, *, begin: bool = True) -> list[int]:
    """Tokens of a prompt, which begins as the model's documents do.

    Raises:
        ApiError: the text is empty, and nothing begins a document.
    """
    try:
        ids = [int(i) for i in tokenizer.encode(text or "", bos=begin and tokenizer.adds_bos)]
    except DataError as error:
        raise ApiError(400, str(error), param="prompt") from None
    if not ids and begin and tokenizer.start_id is not None:
        ids = [tokenizer.start_id]
    return ids


def encode_prompts(tokenizer: Tokenizer, given: Any, param: str) -> list[list[int]]:
    """Tokens of one prompt or of several, which are texts or tokens already.

    Raises:
        ApiError: one is empty, or has a token that there is not.
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
        raise ApiError(400, "a text is empty, and this tokenizer has no token to begin one with.", param=param)
    if wrong := [token for ids in found for token in ids if token >= tokenizer.vocab_size]:
        raise ApiError(400, f"there is no token {wrong[0]}; there are {tokenizer.vocab_size}.", param=param)
    return found


def render_chat(
    chat_format: ChatFormat,
    messages: Sequence[Any],
    *,
    variables: Mapping[str, Any] | None = None,
    tools: list[dict[str, Any]] | None = None,
    begins: bool = True,
) -> str:
    """A conversation as the model reads it, up to where its answer begins.

    Raises:
        ApiError: the model has no template, or the template refuses the conversation.
    """
    if (template := chat_format.backend.template) is None:
        raise ApiError(
            400, "this model has no chat template, so it was not trained to converse; use /v1/completions.",
            param="messages",
        )  # fmt: skip
    if taken := [name for name in variables or {} if name in RESERVED_VARIABLES]:
        raise ApiError(
            400, f"chat_template_kwargs has {taken[0]!r}, which has a field of its own.", param="chat_template_kwargs"
        )
    try:
        return template.render(
            chat_format.messages([template_message(m) for m in messages], tools),
            tools if chat_format.knows_tools else None,
            add_generation_prompt=begins,
            **(variables or {}),
        )
    except DataError as error:
        raise ApiError(400, str(error), param="messages") from None


def encode_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of what ``render_chat`` gives.

    Raises:
        ApiError: there are none, or it cannot be spelt.
    """
    try:
        ids = [int(i) for i in tokenizer.encode(text, specials=True)]
    except DataError as error:
        raise ApiError(400, str(error), param="messages") from None
    if not ids:
        raise ApiError(400, "the template makes an empty prompt of this conversation.", param="messages")
    return ids


def template_message(message: Any) -> dict[str, Any]:
    """A message as templates read it: one text, arguments as an object; developers speak as the system."""
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
            raise ApiError(400, f"the arguments of the call {call['id']!r} are not JSON.", param="messages") from None
    return out


def sampling_params(body: SamplingFields, max_tokens: int, **fields: Any) -> SamplingParams:
    """The engine's parameters of a request.

    Raises:
        ApiError: values that do not go together.
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
    """What a request is to get before others: its priority; whose it is, by the number of its key.

    Raises:
        ApiError: a priority, of a server that has none.
    """
    if body.priority and not backend.supports_priority:
        raise ApiError(
            400, "this server takes requests in another order than by priority; leave it out, or serve with "
            "--policy priority.", param="priority",
        )  # fmt: skip
    return Service(priority=body.priority or 0, key=str(record.get("key", "")))


def grammar_of(body: SamplingFields) -> Grammar | None:
    """The grammar that a request asks for.

    Raises:
        ApiError: several, or none where one is announced.
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
        raise ApiError(400, "response_format and structured_outputs ask for two forms.", param="structured_outputs")
    return forms[0] if forms else None


def remaining_tokens(backend: Backend, prompt: Sequence[int], param: str) -> int:
    """How many tokens may follow a prompt.

    Raises:
        ApiError: none.
    """
    if len(prompt) >= backend.max_len:
        raise ApiError(
            400,
            f"the prompt has {len(prompt)} tokens; this model's context has {backend.max_len}, answer included.",
            param=param,
            code="context_length_exceeded",
        )
    return backend.max_len - len(prompt)
