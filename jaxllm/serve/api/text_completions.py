"""Text completions, `POST /v1/completions`: whole or streamed, with echo and log-probabilities."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from jaxllm.infer.engine.stream_output import OutputDelta
from jaxllm.infer.scheduling.policies import Service
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.api.event_stream import DONE, StreamUsage, check_streaming, event
from jaxllm.serve.api.guided_decoding import grammar_of
from jaxllm.serve.api.logprobs import TextLogprobsBuilder, add_token_ids, prompt_logprobs
from jaxllm.serve.api.prompt_encoding import (
    cached_chunks_of,
    encode_prompts,
    remaining_tokens,
    sampling_params,
    scheduling_of,
    truncated,
    with_model_sampling,
)
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
        check_streaming(body)
        body = with_model_sampling(body, dispatcher.backend.sampling)
        self._dispatcher, self._body, self._head, self._record = dispatcher, body, head, record
        self.usage = Usage()
        backend = dispatcher.backend
        service = scheduling_of(body, backend, record)
        prompts = encode_prompts(
            backend.tokenizer, body.prompt, "prompt", add_special_tokens=body.add_special_tokens,
            parse_special=body.parse_special,
        )  # fmt: skip
        self.jobs = [_job(backend, body, ids, service) for ids in prompts]
        dispatcher.check(self.jobs, "prompt")
        self._n = self.jobs[0].params.n
        listed = body.logprobs is not None
        self._choices = [
            _Choice(TextLogprobsBuilder(backend.tokenizer, spelt=self.jobs[0].params.spelt) if listed else None)
            for _ in range(self._n * len(self.jobs))
        ]

    async def whole(self) -> dict[str, Any]:
        """Response body of a request that is not streamed."""
        texts = [""] * len(self._choices)
        scores: list[Any] = [None] * len(texts)
        ends: list[str | None] = [None] * len(texts)
        also: list[dict[str, Any]] = [{} for _ in texts]
        async for job, output in self._dispatcher.run(self.jobs, self.usage, self._record):
            index, text, columns = self._update(job, output)
            texts[index] += text
            if columns is not None:
                scores[index] = columns if scores[index] is None else _joined(scores[index], columns)
            ends[index] = output.finish or ends[index]
            add_token_ids(also[index], self._token_ids(job, output))
            if self._body.prompt_logprobs is not None and "prompt_logprobs" not in also[index]:
                also[index]["prompt_logprobs"] = self._prompt_logprobs(job, output)
        choices = [
            {"index": i, "text": text, "logprobs": scores[i], "finish_reason": ends[i], **also[i]}
            for i, text in enumerate(texts)
        ]
        return {**self._head, "object": "text_completion", "choices": choices, "usage": self.usage.body()}

    async def events(self) -> AsyncGenerator[str, None]:
        """Server-sent events of a streamed request."""
        counts = StreamUsage(self._body.stream_options, self.usage)
        begun = set[int]()
        async for job, output in self._dispatcher.run(self.jobs, self.usage, self._record):
            index, text, columns = self._update(job, output)
            ids = self._token_ids(job, output)
            if not text and columns is None and output.finish is None and not ids.get("token_ids"):
                continue
            if index in begun:
                ids.pop("prompt_token_ids", None)
            begun.add(index)
            choice = {"index": index, "text": text, "logprobs": columns, "finish_reason": output.finish, **ids}
            yield event({**self._head, "object": "text_completion", "choices": [choice], **counts.of_chunk()})
        if counts.at_end:
            yield event({**self._head, "object": "text_completion", "choices": [], "usage": self.usage.body()})
        yield DONE

    def _token_ids(self, job: int, output: OutputDelta) -> dict[str, Any]:
        """Token ids of the prompt and of an output delta, if requested."""
        if not self._body.return_token_ids:
            return {}
        return {"token_ids": list(output.tokens), "prompt_token_ids": self.jobs[job].prompt}

    def _prompt_logprobs(self, job: int, output: OutputDelta) -> list[dict[str, Any] | None]:
        request = output.request
        top = [best[: self._body.prompt_logprobs] for best in request.text_top]
        return prompt_logprobs(self._dispatcher.backend.tokenizer, self.jobs[job].prompt, request.text_scores, top)

    def _update(self, job: int, output: OutputDelta) -> tuple[int, str, dict[str, Any] | None]:
        """(choice index, its new text, its new log-probabilities); those of an echoed prompt come first."""
        index = job * self._n + output.number
        choice, prompt = self._choices[index], self.jobs[job].prompt
        columns = None
        if choice.logprobs is not None:
            rows: list[Any] = list(zip(output.tokens, output.logprobs, output.top, strict=True))
            echoed: list[int] = []
            if self._body.echo and not choice.begun:
                scores, echoed = [None, *(value for value, _ in output.request.text_scores)], prompt
                top = [None, *(best[: self._body.logprobs] for best in output.request.text_top)]
                rows = [*zip(prompt, scores, top, strict=True), *rows]
            tokens, values, best = ([row[i] for row in rows] for i in range(3))
            columns = choice.logprobs.take(tokens, values, best, echoed) if rows else None
        choice.begun = True
        return index, output.text, columns


def _joined(columns: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return {name: column if column is None else [*column, *more[name]] for name, column in columns.items()}


def _job(backend: Backend, body: CompletionRequest, ids: list[int], service: Service) -> GenerationJob:
    asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    ids = truncated(ids, body, backend, asked)
    remaining_tokens(backend, ids, "prompt")
    if asked == 0 and not body.echo and body.prompt_logprobs is None:
        message = "max_tokens = 0 generates nothing; it is legal with echo = true or prompt_logprobs only."
        raise ApiError(400, message, param="max_tokens")
    echoed = body.logprobs if body.echo else None
    params = sampling_params(
        body,
        backend.tokenizer,
        asked,
        best_of=body.best_of,
        echo=body.echo,
        logprobs=body.logprobs,
        prompt_logprobs=max((n for n in (echoed, body.prompt_logprobs) if n is not None), default=None),
        grammar=grammar_of(body)[0],
        cached_chunks=cached_chunks_of(body, backend.tokenizer, ids),
    )
    return GenerationJob(ids, params, body.cache_salt or "", service)
