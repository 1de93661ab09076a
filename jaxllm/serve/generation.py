"""Request dispatch: admission control, deadlines, metrics and logging between the HTTP handlers and the engine."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxllm.effort.effort_policy import EffortPolicy
from jaxllm.effort.sample_rounds import EffortProblem
from jaxllm.infer.adapter_catalogue import AdapterRevision
from jaxllm.infer.async_engine import EngineStopped
from jaxllm.infer.engine.stream_output import OutputDelta
from jaxllm.infer.runner.runner_protocol import StepFailedError
from jaxllm.infer.sampling_params import SamplingParams
from jaxllm.infer.scheduling.policies import Service
from jaxllm.serve import effort_generation
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.backend import Backend
from jaxllm.serve.config import ServeConfig
from jaxllm.serve.server_metrics import ServerMetrics
from jaxllm.serve.tools.tool_choice import ChatFormat


@dataclass(frozen=True)
class GenerationJob:
    """One prompt of a request and its sampling parameters.

    Attributes:
        prompt: token ids.
        params: sampling parameters.
        salt: only requests of the same salt share prefix-cache pages.
        service: scheduling hints.
        grammar_field: request field that the grammar comes from, for errors.
        adapter: adapter that serves it; None: the base.
        effort: effort policy that spends tokens on it; None: it is completed once.
    """

    prompt: list[int]
    params: SamplingParams
    salt: str = ""
    service: Service = field(default_factory=Service)
    grammar_field: str = "structured_outputs"
    adapter: AdapterRevision | None = None
    effort: EffortPolicy | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences that the engine runs for it, at a time."""
        return self.effort.width if self.effort is not None else max(self.params.candidates, self.params.beams)


@dataclass
class Usage:
    """Token counts of a request: its prompts, what the prefix cache had of them, and its completions."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def body(self) -> dict[str, Any]:
        """The counts as OpenAI's ``usage`` object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass
class RequestDispatcher:
    """Passes requests to the engine; admission control refuses those that exceed the queue.

    Attributes:
        backend: the engine.
        config: settings of the server.
        metrics: Prometheus metrics.
        chat_format: chat format of the model.
        open: number of admitted sequences that have not ended.
    """

    backend: Backend
    config: ServeConfig
    metrics: ServerMetrics
    open: int = 0
    chat_format: ChatFormat = field(init=False)
    _seconds: float = field(default=1.0, repr=False)

    def __post_init__(self) -> None:
        self.chat_format = ChatFormat(self.backend, self.config.tool_parser)

    def check_prompt_count(self, prompts: Sequence[Any], param: str) -> None:
        """Checks the number of prompts of a request.

        Raises:
            ApiError: there are more than ``max_prompts``.
        """
        if len(prompts) > (most := self.config.max_prompts):
            raise ApiError(400, f"{len(prompts)} prompts are given; at most {most} are legal.", param=param)

    def check(self, jobs: Sequence[GenerationJob], prompt_field: str) -> None:
        """Checks jobs before admission; ``prompt_field`` is the request field of the prompts.

        Raises:
            ApiError: there are too many sequences, one is too long, or the engine would refuse a job.
        """
        self.check_prompt_count(jobs, prompt_field)
        room = self.backend.max_sequences + self.config.queue
        if (requested := sum(job.sequences for job in jobs)) > room:
            message = f"{requested} completions are requested; this server runs and queues at most {room}."
            raise ApiError(400, message, param="n")
        for job in jobs:
            # A completion whose subtasks leave it may be longer than the context.
            new = job.params.max_tokens if job.params.subtasks is None else 1
            if (total := len(job.prompt) + new) > self.backend.max_len:
                raise ApiError(
                    400,
                    f"{len(job.prompt)} prompt tokens and max_tokens = {new} are {total} tokens; the "
                    f"context has {self.backend.max_len}. Give a shorter prompt or a smaller max_tokens.",
                    param=prompt_field,
                    code="context_length_exceeded",
                )
            try:
                self.backend.check(job.prompt, job.params)
            except (ValueError, ImportError) as error:
                raise ApiError(400, str(error), param=_field_of(str(error), job, prompt_field)) from None

    def check_effort(self, jobs: Sequence[GenerationJob]) -> None:
        """Checks jobs of an effort policy before admission.

        Raises:
            ApiError: a parameter does not go with the policy, or the queue is shorter than the policy is wide.
        """
        room = self.backend.max_sequences + self.config.queue
        if (requested := sum(job.sequences for job in jobs)) > room:
            message = f"the policy runs {requested} completions at a time; this server runs and queues at most {room}."
            raise ApiError(400, message, param="model")
        for job in jobs:
            try:
                assert job.effort is not None
                job.effort.prepared(EffortProblem(tuple(job.prompt), "", job.params))
            except ValueError as error:
                raise ApiError(400, str(error)) from None

    def admit(self, sequences: int) -> Callable[[], None]:
        """Admits a number of sequences; returns the function that the caller must call when they have ended.

        Raises:
            ApiError: 429; the queue is full.
        """
        room = self.backend.max_sequences + self.config.queue
        if self.open + sequences > room:
            self.metrics.refused.inc()
            seconds = max(1, min(60, math.ceil(self._seconds * self.open / max(1, self.backend.max_sequences))))
            raise ApiError(
                429,
                f"the queue is full: {self.open} of {room} sequences are running or queued. Try again later.",
                code="queue_full",
                headers={"Retry-After": str(seconds)},
            )
        self.open += sequences
        started = time.monotonic()

        def release() -> None:
            self.open -= sequences
            self._seconds += 0.1 * (time.monotonic() - started - self._seconds)

        return release

    async def run(
        self, jobs: Sequence[GenerationJob], usage: Usage, record: dict[str, Any]
    ) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Yields (index of the job, output) as they are generated. Close it to cancel the request.

        Counts tokens in ``usage`` and ``record``, and times in the metrics.

        Raises:
            ApiError: the request exceeds ``request_seconds``, or the engine has stopped or refuses it.
        """
        usage.prompt = sum(len(job.prompt) for job in jobs)
        timer = self.metrics.start_request(usage.prompt)
        seconds = self.config.request_seconds
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        cached = dict[int, int]()
        try:
            async with contextlib.aclosing(
                self._one(jobs[0], usage) if len(jobs) == 1 else self._merged(jobs, usage)
            ) as stream:
                while True:
                    async with asyncio.timeout_at(deadline):
                        found = await anext(stream, None)
                    if found is None:
                        break
                    number, output = found
                    usage.completion += len(output.tokens)
                    cached[number] = output.request.cached_tokens
                    usage.cached = sum(cached.values())
                    timer.output((number, output.number), len(output.tokens), output.finish)
                    if output.finish == "error":
                        if isinstance(failure := output.request.failure, StepFailedError):
                            raise failure
                        if failure is not None:
                            raise ApiError(400, str(failure), param="model", code="adapter_unreadable")
                        raise ApiError(
                            400, "the grammar takes too long to evaluate; give a simpler one.", code="form_too_costly"
                        )
                    yield found
        except TimeoutError:
            timer.ended = "timeout"
            raise ApiError(
                408, f"the request has exceeded the server's limit of {seconds} s.", code="timeout"
            ) from None
        except EngineStopped as error:
            timer.ended = "error"
            raise ApiError(503, f"the engine is not running: {error}", code="engine_stopped") from error
        except StepFailedError as error:
            timer.ended = "error"
            raise ApiError(503, str(error), code=error.code) from error
        except ValueError as error:  # the engine refused the request
            raise ApiError(400, str(error)) from None
        finally:
            timer.close()
            if timer.first_token is not None:
                record["first_token_seconds"] = round(timer.first_token, 6)
            record.update(prompt_tokens=usage.prompt, completion_tokens=usage.completion, finish=timer.ended)

    async def _one(self, job: GenerationJob, usage: Usage) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        if job.effort is not None:
            output, spent = await effort_generation.solve(
                self.backend, job.effort, job.prompt, job.params, salt=job.salt, service=job.service
            )
            usage.completion += spent - len(output.tokens)  # the others are counted as they are returned
            yield 0, output
            return
        async with contextlib.aclosing(
            self.backend.stream(job.prompt, job.params, salt=job.salt, service=job.service, adapter=job.adapter)
        ) as outputs:
            async for output in outputs:
                yield 0, output

    async def _merged(
        self, jobs: Sequence[GenerationJob], usage: Usage
    ) -> AsyncGenerator[tuple[int, OutputDelta], None]:
        """Outputs of all jobs, which run concurrently, in the order in which they come."""
        out: asyncio.Queue[Any] = asyncio.Queue()

        async def read(number: int, job: GenerationJob) -> None:
            try:
                async with contextlib.aclosing(self._one(job, usage)) as outputs:
                    async for _, output in outputs:
                        out.put_nowait((number, output))
                out.put_nowait(None)
            except Exception as error:
                out.put_nowait(error)

        tasks = [asyncio.create_task(read(number, job)) for number, job in enumerate(jobs)]
        try:
            left = len(tasks)
            while left:
                item = await out.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _field_of(message: str, job: GenerationJob, prompt_field: str) -> str | None:
    """Request field that the engine's error begins with, where it begins with a parameter."""
    word = message.replace(":", " ").split(" ")[0]
    known = {
        "grammar": job.grammar_field, "stop_ids": "stop_token_ids", "allowed_tokens": "allowed_token_ids",
        "cached_chunks": "cache_chunks", "subtasks": "subtask_markers",
    }  # fmt: skip
    if message.startswith("a prompt"):
        return prompt_field
    return known.get(word, word if word in SamplingParams.__dataclass_fields__ else None)
