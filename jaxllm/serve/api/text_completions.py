"""Text completions, `POST /v1/completions`: whole or streamed, with echo and log-probabilities."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from jaxllm.infer.engine.policies import Service
from jaxllm.infer.engine.stream_output import OutputDelta
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.api.event_stream import DONE, event
from jaxllm.serve.api.logprobs import TextLogprobsBuilder
from jaxllm.serve.api.prompt_encoding import encode_prompts, remaining_tokens, sampling_params, scheduling_of
from jaxllm.serve.api.request_schemas import CompletionRequest
from jaxllm.serve.backend import Backend
from jaxllm.serve.generation import GenerationJob, RequestDispatcher, Usage

DEFAULT_MAX_TOKENS = 16
"""Default of ``max_tokens``, as in OpenAI's API."""


@dataclass
class _Choice:
    """State of one completion while it is generated."""

    logprobs: TextLogprobsBuilder | None
    begun: bool = False


class TextCompletionHandler:
    """Handler of one text-completion request.

    Args:
        dispatcher: access to the engine.
        body: the request.
        head: id, created and model of the response.
        record: log record of the request.

    Raises:
        ApiError: a field is illegal or a prompt is too long.
    """

    def __init__(
        self, dispatcher: RequestDispatcher, body: CompletionRequest, head: dict[str, Any], record: dict[str, Any]
    ):
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream = true.", param="stream_options")
        self._dispatcher, self._body, self._head, self._record = dispatcher, body, head, record
        self.usage = Usage()
        service = scheduling_of(body, dispatcher.backend, record)
        prompts = encode_prompts(dispatcher.backend.tokenizer, body.prompt, "prompt")
        self.jobs = [_job(dispatcher.backend, body, ids, service) for ids in prompts]
        dispatcher.check(self.jobs, "prompt")
        self._n = self.jobs[0].params.n
        listed = body.logprobs is not None
        self._choices = [
            _Choice(
                TextLogprobsBuilder(dispatcher.backend.tokenizer, best=(body.logprobs or 0) > 0) if listed else None
            )
            for _ in range(self._n * len(self.jobs))
        ]

    async def whole(self) -> dict[str, Any]:
        """Response body of a request that is not streamed."""
        texts = [""] * len(self._choices)
        scores: list[Any] = [None] * len(texts)
        ends: list[str | None] = [None] * len(texts)
        async for job, output in self._dispatcher.run(self.jobs, self.usage, self._record):
            index, text, columns = self._update(job, output)
            texts[index] += text
            if columns is not None:
                scores[index] = columns if scores[index] is None else _joined(scores[index], columns)
            ends[index] = output.finish or ends[index]
        choices = [
            {"index": i, "text": text, "logprobs": scores[i], "finish_reason": ends[i]} for i, text in enumerate(texts)
        ]
        return {**self._head, "object": "text_completion", "choices": choices, "usage": self.usage.body()}

    async def events(self) -> AsyncGenerator[str, None]:
        """Server-sent events of a streamed request."""
        options = self._body.stream_options
        counts = options is not None and bool(options.include_usage)
        last = {"usage": None} if counts else {}
        async for job, output in self._dispatcher.run(self.jobs, self.usage, self._record):
            index, text, columns = self._update(job, output)
            if not text and columns is None and output.finish is None:
                continue
            choice = {"index": index, "text": text, "logprobs": columns, "finish_reason": output.finish}
            yield event({**self._head, "object": "text_completion", "choices": [choice], **last})
        if counts:
            yield event({**self._head, "object": "text_completion", "choices": [], "usage": self.usage.body()})
        yield DONE

    def _update(self, job: int, output: OutputDelta) -> tuple[int, str, dict[str, Any] | None]:
        """(choice index, its new text, its new log-probabilities); those of an echoed prompt come first."""
        index = job * self._n + output.number
        choice, prompt = self._choices[index], self.jobs[job].prompt
        columns = None
        if choice.logprobs is not None:
            rows: list[Any] = list(zip(output.tokens, output.logprobs, output.top, strict=True))
            if self._body.echo and not choice.begun:
                scores = [None, *(value for value, _ in output.request.text_scores)]
                rows = [*zip(prompt, scores, [None, *output.request.text_top], strict=True), *rows]
            columns = choice.logprobs.take(*([row[i] for row in rows] for i in range(3))) if rows else None
        choice.begun = True
        return index, output.text, columns


def _joined(columns: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return {name: column if column is None else [*column, *more[name]] for name, column in columns.items()}


def _job(backend: Backend, body: CompletionRequest, ids: list[int], service: Service) -> GenerationJob:
    remaining_tokens(backend, ids, "prompt")
    asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if asked == 0 and not body.echo:
        raise ApiError(400, "max_tokens = 0 generates nothing; it is legal with echo = true only.", param="max_tokens")
    params = sampling_params(
        body,
        asked,
        best_of=body.best_of,
        echo=body.echo,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    return GenerationJob(ids, params, body.cache_salt or "", service)
