"""`POST /v1/completions`: texts go on."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from jaxllm.infer.engine.policies import Service
from jaxllm.infer.engine.stream_output import Piece
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.api.event_stream import DONE, event
from jaxllm.serve.api.logprobs import TextLogprobsBuilder
from jaxllm.serve.api.prompt_encoding import encode_prompts, remaining_tokens, sampling_params, scheduling_of
from jaxllm.serve.api.request_schemas import CompletionRequest
from jaxllm.serve.backend import Backend
from jaxllm.serve.generation import GenerationJob, RequestDispatcher, Usage

DEFAULT_MAX_TOKENS = 16
"""Made where a request does not say how many, as OpenAI has it."""


@dataclass
class _Choice:
    """One continuation as it grows."""

    columns: TextLogprobsBuilder | None
    begun: bool = False


class TextCompletionHandler:
    """One request and its answer.

    Args:
        dispatcher: where the engine is.
        body: what is asked.
        head: id, created, model: of the answer.
        record: for the log.
    """

    def __init__(
        self, dispatcher: RequestDispatcher, body: CompletionRequest, head: dict[str, Any], record: dict[str, Any]
    ):
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream = true.", param="stream_options")
        self._desk, self._body, self._head, self._record = dispatcher, body, head, record
        self.usage = Usage()
        service = scheduling_of(body, dispatcher.backend, record)
        prompts = encode_prompts(dispatcher.backend.tokenizer, body.prompt, "prompt")
        self.jobs = [_job(dispatcher.backend, body, ids, service) for ids in prompts]
        dispatcher.check(self.jobs, "prompt")
        self._many = self.jobs[0].params.n
        listed = body.logprobs is not None
        self._choices = [
            _Choice(
                TextLogprobsBuilder(dispatcher.backend.tokenizer, best=(body.logprobs or 0) > 0) if listed else None
            )
            for _ in range(self._many * len(self.jobs))
        ]

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        texts = [""] * len(self._choices)
        scores: list[Any] = [None] * len(texts)
        ends: list[str | None] = [None] * len(texts)
        async for job, piece in self._desk.run(self.jobs, self.usage, self._record):
            index, text, columns = self._gain(job, piece)
            texts[index] += text
            if columns is not None:
                scores[index] = columns if scores[index] is None else _joined(scores[index], columns)
            ends[index] = piece.finish or ends[index]
        choices = [
            {"index": i, "text": text, "logprobs": scores[i], "finish_reason": ends[i]} for i, text in enumerate(texts)
        ]
        return {**self._head, "object": "text_completion", "choices": choices, "usage": self.usage.body()}

    async def events(self) -> AsyncGenerator[str, None]:
        """The answer as it comes."""
        options = self._body.stream_options
        counts = options is not None and bool(options.include_usage)
        last = {"usage": None} if counts else {}
        async for job, piece in self._desk.run(self.jobs, self.usage, self._record):
            index, text, columns = self._gain(job, piece)
            if not text and columns is None and piece.finish is None:
                continue
            choice = {"index": index, "text": text, "logprobs": columns, "finish_reason": piece.finish}
            yield event({**self._head, "object": "text_completion", "choices": [choice], **last})
        if counts:
            yield event({**self._head, "object": "text_completion", "choices": [], "usage": self.usage.body()})
        yield DONE

    def _gain(self, job: int, piece: Piece) -> tuple[int, str, dict[str, Any] | None]:
        """(which choice, its new text, its new log-probabilities); the prompt comes first where it is echoed."""
        index = job * self._many + piece.number
        choice, prompt = self._choices[index], self.jobs[job].prompt
        columns = None
        if choice.columns is not None:
            rows: list[Any] = list(zip(piece.tokens, piece.logprobs, piece.top, strict=True))
            if self._body.echo and not choice.begun:
                scores = [None, *(value for value, _ in piece.request.prompt_scores)]
                rows = [*zip(prompt, scores, [None, *piece.request.prompt_top], strict=True), *rows]
            columns = choice.columns.take(*([row[i] for row in rows] for i in range(3))) if rows else None
        choice.begun = True
        return index, piece.text, columns


def _joined(columns: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return {name: column if column is None else [*column, *more[name]] for name, column in columns.items()}


def _job(backend: Backend, body: CompletionRequest, ids: list[int], service: Service) -> GenerationJob:
    remaining_tokens(backend, ids, "prompt")
    asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if asked == 0 and not body.echo:
        raise ApiError(400, "max_tokens = 0 makes nothing; it is for echo = true.", param="max_tokens")
    params = sampling_params(
        body,
        asked,
        best_of=body.best_of,
        echo=body.echo,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    return GenerationJob(ids, params, body.cache_salt or "", service)
