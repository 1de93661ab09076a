"""`POST /v1/chat/completions`: a conversation goes on."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from jaxllm.infer.pieces import Piece
from jaxllm.serve import logprobs
from jaxllm.serve.backend import Backend
from jaxllm.serve.errors import ApiError
from jaxllm.serve.generation import Desk, Job, Usage
from jaxllm.serve.prompts import chat_ids, params_of, room_for
from jaxllm.serve.requests import ChatRequest
from jaxllm.serve.stream import DONE, event


class Chat:
    """One request and its answer.

    Args:
        desk: where the engine is.
        body: what is asked.
        head: id, created, model: of the answer.
        record: for the log.
    """

    def __init__(self, desk: Desk, body: ChatRequest, head: dict[str, Any], record: dict[str, Any]):
        self._desk, self._body, self._head, self._record = desk, body, head, record
        self.usage = Usage()
        self.jobs = [_job(desk.backend, body)]
        desk.check(self.jobs, "messages")

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        texts = [""] * self.jobs[0].params.n
        scores: list[list[Any]] = [[] for _ in texts]
        ends: list[str | None] = [None] * len(texts)
        async for _, piece in self._desk.run(self.jobs, self.usage, self._record):
            texts[piece.number] += piece.text
            scores[piece.number] += self._scores(piece)
            ends[piece.number] = piece.finish or ends[piece.number]
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": {"content": scores[i], "refusal": None} if self._body.logprobs else None,
                "finish_reason": ends[i],
            }
            for i, text in enumerate(texts)
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
            if piece.text or scores:
                yield self._chunk(piece.number, {"content": piece.text}, counts, scores)
            if piece.finish is not None:
                yield self._chunk(piece.number, {}, counts, finish=piece.finish)
        if counts:
            yield event({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self.usage.body()})
        yield DONE

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
        return [logprobs.of_chat(tokenizer, *row) for row in rows if row[0] not in piece.request.stop_ids]


def _job(backend: Backend, body: ChatRequest) -> Job:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs = true.", param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream = true.", param="stream_options")
    begins = body.add_generation_prompt is not False
    ids = chat_ids(backend, body.messages, variables=body.chat_template_kwargs, begins=begins)
    room = room_for(backend, ids, "messages")
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    wanted = (body.top_logprobs or 0) if body.logprobs else None
    return Job(ids, params_of(body, room if asked is None else asked, logprobs=wanted), body.cache_salt or "")
