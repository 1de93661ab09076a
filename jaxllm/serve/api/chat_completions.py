"""Chat completions, `POST /v1/chat/completions`: whole or streamed, with reasoning, tool calls and grammars."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from jaxllm.infer.engine.stream_output import OutputDelta
from jaxllm.infer.grammar import Grammar
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.api.event_stream import DONE, StreamUsage, check_streaming, event
from jaxllm.serve.api.guided_decoding import grammar_of
from jaxllm.serve.api.logprobs import add_token_ids, chat_logprob, prompt_logprobs
from jaxllm.serve.api.prompt_encoding import (
    cached_chunks_of,
    encode_chat,
    remaining_tokens,
    render_chat,
    sampling_params,
    scheduling_of,
    special_ids,
    template_variables,
    truncated,
    with_model_sampling,
)
from jaxllm.serve.api.request_schemas import ChatRequest
from jaxllm.serve.generation import GenerationJob, RequestDispatcher, Usage
from jaxllm.serve.tools.output_parser import Delta, OutputParser, ParserOptions, merge_deltas
from jaxllm.serve.tools.tool_choice import ChatFormat, ToolChoice, grammar_after_reasoning, resolve_tool_choice


class ChatCompletionHandler:
    """Handler of one chat-completion request.

    Args:
        dispatcher: access to the engine.
        body: the request.
        head: id, created and model of the response.
        record: log record of the request.

    Raises:
        ApiError: a field is illegal or the prompt is too long.
    """

    def __init__(self, dispatcher: RequestDispatcher, body: ChatRequest, head: dict[str, Any], record: dict[str, Any]):
        body = with_model_sampling(body, dispatcher.backend.sampling)
        self._dispatcher, self._body, self._head, self._record = dispatcher, body, head, record
        self.usage = Usage()
        job, options = _job(dispatcher, body, record)
        self.jobs = [job]
        dispatcher.check(self.jobs, "messages")
        self._parsers = [OutputParser(options) for _ in range(job.params.n)]

    async def whole(self) -> dict[str, Any]:
        """Response body of a request that is not streamed."""
        deltas: list[list[Delta]] = [[] for _ in self._parsers]
        scores: list[list[Any]] = [[] for _ in deltas]
        ends: list[str | None] = [None] * len(deltas)
        also: list[dict[str, Any]] = [{} for _ in deltas]
        about: dict[str, Any] = self._prompt_ids()
        async for _, output in self._dispatcher.run(self.jobs, self.usage, self._record):
            found, finish = self._parse(output)
            deltas[output.number] += found
            scores[output.number] += self.logprobs_of(output)
            ends[output.number] = finish or ends[output.number]
            add_token_ids(also[output.number], self._token_ids(output))
            if self._body.prompt_logprobs is not None and "prompt_logprobs" not in about:
                request, prompt = output.request, self.jobs[0].prompt
                rows = prompt_logprobs(
                    self._dispatcher.backend.tokenizer, prompt, request.text_scores, request.text_top
                )
                about["prompt_logprobs"] = rows
        choices = [
            {
                "index": i,
                "message": _message(merge_deltas(found)),
                "logprobs": {"content": scores[i], "refusal": None} if self._body.logprobs else None,
                "finish_reason": ends[i],
                **also[i],
            }
            for i, found in enumerate(deltas)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self.usage.body(), **about}

    async def events(self) -> AsyncGenerator[str, None]:
        """Server-sent events of a streamed request, one chunk per delta."""
        counts = StreamUsage(self._body.stream_options, self.usage)
        about = self._prompt_ids()
        for number in range(self.jobs[0].params.n):
            yield self._chunk(
                number, {"role": "assistant", "content": "", "refusal": None}, {**counts.of_chunk(), **about}
            )
            about = {}
        async for _, output in self._dispatcher.run(self.jobs, self.usage, self._record):
            scores, ids = self.logprobs_of(output), self._token_ids(output)
            deltas, finish = self._parse(output)
            if (scores or ids.get("token_ids")) and not deltas:
                deltas = [{}]  # log-probabilities and ids of tokens whose text the parser still holds back
            for delta in deltas:
                yield self._chunk(output.number, delta, counts.of_chunk(), scores, ids)
                scores, ids = [], {}
            if finish is not None:
                yield self._chunk(output.number, {}, counts.of_chunk(), finish=finish)
        if counts.at_end:
            yield event({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self.usage.body()})
        yield DONE

    def _prompt_ids(self) -> dict[str, Any]:
        """Token ids of the prompt, if requested."""
        return {"prompt_token_ids": self.jobs[0].prompt} if self._body.return_token_ids else {}

    def _token_ids(self, output: OutputDelta) -> dict[str, Any]:
        """Token ids of an output delta, if requested."""
        return {"token_ids": list(output.tokens)} if self._body.return_token_ids else {}

    async def deltas(self) -> AsyncGenerator[tuple[list[Delta], str | None, OutputDelta], None]:
        """Yields (message deltas, finish reason once it has ended, output) of a single completion, for other APIs."""
        async with contextlib.aclosing(self._dispatcher.run(self.jobs, self.usage, self._record)) as outputs:
            async for _, output in outputs:
                yield *self._parse(output), output

    def _parse(self, output: OutputDelta) -> tuple[list[Delta], str | None]:
        """Message deltas of an output delta, and the finish reason once the completion has ended."""
        parser = self._parsers[output.number]
        deltas = parser.push(output.text, output.finish is not None)
        return deltas, "tool_calls" if output.finish == "stop" and parser.calls else output.finish

    def _chunk(
        self,
        number: int,
        delta: dict[str, Any],
        about: dict[str, Any],
        scores: list[Any] | None = None,
        ids: dict[str, Any] | None = None,
        finish: Any = None,
    ) -> str:
        choice = {
            "index": number,
            "delta": delta,
            "logprobs": {"content": scores, "refusal": None} if scores else None,
            "finish_reason": finish,
            **(ids or {}),
        }
        return event({**self._head, "object": "chat.completion.chunk", "choices": [choice], **about})

    def logprobs_of(self, output: OutputDelta) -> list[dict[str, Any]]:
        """Log-probabilities of the tokens of an output delta; empty unless they are requested."""
        if not self._body.logprobs:
            return []
        tokenizer = self._dispatcher.backend.tokenizer
        rows = zip(output.tokens, output.logprobs, output.top, strict=True)
        return [chat_logprob(tokenizer, *row) for row in rows if row[0] not in output.request.stop_ids]


def _message(found: dict[str, Any]) -> dict[str, Any]:
    """Message object: content is null beside tool calls, and empty where nothing was generated."""
    return {"role": "assistant", "content": None if "tool_calls" in found else "", "refusal": None, **found}


def chat_prompt(chat_format: ChatFormat, body: ChatRequest, choice: ToolChoice) -> tuple[str, list[int]]:
    """(text, token ids) of the prompt of a chat completion.

    Raises:
        ApiError: the chat template refuses the conversation, or the vocabulary cannot spell it.
    """
    rendered = render_chat(
        chat_format, body.messages, variables=template_variables(body, chat_format), tools=choice.tools,
        generation_prompt=body.add_generation_prompt is not False, parse_special=body.parse_special is True,
        continue_final=body.continue_final_message is True,
    )  # fmt: skip
    tokenizer = chat_format.backend.tokenizer
    return rendered.text, encode_chat(tokenizer, rendered, add_special_tokens=body.add_special_tokens is True)


def _job(
    dispatcher: RequestDispatcher, body: ChatRequest, record: dict[str, Any]
) -> tuple[GenerationJob, ParserOptions]:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs = true.", param="top_logprobs")
    check_streaming(body)
    if body.continue_final_message and body.add_generation_prompt:
        message = "an answer that continues the last message begins no turn; give add_generation_prompt = false."
        raise ApiError(400, message, param="continue_final_message")
    backend, chat_format = dispatcher.backend, dispatcher.chat_format
    choice = resolve_tool_choice(body, chat_format)
    text, ids = chat_prompt(chat_format, body, choice)
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    ids = truncated(ids, body, backend, most or 1)
    room = remaining_tokens(backend, ids, "messages")
    top = (body.top_logprobs or 0) if body.logprobs else None
    options = choice.parser_options(chat_format, text)
    markers = chat_format.reasoning_tokens + (chat_format.call_tokens if options.call_format is not None else ())
    if body.skip_special_tokens is False:
        markers += special_ids(backend.tokenizer)
    grammar, source = _grammar(body, choice, chat_format, options)
    params = sampling_params(
        body, backend.tokenizer, room if most is None else most, logprobs=top,
        prompt_logprobs=body.prompt_logprobs, spelt=tuple(dict.fromkeys(markers)), grammar=grammar,
        cached_chunks=cached_chunks_of(body, backend.tokenizer, ids),
    )  # fmt: skip
    return GenerationJob(ids, params, body.cache_salt or "", scheduling_of(body, backend, record), source), options


def _grammar(
    body: ChatRequest, choice: ToolChoice, chat_format: ChatFormat, options: ParserOptions
) -> tuple[Grammar | None, str]:
    """Grammar that constrains the completion, and the request field that it comes from."""
    form, field = grammar_of(body)
    if form is not None and options.call_format is not None:
        raise ApiError(400, f"{field} leaves no room for tool calls; give tool_choice = none.", param=field)
    if form is None:
        return choice.grammar(chat_format, options), "tools"
    return (grammar_after_reasoning(form, chat_format.backend, field) if options.reasoning == "open" else form), field
