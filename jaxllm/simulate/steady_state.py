"""Steady state of an engine by formula: batch, TTFT and TPOT at a rate of equal requests, and the largest rate.

By Little's law an engine that gets ``rate`` requests a second decodes a batch of rate x tokens x TPOT sequences; TPOT
is the time of a decode step of that batch, lengthened by the share of time that prefill takes. The batch is the fixed
point of the two. It is a first estimate, thousands of times as fast as a simulation, which has the last word.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxllm.plan.formulas.serving_step import BatchWork
from jaxllm.plan.formulas.staged_step import StagedStepModel, pipeline_ends
from jaxllm.simulate.deployment import Deployment
from jaxllm.simulate.routing import MixingPenalty
from jaxllm.simulate.simulator import ServiceObjective

HEADROOM = 0.85
"""Share of an engine's capacity that a plan uses: beyond it, random arrivals wait too long."""


@dataclass(frozen=True)
class SteadyState:
    """Engine in equilibrium.

    Attributes:
        batch: sequences that decode at a time.
        ttft, tpot: seconds to the first token and per output token.
        prefill_share: share of time that prefill takes.
    """

    batch: float
    ttft: float
    tpot: float
    prefill_share: float


def prefill_seconds(deployment: Deployment, prompt: int) -> float:
    """Seconds to compute a prompt alone, in chunks of the token budget."""
    model, budget = deployment.step_model, deployment.engine.max_batched_tokens
    total, free = 0.0, [0.0] * deployment.engine.stages
    for start in range(0, prompt, budget):
        count = min(budget, prompt - start)
        rows, _ = deployment.engine.program_rows(1, count, decode=count == 1)
        if isinstance(model, StagedStepModel):  # chunks follow each other through the stages
            costs = model.stage_costs([BatchWork.of([start], [count])], rows, 1)
            total = pipeline_ends(free, 0.0, [cost.seconds for cost in costs])
            continue
        total += model.step([BatchWork.of([start], [count])] * model.replicas, rows, 1).seconds
    return total


def decode_seconds(deployment: Deployment, batch: float, context: float) -> float:
    """Seconds of a decode step of a batch whose sequences have so many tokens."""
    model, rows = deployment.step_model, max(1, round(batch))
    work = BatchWork.of([round(context)] * rows, [1] * rows)
    return model.step([work] * model.replicas, rows, rows).seconds


def mixing_penalty(deployment: Deployment, context: int = 512) -> MixingPenalty:
    """Router whose costs are those of a deployment's engines."""
    batch = max(2, deployment.engine.max_sequences // 4)
    one, many = (decode_seconds(deployment, size, context) for size in (1, batch))
    return MixingPenalty(prefill_seconds(deployment, context) / context, (many - one) / (batch - 1))


def most_sequences(deployment: Deployment, length: int) -> int:
    """Sequences of a length that an engine can have in its batches: slots, and pages of all replicas."""
    spec = deployment.spec
    need = [
        min(-(-length // spec.page_size), count - spec.columns - 1 if group.window is not None else count)
        for group, count in zip(spec.groups, spec.pages, strict=True)
    ]
    whole = [
        count // max(1, own)
        for group, count, own in zip(spec.groups, spec.pages, need, strict=True)
        if group.window is None
    ]
    return spec.replicas * min([deployment.engine.max_sequences, *whole])


def steady_state(deployment: Deployment, prompt: int, tokens: int, rate: float) -> SteadyState | None:
    """Steady state of one engine at a rate of requests; None if it cannot keep up."""
    each = rate / deployment.step_model.replicas
    prefill = prefill_seconds(deployment, prompt)
    share = each * prefill
    most = most_sequences(deployment, prompt + tokens) / deployment.step_model.replicas
    if share >= 1:
        return None
    context, low, high = prompt + tokens / 2, 0.0, most

    def excess(batch: float) -> float:
        """Sequences that arrive during the time of a batch's tokens, less that batch."""
        return each * tokens * decode_seconds(deployment, batch, context) / (1 - share) - batch

    if excess(high) > 0:
        return None
    while high - low > max(0.5, 0.02 * high):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    tpot = decode_seconds(deployment, high, context) / (1 - share)
    waiting = share / (2 * (1 - share)) * prefill
    return SteadyState(high, waiting + prefill + tpot, tpot, share)


def largest_rate(deployment: Deployment, prompt: int, tokens: int, slo: ServiceObjective) -> float:
    """Largest rate at which one engine meets the objective in steady state, with headroom; 0 if at none."""

    def fits(rate: float) -> bool:
        found = steady_state(deployment, prompt, tokens, rate)
        return found is not None and found.ttft <= slo.ttft and found.tpot <= slo.tpot

    low = 1e-3
    if not fits(low):
        return 0.0
    high = 2 * low
    while fits(high):
        low, high = high, 2 * high
    while high > 1.02 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return HEADROOM * low
