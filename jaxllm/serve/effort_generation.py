"""Effort policies over HTTP: a request to a policy's model name runs the policy's rounds in the server's engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Any

from jaxllm.effort.effort_policy import EffortPolicy, EffortSolution
from jaxllm.effort.sample_rounds import Candidate, EffortProblem, EffortTools, Rounds, SampleRequest
from jaxllm.infer.adapter_catalogue import AdapterRevision
from jaxllm.infer.engine.stream_output import OutputDelta
from jaxllm.infer.sampling_params import SamplingParams
from jaxllm.infer.scheduling.policies import Service
from jaxllm.serve.backend import Backend

Answers = list[list[Candidate]]


async def solve(
    backend: Backend, policy: EffortPolicy, prompt: list[int], params: SamplingParams, *, salt: str, service: Service
) -> tuple[OutputDelta, int]:
    """Solves one prompt by a policy. Cancelling the call cancels the requests that run.

    Returns:
        the chosen completion as one delta, and the number of tokens that were generated for it.

    Raises:
        ValueError: a parameter does not go with the policy, or the engine refuses a request.
    """
    problem = EffortProblem(tuple(prompt), backend.tokenizer.decode(prompt), params)
    tools = EffortTools(backend.tokenizer, functools.partial(backend.embed, pooling="last"), backend.max_len)
    rounds = policy.solve_all([problem], tools)
    answers: Answers | None = None
    while True:
        # In a thread: verifiers and hidden states would block the event loop.
        requests, solved = await asyncio.to_thread(_advance, rounds, answers)
        if solved is not None:
            return _delta(solved[0], params), solved[0].tokens
        tasks = [asyncio.create_task(_sample(backend, request, salt, service)) for request in requests]
        try:
            answers = list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _advance(
    rounds: Rounds[list[EffortSolution]], answers: Answers | None
) -> tuple[list[SampleRequest], list[EffortSolution] | None]:
    """Requests of the next round, or the result."""
    try:
        return rounds.send(answers), None  # type: ignore[arg-type]  # None begins a generator
    except StopIteration as end:
        return [], end.value


async def _sample(backend: Backend, request: SampleRequest, salt: str, service: Service) -> list[Candidate]:
    """Candidates of one request."""
    found: list[dict[str, Any]] = [
        {"text": "", "tokens": (), "logprobs": (), "top": ()} for _ in range(request.params.n)
    ]
    stream = backend.stream(
        request.prompt, request.params, salt=salt, service=service, adapter=_adapter(backend, request.model)
    )
    async with contextlib.aclosing(stream) as outputs:
        async for output in outputs:
            if output.finish == "error":
                raise output.request.failure or ValueError("the grammar takes too long to evaluate.")
            one = found[output.number]
            for name in ("text", "tokens", "logprobs", "top"):
                one[name] += getattr(output, name)
            one |= {"finish": output.finish, "origin": output.request}
    return [Candidate(**one) for one in found]


def _adapter(backend: Backend, model: str) -> str | AdapterRevision | None:
    """Adapter that a policy's model name means; None for the main model.

    Raises:
        ValueError: the policy names a model, and the server has no adapters.
    """
    if model and backend.adapter_host is None:
        raise ValueError(f"the policy samples from the adapter {model!r}, and this server has none: give --adapters.")
    return model or None


def _delta(solution: EffortSolution, params: SamplingParams) -> OutputDelta:
    """The whole chosen completion, as the engine returns that of ``best_of``."""
    best, wanted = solution.best, params.logprobs is not None
    return OutputDelta(
        best.origin,
        0,
        best.tokens,
        best.text,
        best.logprobs if wanted else (),
        best.top if wanted else (),
        "stop" if best.finish == "stop" else "length",
    )
