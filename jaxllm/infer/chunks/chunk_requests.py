"""Chunk requests: the chunks of a prompt that are not cached are computed first, as prompts of their own."""

from __future__ import annotations

from collections.abc import Callable

from jaxllm.infer.sampling_params import SamplingParams
from jaxllm.infer.scheduling.sequence import Request
from jaxllm.infer.scheduling.step_plan import StepScheduler


def await_chunks(request: Request, submit: Callable[..., Request], scheduler: StepScheduler, page_size: int) -> None:
    """Submits the chunks of a request that are not cached, for which it waits; does nothing without chunks.

    Args:
        request: request that is not scheduled yet.
        submit: see ``Engine.submit``.
        scheduler: of one replica.
        page_size: positions of a page.
    """
    if (chunks := request.params.cached_chunks) is None:
        return
    request.reuses = chunks.reuses(page_size, len(request.prompt))
    (prefix_cache,) = scheduler.prefix_caches
    alone = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    same = {"salt": request.client_salt, "service": request.service, "adapter": request.adapter, "internal": True}
    request.awaits = tuple(
        submit([*request.prompt[: one.lead], *request.prompt[one.origin : one.end]], alone, **same)
        for one in request.reuses
        if not prefix_cache.has_chunk(request, one)
    )
