"""`POST /v1/chat/completions`: a conversation goes on."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from jaxllm.infer.engine.stream_output import Piece
from jaxllm.infer.grammar import Grammar
from jaxllm.serve.api import logprobs
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.api.event_stream import DONE, event
from jaxllm.serve.api.prompt_encoding import (
    encode_chat,
    grammar_of,
    remaining_tokens,
    render_chat,
    sampling_params,
    scheduling_of,
)
from jaxllm.serve.api.request_schemas import ChatRequest
from jaxllm.serve.generation import GenerationJob, RequestDispatcher, Usage
from jaxllm.serve.tools.output_parser import Delta, OutputParser, ParserOptions, merge_deltas
from jaxllm.serve.tools.tool_choice import ChatFormat, ToolChoice, grammar_after_reasoning, resolve_tool_choice


class ChatCompletionHandler:
    """One request and its answer.

    Args:
        dispatcher: where the engine is.
        body: what is asked.
        head: id, created, model: of the answer.
        record: for the log.
    """

    def __init__(self, dispatcher: RequestDispatcher, body: ChatRequest, head: dict[str, Any], record: dict[str, Any]):
        self._desk, self._body, self._head, self._record = dispatcher, body, head, record
        self.usage = Usage()
        job, way = _job(dispatcher, body, record)
        self.jobs = [job]
        dispatcher.check(self.jobs, "messages")
        self._readings = [OutputParser(way) for _ in range(job.params.n)]

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        deltas: list[list[Delta]] = [[] for _ in self._readings]
        scores: list[list[Any]] = [[] for _ in deltas]
        ends: list[str | None] = [None] * len(deltas)
        async for _, piece in self._desk.run(self.jobs, self.usage, self._record):
            found, finish = self._read(piece)
            deltas[piece.number] += found
            scores[piece.number] += self._scores(piece)
            ends[piece.number] = finish or ends[piece.number]
        choices = [
            {
                "index": i,
                "message": _message(merge_deltas(found)),
                "logprobs": {"content": scores[i], "refusal": None} if self._body.logprobs else None,
                "finish_reason": ends[i],
            }
            for i, found in enumerate(deltas)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self.usage.body()}

    async def events(self) -> AsyncGenerator[str, None]:
        """The answer as it comes."""
        options = self._body.stream_options
        counts = options is not None and bool(options.include_usage)
        for number in range(self.jobs[0].params.n):
            yield self._chunk(number, {"role": "assistant", "content": "", "refusal": None}, counts)
        async for _, piece in self._desk.run(self.jobs, self.usage, self._record):
            scores = self._scores(piece)
            deltas, finish = self._read(piece)
            if scores and not deltas:
                deltas = [{}]  # tokens whose text is still held back
            for delta in deltas:
                yield self._chunk(piece.number, delta, counts, scores)
                scores = []
            if finish is not None:
                yield self._chunk(piece.number, {}, counts, finish=finish)
        if counts:
            yield event({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self.usage.body()})
        yield DONE

    def _read(self, piece: Piece) -> tuple[list[Delta], str | None]:
        """(what can be told, how it ended)."""
        reading = self._readings[piece.number]
        deltas = reading.push(piece.text, piece.finish is not None)
        return deltas, "tool_calls" if piece.finish == "stop" and reading.calls else piece.finish

    def _chunk(
        self, number: int, delta: dict[str, Any], counts: bool, scores: list[Any] | None = None, finish: Any = None
    ) -> str:
        choice = {
            "index": number,
            "delta": delta,
            "logprobs": {"content": scores, "refusal": None} if scores else None,
            "finish_reason": finish,
        }
        last = {"usage": None} if counts else {}
        return event({**self._head, "object": "chat.completion.chunk", "choices": [choice], **last})

    def _scores(self, piece: Piece) -> list[dict[str, Any]]:
        if not self._body.logprobs:
            return []
        tokenizer = self._desk.backend.tokenizer
        rows = zip(piece.tokens, piece.logprobs, piece.top, strict=True)
        return [logprobs.chat_logprob(tokenizer, *row) for row in rows if row[0] not in piece.request.stop_ids]


def _message(found: dict[str, Any]) -> dict[str, Any]:
    """Of calls alone there is no content; of nothing at all it is empty."""
    return {"role": "assistant", "content": None if "tool_calls" in found else "", "refusal": None, **found}


def _job(
    dispatcher: RequestDispatcher, body: ChatRequest, record: dict[str, Any]
) -> tuple[GenerationJob, ParserOptions]:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs = true.", param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream = true.", param="stream_options")
    backend, chat_format, asked = (
        dispatcher.backend,
        dispatcher.chat_format,
        resolve_tool_choice(body, dispatcher.chat_format),
    )
    text = render_chat(
        chat_format, body.messages, variables=body.chat_template_kwargs, tools=asked.tools,
        begins=body.add_generation_prompt is not False,
    )  # fmt: skip
    ids = encode_chat(backend.tokenizer, text)
    room = remaining_tokens(backend, ids, "messages")
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    wanted = (body.top_logprobs or 0) if body.logprobs else None
    way = asked.way(chat_format, text)
    spelt = chat_format.thought_marks + (chat_format.call_marks if way.form is not None else ())
    grammar, source = _form(body, asked, chat_format, way)
    params = sampling_params(
        body, room if most is None else most, logprobs=wanted, spelt=tuple(dict.fromkeys(spelt)), grammar=grammar
    )
    return GenerationJob(ids, params, body.cache_salt or "", scheduling_of(body, backend, record), source), way


def _form(
    body: ChatRequest, asked: ToolChoice, chat_format: ChatFormat, way: ParserOptions
) -> tuple[Grammar | None, str]:
    """(what the text is held to, the field that says so)."""
    form, field = grammar_of(body), "structured_outputs" if body.structured_outputs else "response_format"
    if form is not None and way.form is not None:
        raise ApiError(400, "a text of this form has no place for calls; give tool_choice = none.", param=field)
    if form is None:
        return asked.grammar(chat_format, way), "tools"
    return (grammar_after_reasoning(form, chat_format.backend) if way.thinks == "does" else form), field
