"""Throughput bound: how many tokens per second streamed weights can generate for many requests, and what limits it.

In two stages, as MoE-Lens models mixtures whose weights pass through the device in every step (arXiv:2504.09345). The
bound: weights are read once a step for all tokens that share it, so the KV cache's capacity, which limits how many do,
limits the throughput; prompts of new requests and decoding share steps. The prediction: the steps of a finite number of
requests, one by one, with chunked prefill within the step's budget of tokens.

The formula of the bound is derived here from these assumptions, and not copied from the paper, whose KV cache is in
host memory with attention on the host's processor; here it is on the device.

Legend: p tokens of a prompt, g generated ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """Alike requests that are all there at the start.

    Attributes:
        requests: number of them.
        prompt, generated: tokens of each.

    Raises:
        ValueError: a number is below 1.
    """

    requests: int
    prompt: int
    generated: int

    def __post_init__(self) -> None:
        if min(self.requests, self.prompt, self.generated) < 1:
            raise ValueError(f"workload: {self}; give numbers of 1 or more.")


@dataclass(frozen=True)
class EngineLimits:
    """Limits of a step.

    Attributes:
        tokens: most tokens of a step.
        sequences: most sequences that are served at a time.
        kv_tokens: tokens that the KV cache holds.
    """

    tokens: int
    sequences: int
    kv_tokens: int


@dataclass(frozen=True)
class ThroughputBound:
    """Bound of the throughput.

    Attributes:
        sequences: sequences in flight.
        tokens: tokens of a step.
        seconds: of a step.
        limit: what the number of sequences is limited by: "KV cache", "max_sequences" or "max_batched_tokens".
    """

    sequences: float
    tokens: float
    seconds: float
    limit: str

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of all requests."""
        return self.sequences / self.seconds


def bound(step_seconds: Callable[[float], float], limits: EngineLimits, work: Workload) -> ThroughputBound:
    """Most tokens per second with no end of requests, whatever the order of their prefill and decoding.

    A sequence takes p + g - 1 tokens of at least g steps, as its first token comes with the end of its prompt, and
    p + (g - 1) / 2 tokens of the KV cache in the mean of these steps. So n sequences in flight generate n tokens a step
    of n (p + g - 1) / g tokens.

    Args:
        step_seconds: seconds of a step of so many tokens, which rise by no more than in proportion to these.
        limits: limits of the engine.
        work: the requests, of which the number does not count.
    """
    p, g = work.prompt, work.generated
    of_token = (p + g - 1) / g
    ways = {
        "KV cache": limits.kv_tokens / (p + (g - 1) / 2),
        "max_sequences": float(limits.sequences),
        "max_batched_tokens": limits.tokens / of_token,
    }
    limit = min(ways, key=lambda name: ways[name])
    n = ways[limit]
    return ThroughputBound(n, n * of_token, step_seconds(n * of_token), limit)


def steps_of(limits: EngineLimits, work: Workload) -> list[tuple[int, int]]:
    """Steps of an engine that serves requests in their order.

    Sequences that decode come first; what is left of a step's tokens goes to prompts, one after another, each in as
    few chunks as there is room for. A request begins if the KV cache holds all of its tokens besides those of others. A
    step is sent before the result of the last is there, so a request that ends gives its place up one step later.

    Returns:
        (tokens, generated tokens) of each step.

    Raises:
        ValueError: the KV cache does not hold one request.
    """
    most = min(limits.sequences, limits.kv_tokens // (work.prompt + work.generated))
    if most < 1:
        raise ValueError(
            f"the KV cache holds {limits.kv_tokens} tokens, and a request has {work.prompt + work.generated}: give "
            "less of either."
        )
    # Of each running sequence: tokens of the prompt that are left, and tokens that are generated.
    waiting, running, found = work.requests, list[list[int]](), list[tuple[int, int]]()
    while waiting or any(one[1] < work.generated for one in running):
        ended = [one for one in running if one[1] == work.generated]
        budget, generated, tokens = limits.tokens, 0, 0
        for sequence in running:
            if not sequence[0] and sequence[1] < work.generated and budget:
                sequence[1] += 1
                budget, tokens, generated = budget - 1, tokens + 1, generated + 1
        while budget:
            sequence = next((one for one in running if one[0]), None)
            if sequence is None:
                if not waiting or len(running) == most:
                    break
                waiting -= 1
                running.append(sequence := [work.prompt, 0])
            chunk = min(budget, sequence[0])
            sequence[0] -= chunk
            budget, tokens = budget - chunk, tokens + chunk
            if not sequence[0]:
                sequence[1] += 1
                generated += 1
        running = [one for one in running if not any(one is other for other in ended)]
        if tokens:  # else the engine waits for the last step's result
            found.append((tokens, generated))
    return found


def predicted(step_seconds: Callable[[float], float], limits: EngineLimits, work: Workload) -> float:
    """Generated tokens per second of a finite number of requests, from their first step to their last."""
    steps = steps_of(limits, work)
    return work.requests * work.generated / sum(step_seconds(tokens) for tokens, _ in steps)
