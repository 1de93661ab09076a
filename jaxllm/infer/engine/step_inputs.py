"""What the device is told of a plan: the numbers of one transfer, and what a request leaves in its slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from jaxllm.infer.engine.sequence import Sequence
from jaxllm.infer.engine.step_plan import Plan
from jaxllm.infer.runner import logits_processors
from jaxllm.infer.runner.engine_step import STOPS, Shape


def fill(plan: Plan, shape: Shape, tables: Iterable[np.ndarray], x: Mapping[str, np.ndarray]) -> None:
    """Fills the views of a step's inputs, all of them zero.

    Args:
        plan, shape: of the step; a replica that has nothing to do has a plan without entries.
        tables: int32[R, J], the page table of every slot, by group of layers.
        x: ``shape.inputs.views(...)``.
    """
    entries, many = plan.entries, len(plan.entries)
    counts = np.fromiter((e.count for e in entries), np.int32, many)
    ends = np.cumsum(counts, dtype=np.int32)
    x["starts"][1 : many + 1], x["starts"][many + 1 :] = ends, ends[-1:].sum()
    x["kv_lens"][:many] = [e.start + e.count for e in entries]
    slots = [e.sequence.slot for e in entries]
    x["slots"][:many], x["slots"][many:] = slots, shape.slots
    for own, table in zip(x["tables"], tables, strict=True):
        own[:many] = table[slots]
    for group, copies in enumerate(plan.copies):
        x["copied"][group] = len(copies)
        x["copies"][group, : len(copies)] = np.asarray(copies).reshape(-1, 2)
    x["seeds"][:many] = [e.sequence.seed for e in entries]
    x["temperature"][:many] = [e.sequence.request.params.temperature for e in entries]
    tokens = x["tokens"]
    if shape.decode:
        tokens[:many] = [s.tokens[e.start] if e.start < len((s := e.sequence).tokens) else -1 for e in entries]
        x["steps"][...] = plan.steps
        x["stops"][...] = -1
        for row, entry in zip(x["stops"], entries, strict=False):
            if stops := entry.sequence.request.stop_ids:
                row[: min(STOPS, len(stops))] = sorted(stops)[:STOPS]
    else:
        for entry, end in zip(entries, ends, strict=True):
            known = entry.sequence.tokens[entry.start : entry.start + entry.count]
            tokens[end - entry.count : end] = known or -1
    if shape.full:
        _fill_full(plan, x)
    if shape.full and not shape.decode:
        x["targets"][...] = -1
        for entry, end in zip(entries, ends, strict=True):
            request = entry.sequence.request
            if request.params.prompt_logprobs is not None and entry.sequence.number == 0:
                after = request.prompt[entry.start + 1 : entry.start + entry.count + 1]
                x["targets"][end - entry.count : end - entry.count + len(after)] = after


def _fill_full(plan: Plan, x: Mapping[str, np.ndarray]) -> None:
    """All that the plain sampler does without; rows that are none get what changes nothing."""
    entries, many = plan.entries, len(plan.entries)
    requests = [e.sequence.request for e in entries]
    for name, neutral in (("top_k", 0), ("top_p", 1), ("min_p", 0), ("typical_p", 1)):
        x[name][...] = neutral
        x[name][:many] = [getattr(r.params, name) for r in requests]
    for name, neutral in (("repetition", 1), ("presence", 0), ("frequency", 0)):
        x[name][...] = neutral
        x[name][:many] = [getattr(r.params, f"{name}_penalty") for r in requests]
    x["kind"][:many] = [
        logits_processors.SHAPED * e.sequence.request.params.shapes
        + logits_processors.SAMPLES * e.samples
        + logits_processors.MASKED * (e.sequence.guide is not None)
        for e in entries
    ]
    x["earliest"][:many] = [len(r.prompt) + r.params.min_tokens for r in requests]


def masks(plans: list[Plan], shape: Shape, width: int) -> np.ndarray | None:
    """int32[B, S, U]: the tokens that texts with grammars may go on with; None where there are none."""
    if not any(entry.sequence.guide for plan in plans for entry in plan.entries):
        return None
    out = np.full((len(plans), shape.requests, width), -1, np.int32)
    for rows, plan in zip(out, plans, strict=True):
        for row, entry in zip(rows, plan.entries, strict=False):
            if entry.sequence.guide is not None and entry.sequence.guide.mask is not None:
                row[:] = entry.sequence.guide.mask
    return out


def seat_row(sequence: Sequence, vocab: int) -> np.ndarray:
    """What ``shaping.seat`` is told of a sequence, all of whose tokens are known.

    Args:
        sequence: that has got a slot.
        vocab: of the model.
    """
    layout, request = logits_processors.row_layout(vocab), sequence.request
    packed = np.zeros(layout.size, np.int32)
    x = layout.views(packed)
    x["slot"][...] = sequence.slot
    logits_processors.fill_row(
        x,
        request.prompt,
        sequence.tokens[len(request.prompt) :],
        bias=dict(request.params.logit_bias),
        allowed=request.params.allowed_tokens,
        words=request.words,
        stops=sorted(request.stop_ids),
    )
    return packed


def needs(plans: list[Plan]) -> dict[str, bool]:
    """Which program the plans of all replicas can run on."""
    entries = [entry for plan in plans for entry in plan.entries]
    params = [entry.sequence.request.params for entry in entries]
    scores = any(
        e.sequence.number == 0 and p.prompt_logprobs is not None and e.start < len(e.sequence.request.prompt) - 1
        for e, p in zip(entries, params, strict=True)
    )
    return {
        "decode": not scores and all(entry.count == 1 for entry in entries),
        "full": any(p.needs_full for p in params),
    }
