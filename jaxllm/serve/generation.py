"""From a request to pieces of its answer: admission, deadlines, what is counted and logged."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxllm.infer.async_engine import EngineStopped
from jaxllm.infer.engine.policies import Service
from jaxllm.infer.engine.stream_output import Piece
from jaxllm.infer.sampling_params import SamplingParams
from jaxllm.serve.api.errors import ApiError
from jaxllm.serve.backend import Backend
from jaxllm.serve.config import ServeConfig
from jaxllm.serve.server_metrics import ServerMetrics
from jaxllm.serve.tools.tool_choice import ChatFormat


@dataclass(frozen=True)
class GenerationJob:
    """One prompt and how it is to go on."""

    prompt: list[int]
    params: SamplingParams
    salt: str = ""
    service: Service = field(default_factory=Service)
    form: str = "structured_outputs"
    """The field that its grammar comes from."""

    @property
    def places(self) -> int:
        """Continuations that are worked on for it."""
        return max(self.params.made, self.params.beams)


@dataclass
class Usage:
    """Tokens of a request: of its prompts, and made."""

    prompt: int = 0
    completion: int = 0

    def body(self) -> dict[str, int]:
        """As OpenAI has it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }


@dataclass
class RequestDispatcher:
    """Lets requests to the engine, and no more than it can have waiting.

    Attributes:
        backend: the engine.
        config: of the server.
        metrics: what is counted.
        chat_format: how the model's answers are written.
        open: continuations let in that have not ended.
    """

    backend: Backend
    config: ServeConfig
    metrics: ServerMetrics
    open: int = 0
    chat_format: ChatFormat = field(init=False)
    _seconds: float = field(default=1.0, repr=False)

    def __post_init__(self) -> None:
        self.chat_format = ChatFormat(self.backend, self.config.tool_parser)

    def check_many(self, prompts: Sequence[Any], param: str) -> None:
        """Raises ApiError for more prompts than a request may have."""
        if len(prompts) > (most := self.config.max_prompts):
            raise ApiError(400, f"{len(prompts)} prompts are given; at most {most} a request.", param=param)

    def check(self, jobs: Sequence[GenerationJob], field_of_prompt: str) -> None:
        """Raises ApiError for jobs that the engine would refuse."""
        self.check_many(jobs, field_of_prompt)
        room = self.backend.sequences + self.config.queue
        if (wanted := sum(job.places for job in jobs)) > room:
            raise ApiError(400, f"{wanted} continuations are asked for; this server has room for {room}.", param="n")
        for job in jobs:
            total = len(job.prompt) + job.params.max_tokens
            if total > self.backend.max_len:
                raise ApiError(
                    400,
                    f"{len(job.prompt)} tokens of prompt and {job.params.max_tokens} new ones are {total}; the model's "
                    f"context has {self.backend.max_len}. Give a shorter prompt or fewer new tokens.",
                    param=field_of_prompt,
                    code="context_length_exceeded",
                )
            try:
                self.backend.check(job.prompt, job.params)
            except (ValueError, ImportError) as error:
                param = job.form if str(error).startswith("grammar") else None
                raise ApiError(400, str(error), param=param) from None

    def admit(self, places: int) -> Callable[[], None]:
        """Takes places for so many continuations; what it gives is to be called when they have ended.

        Raises:
            ApiError: 429, where too many wait already.
        """
        room = self.backend.sequences + self.config.queue
        if self.open + places > room:
            self.metrics.refused.inc()
            seconds = max(1, min(60, math.ceil(self._seconds * self.open / max(1, self.backend.sequences))))
            raise ApiError(
                429,
                f"{self.open} continuations are under way, and this server takes {room}. Try again later.",
                code="queue_full",
                headers={"Retry-After": str(seconds)},
            )
        self.open += places
        started = time.monotonic()

        def release() -> None:
            self.open -= places
            self._seconds += 0.1 * (time.monotonic() - started - self._seconds)

        return release

    async def run(
        self, jobs: Sequence[GenerationJob], usage: Usage, record: dict[str, Any]
    ) -> AsyncGenerator[tuple[int, Piece], None]:
        """(which job, piece) as they come. To be closed by whoever leaves early.

        Raises:
            ApiError: the request takes too long, or the engine has stopped.
        """
        usage.prompt = sum(len(job.prompt) for job in jobs)
        watch = self.metrics.watch(usage.prompt)
        seconds = self.config.request_seconds
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        try:
            async with contextlib.aclosing(self._one(jobs[0]) if len(jobs) == 1 else self._merged(jobs)) as stream:
                while True:
                    async with asyncio.timeout_at(deadline):
                        found = await anext(stream, None)
                    if found is None:
                        break
                    number, piece = found
                    usage.completion += len(piece.tokens)
                    watch.piece((number, piece.number), len(piece.tokens), piece.finish)
                    if piece.finish == "error":
                        raise ApiError(
                            400, "the form of the text takes too much work; give a simpler one.", code="form_too_costly"
                        )
                    yield found
        except TimeoutError:
            watch.ended = "timeout"
            raise ApiError(
                408, f"the request has taken {seconds} s, the most that is allowed.", code="timeout"
            ) from None
        except EngineStopped as error:
            watch.ended = "error"
            raise ApiError(503, f"the engine is not running: {error}", code="engine_stopped") from error
        except ValueError as error:  # refused after all
            raise ApiError(400, str(error)) from None
        finally:
            watch.close()
            record.update(prompt_tokens=usage.prompt, completion_tokens=usage.completion, finish=watch.ended)

    async def _one(self, job: GenerationJob) -> AsyncGenerator[tuple[int, Piece], None]:
        async with contextlib.aclosing(
            self.backend.stream(job.prompt, job.params, salt=job.salt, service=job.service)
        ) as pieces:
            async for piece in pieces:
                yield 0, piece

    async def _merged(self, jobs: Sequence[GenerationJob]) -> AsyncGenerator[tuple[int, Piece], None]:
        """All jobs at once."""
        out: asyncio.Queue[Any] = asyncio.Queue()

        async def read(number: int, job: GenerationJob) -> None:
            try:
                async with contextlib.aclosing(self._one(job)) as pieces:
                    async for _, piece in pieces:
                        out.put_nowait((number, piece))
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
