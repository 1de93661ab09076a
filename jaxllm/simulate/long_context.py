"""Long contexts: how many users of a length fit, and what prefill, decode and a switch of context cost.

The four quantities of arXiv:2405.08944, which traces all of them to the bytes of the KV cache: concurrent users are the
sequences whose KV cache the memory beside the weights holds; a decode step reads weights and all their caches; a
context switch moves one user's cache to the host and another's back.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.simulate.deployment import Deployment
from jaxllm.simulate.steady_state import decode_seconds, most_sequences, prefill_seconds


@dataclass(frozen=True)
class LongContext:
    """Service of long contexts.

    Attributes:
        context: tokens of a user.
        users: users whose KV cache fits, on all engines.
        cache_bytes: KV cache of a user, on all devices of an engine.
        prefill: seconds to compute a user's prompt.
        decode: seconds of a decode step with all users of an engine.
        switch: seconds to move a user's KV cache to the host and another's back.
    """

    context: int
    users: int
    cache_bytes: float
    prefill: float
    decode: float
    switch: float

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of all users together."""
        return self.users / self.decode if self.users else 0.0


def long_context(deployment: Deployment, context: int) -> LongContext:
    """The four quantities at a context length, for an engine that takes as many sequences as fit.

    Raises:
        DeploymentError: the KV cache of one user does not fit.
    """
    roomy = deployment.sized(max_len=context, max_sequences=1)
    own = [pages for group, pages in zip(roomy.spec.groups, roomy.spec.pages, strict=True) if group.window is None]
    each = most_sequences(deployment.sized(max_len=context), context)
    if own:
        each = roomy.spec.replicas * (min(own) // roomy.spec.columns)
    model, size = roomy.step_model, roomy.spec.page_size
    pages = -(-context // size) * size
    held = sum(
        model.group_token_bytes(n) * (pages if group.window is None else min(pages, group.window))
        for n, group in enumerate(roomy.spec.groups)
    )
    devices = deployment.engine_devices // model.replicas
    return LongContext(
        context,
        each * deployment.engines,
        held * devices,
        prefill_seconds(roomy, context),
        decode_seconds(roomy, max(1, each // model.replicas), context),
        2 * held / model.hardware.host,
    )
