"""Prompt encoding: token ids of prompts and conversations, and sampling parameters from request fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.files import DataError
from jaxllm.infer.chunks.cached_chunks import DEFAULT_LEAD, DEFAULT_SHARE, CachedChunks, chunk_spans
from jaxllm.infer.llm import encode_prompt
from jaxllm.infer.sampling_params import SEEDS, SamplingParams
from jaxllm.infer.scheduling.policies import Service
from jaxllm.infer.scheduling.subtasks import DEFAULT_KEPT, Subtasks
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.api.request_schemas import ChatRequest, TokenizeRequest
from jaxllm.serve.api.sampling_fields import SamplingFields
from jaxllm.serve.backend import Backend
from jaxllm.serve.tools.tool_choice import ChatFormat
from jaxllm.text import Tokenizer
from jaxllm.text.chat_template.content_marks import ContentMarks

RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Chat-template variables that ``chat_template_kwargs`` must not set."""


def encode_text(
    tokenizer: Tokenizer, text: str | None, *, add_special_tokens: bool = True, parse_special: bool = True
) -> list[int]:
    """Token ids of a prompt, see ``LLM.ids``.

    Raises:
        ApiError: the vocabulary cannot spell the text.
    """
    try:
        return encode_prompt(tokenizer, text or "", add_special_tokens=add_special_tokens, parse_special=parse_special)
    except DataError as error:
        raise ApiError(400, str(error), param="prompt") from None


def encode_prompts(
    tokenizer: Tokenizer,
    given: Any,
    param: str,
    *,
    add_special_tokens: bool | None = None,
    parse_special: bool | None = None,
) -> list[list[int]]:
    """Token ids of one or several prompts, each given as text or as token ids.

    Args:
        tokenizer: tokenizer of the model.
        given: the prompts.
        param: request field that they come from.
        add_special_tokens: a text begins with the token that begins a document for this model; None: it does.
        parse_special: names of special tokens in a text are those tokens; None: they are.

    Raises:
        ApiError: a prompt is empty, or a token id is outside the vocabulary.
    """
    how = {"add_special_tokens": add_special_tokens is not False, "parse_special": parse_special is not False}
    if given is None or isinstance(given, str):
        found = [encode_text(tokenizer, given, **how)]
    elif isinstance(given[0], str):
        found = [encode_text(tokenizer, text, **how) for text in given]
    elif isinstance(given[0], int):
        found = [list(given)]
    else:
        found = [list(ids) for ids in given]
    if not all(found):
        why = "this tokenizer has no token that begins a text" if how["add_special_tokens"] else "none is added"
        raise ApiError(400, f"{param} is empty, and {why}.", param=param)
    if wrong := [token for ids in found for token in ids if token >= tokenizer.vocab_size]:
        message = f"token id {wrong[0]} is outside the vocabulary of {tokenizer.vocab_size} tokens."
        raise ApiError(400, message, param=param)
    return found


@dataclass(frozen=True)
class RenderedChat:
    """Conversation as rendered by the chat template.

    Attributes:
        marked: rendered text, in which characters of content may be marked.
        marks: the marks.
    """

    marked: str
    marks: ContentMarks

    @property
    def text(self) -> str:
        """Text of the prompt."""
        return self.marks.text(self.marked)


def render_chat(
    chat_format: ChatFormat,
    messages: Sequence[Any],
    *,
    variables: Mapping[str, Any] | None = None,
    tools: list[dict[str, Any]] | None = None,
    generation_prompt: bool = True,
    parse_special: bool = False,
    continue_final: bool = False,
) -> RenderedChat:
    """Renders a conversation with the chat template.

    Args:
        chat_format: chat format of the model.
        messages: the conversation.
        variables: further variables of the template.
        tools: functions that the prompt describes.
        generation_prompt: the text ends with the beginning of the assistant's turn.
        parse_special: names of control tokens in the messages are those tokens; otherwise they are text.
        continue_final: the text ends with the last message's, so that the answer continues it.

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
    chat = [template_message(m) for m in messages]
    if continue_final and not isinstance(chat[-1].get("content"), str):
        raise ApiError(400, "the last message has no text that could be continued.", param="continue_final_message")
    tokenizer = chat_format.backend.tokenizer
    try:
        marks = template.content_marks(tokenizer, chat, tools, variables, parse_special=parse_special)
    except DataError as error:
        raise ApiError(400, str(error), param="messages") from None
    try:
        chat, tools = marks.mark(chat), marks.mark(tools)
        if continue_final:
            chat[-1]["content"] = marks.left_open(chat[-1]["content"])
        marked = template.render(
            chat_format.messages(chat, tools),
            tools if chat_format.template_has_tools else None,
            add_generation_prompt=generation_prompt and not continue_final,
            **marks.mark(variables or {}),
        )
        return RenderedChat(marks.close(marked) if continue_final else marked, marks)
    except DataError as error:
        raise ApiError(400, marks.text(str(error)), param="messages") from None


def template_variables(body: ChatRequest, chat_format: ChatFormat) -> dict[str, Any]:
    """Chat-template variables of a request: ``chat_template_kwargs``, and what ``reasoning_effort`` stands for.

    A template that reads ``reasoning_effort`` gets it as it is; one that can only be told whether to reason
    (``enable_thinking``) is told not to for none and minimal. To other models the field makes no difference.
    """
    given = dict(body.chat_template_kwargs or {})
    if (effort := body.reasoning_effort) is None:
        return given
    if chat_format.template_reads("reasoning_effort"):
        return {"reasoning_effort": effort} | given
    if chat_format.template_reads("enable_thinking"):
        return {"enable_thinking": effort not in ("none", "minimal")} | given
    return given


def encode_chat(tokenizer: Tokenizer, rendered: RenderedChat, *, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a rendered conversation; the template's names of special tokens are those tokens.

    Args:
        tokenizer: tokenizer of the model.
        rendered: the conversation.
        add_special_tokens: put the token that begins a document for this model before those of the template.

    Raises:
        ApiError: the vocabulary cannot spell the text, or there are no tokens.
    """
    try:
        ids = rendered.marks.encode(tokenizer, rendered.marked)
    except DataError as error:
        raise ApiError(400, str(error), param="messages") from None
    if add_special_tokens and tokenizer.adds_bos and tokenizer.start_id is not None:
        ids = [tokenizer.start_id, *ids]
    if not ids:
        raise ApiError(400, "the chat template renders an empty prompt for this conversation.", param="messages")
    return ids


def tokenize_request(chat_format: ChatFormat, body: TokenizeRequest) -> list[int]:
    """Token ids of a text or a conversation, as the routes that generate encode it.

    Raises:
        ApiError: see ``render_chat`` and ``encode_chat``; or a field is for the other kind.
    """
    tokenizer = chat_format.backend.tokenizer
    if body.messages is None:
        names = ("continue_final_message", "chat_template_kwargs", "tools")
        if given := [name for name in names if getattr(body, name)]:
            raise ApiError(400, f"{given[0]} is for messages, not for a prompt.", param=given[0])
        return encode_text(
            tokenizer, body.prompt, add_special_tokens=body.add_special_tokens is not False,
            parse_special=body.parse_special is not False,
        )  # fmt: skip
    rendered = render_chat(
        chat_format, body.messages, variables=body.chat_template_kwargs,
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()] or None,
        generation_prompt=body.add_generation_prompt is not False, parse_special=body.parse_special is True,
        continue_final=body.continue_final_message is True,
    )  # fmt: skip
    return encode_chat(tokenizer, rendered, add_special_tokens=body.add_special_tokens is True)


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
            call["function"]["arguments"] = json.loads(call["function"]["arguments"].strip() or "{}")
        except (ValueError, RecursionError):
            message_ = f"the arguments of the tool call {call['id']!r} are not JSON."
            raise ApiError(400, message_, param="messages") from None
    return out


def special_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of all special tokens."""
    return tuple(sorted(tokenizer.special_names))


def with_model_sampling(body: SamplingFields, sampling: Mapping[str, float]) -> Any:
    """The request with the model's sampling defaults in fields that it does not give; a beam search samples nothing."""
    if (body.beams or 1) > 1:
        return body
    return body.model_copy(update={k: value for k, value in sampling.items() if getattr(body, k) is None})


def sampling_params(body: SamplingFields, tokenizer: Tokenizer, max_tokens: int, **fields: Any) -> SamplingParams:
    """Sampling parameters of the engine from a request's fields; ``fields`` override them.

    Raises:
        ApiError: a value is illegal, or values exclude each other.
    """
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    given: dict[str, Any] = {
        "n": body.n,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(0, body.top_k),
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
        "spelt": special_ids(tokenizer) if body.skip_special_tokens is False else None,
        "subtasks": _subtasks_of(body, tokenizer),
        **fields,
    }
    try:
        return SamplingParams(max_tokens=max_tokens, **{k: v for k, v in given.items() if v is not None})
    except ValueError as error:
        name = str(error).split(" ")[0]
        fields_of = {"cached_chunks": "cache_chunks", "subtasks": "subtask_markers"}
        known = fields_of.get(name, name if name in given else None)
        raise ApiError(400, str(error), param=known) from None


def cached_chunks_of(body: SamplingFields, tokenizer: Tokenizer, ids: list[int]) -> CachedChunks | None:
    """Cached chunks of a prompt; None: the request names none.

    Raises:
        ApiError: one is not in the prompt, or a share or a lead is given without chunks.
    """
    if body.cache_chunks is None:
        for name in ("cache_chunk_share", "cache_chunk_lead"):
            if getattr(body, name) is not None:
                raise ApiError(400, f"{name} is for cache_chunks; give those too.", param=name)
        return None
    try:
        spans = chunk_spans(ids, [tokenizer.encode(text).tolist() for text in body.cache_chunks])
    except ValueError as error:
        raise ApiError(400, str(error), param="cache_chunks") from None
    return CachedChunks(
        spans,
        DEFAULT_SHARE if body.cache_chunk_share is None else body.cache_chunk_share,
        DEFAULT_LEAD if body.cache_chunk_lead is None else body.cache_chunk_lead,
    )


def _subtasks_of(body: SamplingFields, tokenizer: Tokenizer) -> Subtasks | None:
    """Subtasks that leave the completion; None: the request names none.

    Raises:
        ApiError: the markers are not two different ones, or a number is given without them.
    """
    if body.subtask_markers is None:
        if body.subtasks_kept is not None:
            raise ApiError(400, "subtasks_kept is for subtask_markers; give those too.", param="subtasks_kept")
        return None
    start, end = body.subtask_markers
    try:
        return Subtasks.of_text(
            tokenizer, start, end, DEFAULT_KEPT if body.subtasks_kept is None else body.subtasks_kept
        )
    except ValueError as error:
        raise ApiError(400, str(error), param="subtask_markers") from None


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


def truncated(ids: list[int], body: SamplingFields, backend: Backend, max_tokens: int) -> list[int]:
    """The last ``truncate_prompt_tokens`` tokens of a prompt, or the first, by ``truncation_side``.

    The token that begins it is kept. -1 stands for as many as leave room for ``max_tokens`` in the context.

    Raises:
        ApiError: ``truncation_side`` without ``truncate_prompt_tokens``.
    """
    if (most := body.truncate_prompt_tokens) is None:
        if body.truncation_side is not None:
            raise ApiError(400, "truncation_side needs truncate_prompt_tokens.", param="truncation_side")
        return ids
    most = max(1, backend.max_len - max(1, max_tokens)) if most == -1 else most
    if len(ids) <= most:
        return ids
    if body.truncation_side == "right":
        return ids[:most]
    head = ids[:1] if backend.tokenizer.is_begun(ids) else []
    return head + ids[len(ids) - most + len(head) :]


def remaining_tokens(backend: Backend, prompt: Sequence[int], param: str) -> int:
    """Number of tokens that can be generated after a prompt before the model's context is full.

    Raises:
        ApiError: the prompt fills the context (``context_length_exceeded``).
    """
    if len(prompt) >= backend.max_len:
        raise ApiError(
            400,
            f"the prompt has {len(prompt)} tokens; prompt and completion together have at most {backend.max_len}. "
            "truncate_prompt_tokens = -1 keeps the last ones that fit.",
            param=param,
            code="context_length_exceeded",
        )
    return backend.max_len - len(prompt)
