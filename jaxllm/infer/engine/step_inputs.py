"""Step inputs: packs a step's plan into one array, and a request's logits-processor state into its slot's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from jaxllm.infer.chunks.common_pages import common_pages
from jaxllm.infer.runner import logits_processors
from jaxllm.infer.runner.step.step_shape import DEVICE_STOP_TOKENS, StepShape
from jaxllm.infer.scheduling.adapter_slots import AdapterSlots
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.infer.scheduling.step_plan import ScheduledChunk, StepPlan


def fill(
    plan: StepPlan,
    shape: StepShape,
    tables: Iterable[np.ndarray],
    x: Mapping[str, np.ndarray],
    adapters: AdapterSlots | None = None,
    page_size: int = 0,
) -> None:
    """Fills the views of a step's input buffer, all of them zero.

    Args:
        plan, shape: plan and program of the step; a replica with nothing to do has a plan without chunks.
        tables: int32[R, J], page table of every slot, per layer group.
        x: ``shape.inputs.views(...)``.
        adapters: adapters on the device; None: the engine serves none.
        page_size: positions of a page, for programs that read common pages once.
    """
    chunks, many = plan.chunks, len(plan.chunks)
    counts = np.fromiter((c.count for c in chunks), np.int32, many)
    ends = np.cumsum(counts, dtype=np.int32)
    x["starts"][1 : many + 1], x["starts"][many + 1 :] = ends, ends[-1:].sum()
    x["kv_lens"][:many] = [c.start + c.count for c in chunks]
    slots = [c.sequence.slot for c in chunks]
    x["slots"][:many], x["slots"][many:] = slots, shape.slots
    for own, table in zip(x["tables"], tables, strict=True):
        own[:many] = table[slots]
    for group, copies in enumerate(plan.copies):
        x["copied"][group] = len(copies)
        x["copies"][group, : len(copies)] = np.asarray(copies).reshape(-1, 2)
    x["seeds"][:many] = [c.sequence.seed for c in chunks]
    x["temperature"][:many] = [c.sequence.request.params.temperature for c in chunks]
    tokens = x["tokens"]
    if shape.decode:
        tokens[:many] = [s.tokens[c.start] if c.start < len((s := c.sequence).tokens) else -1 for c in chunks]
        x["steps"][...] = plan.steps
        x["stops"][...] = -1
        for row, chunk in zip(x["stops"], chunks, strict=False):
            if stops := chunk.sequence.request.stop_ids:
                row[: min(DEVICE_STOP_TOKENS, len(stops))] = sorted(stops)[:DEVICE_STOP_TOKENS]
    else:
        for chunk, end in zip(chunks, ends, strict=True):
            drafted = chunk.proposed if chunk.run is None else chunk.run.tokens
            known = [*chunk.sequence.tokens[chunk.start : chunk.start + chunk.count], *drafted]
            tokens[end - chunk.count : end] = known or -1
    if shape.verifies:
        x["proposed"][:many] = [len(c.proposed) for c in chunks]
    if shape.tree_words:
        _fill_trees(chunks, ends, shape, x)
    if shape.retained and chunks:
        x["fresh"][:, :many] = np.swapaxes([c.fresh for c in chunks], 0, 1)
    if shape.shares:
        for group, row in enumerate(x["shared"]):
            row[:many] = common_pages([c.sequence.pages[group] for c in chunks], [c.start for c in chunks], page_size)
    if shape.slices:
        x["prompts"][:many] = [len(c.sequence.request.prompt) for c in chunks]
    if shape.residual:
        x["found"][:many] = [c.sequence.found for c in chunks]
    if adapters is not None:
        used = [c.sequence.request.adapter for c in chunks]
        x["adapters"][:many] = [-1 if one is None else adapters.slot(one) for one in used]
        x["adapters"][many:] = -1
        x["adapter_tables"][...], x["adapter_scales"][...] = adapters.tables, adapters.scales
    if shape.full:
        _fill_full(plan, x)
    if shape.full and not shape.decode:
        x["targets"][...] = -1
        for chunk, end in zip(chunks, ends, strict=True):
            request = chunk.sequence.request
            if request.params.prompt_logprobs is not None and chunk.sequence.number == 0:
                after = request.prompt[chunk.start + 1 : chunk.start + chunk.count + 1]
                x["targets"][end - chunk.count : end - chunk.count + len(after)] = after


def _fill_trees(chunks: list[ScheduledChunk], ends: np.ndarray, shape: StepShape, x: Mapping[str, np.ndarray]) -> None:
    """Fills the tree masks, and the parents of the tokens to verify."""
    many = len(chunks)
    x["tree_first"][:many] = [c.start + c.count - len(c.tree.tokens) for c in chunks]
    if not shape.branches:
        x["parents"][...] = -1
    for row, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
        if not chunk.tree.is_chain:
            x["hidden"][end - len(chunk.proposed) : end] = chunk.tree.hidden(shape.tree_words)[-len(chunk.proposed) :]
        if not shape.branches:
            x["parents"][row, : len(chunk.proposed)] = np.asarray(chunk.tree.parents, np.int32) + 1


def _fill_full(plan: StepPlan, x: Mapping[str, np.ndarray]) -> None:
    """Fills the inputs of the full sampler; rows without a request get neutral values."""
    chunks, many = plan.chunks, len(plan.chunks)
    requests = [c.sequence.request for c in chunks]
    for name, neutral in (("top_k", 0), ("top_p", 1), ("min_p", 0), ("typical_p", 1)):
        x[name][...] = neutral
        x[name][:many] = [getattr(r.params, name) for r in requests]
    for name, neutral in (("repetition", 1), ("presence", 0), ("frequency", 0)):
        x[name][...] = neutral
        x[name][:many] = [getattr(r.params, f"{name}_penalty") for r in requests]
    x["kind"][:many] = [
        logits_processors.SHAPED * c.sequence.request.params.changes_logits
        + logits_processors.SAMPLES * c.samples
        + logits_processors.MASKED * (c.sequence.guide is not None)
        for c in chunks
    ]
    x["earliest"][:many] = [
        len(r.prompt) + r.params.min_tokens - c.sequence.left for r, c in zip(requests, chunks, strict=True)
    ]


def grammar_masks(plans: list[StepPlan], shape: StepShape, width: int) -> np.ndarray | None:
    """Token masks of sequences with grammars (guided decoding); None if no sequence has one.

    Returns:
        int32[B, S x rows, U], the masks after each row whose logits are computed.
    """
    if not any(chunk.sequence.guide for plan in plans for chunk in plan.chunks):
        return None
    out = np.full((len(plans), shape.requests, shape.rows, width), -1, np.int32)
    for requests, plan in zip(out, plans, strict=True):
        for rows, chunk in zip(requests, plan.chunks, strict=False):
            if (guide := chunk.sequence.guide) is None:
                continue
            guides = [guide]  # after the sequence and after each proposed token
            for token, parent in zip(*chunk.tree, strict=True):
                guides.append(guides[parent + 1].copy())
                guides[-1].advance(token)
            for row, after in zip(rows[shape.rows - len(guides) :], guides, strict=True):
                if after.mask is not None:
                    row[:] = after.mask
    return out.reshape(len(plans), -1, width)


def slot_row(sequence: Sequence, vocab: int) -> np.ndarray:
    """Packed buffer of ``logits_processors.seat`` for a sequence, all of whose tokens are known.

    Args:
        sequence: sequence that was admitted to a slot.
        vocab: size of the model's vocabulary.
    """
    buffer, request = logits_processors.slot_buffer(vocab), sequence.request
    packed = np.zeros(buffer.size, np.int32)
    x = buffer.views(packed)
    x["slot"][...] = sequence.slot
    logits_processors.fill_slot(
        x,
        request.prompt,
        sequence.completion,
        bias=dict(request.params.logit_bias),
        allowed=request.params.allowed_tokens,
        bad_words=request.bad_words,
        stops=sorted(request.stop_ids),
    )
    return packed


def program_kind(plans: list[StepPlan], *, exact_prompts: bool = False) -> dict[str, bool]:
    """Kind of program that the plans of all replicas need: decode-only or not, full sampler or not.

    With ``exact_prompts`` a decode-only program would treat the only token of a prompt as a generated one.
    """
    chunks = [chunk for plan in plans for chunk in plan.chunks]
    params = [chunk.sequence.request.params for chunk in chunks]
    scores = any(
        c.sequence.number == 0 and p.prompt_logprobs is not None and c.start < len(c.sequence.request.prompt) - 1
        for c, p in zip(chunks, params, strict=True)
    )
    prompts = exact_prompts and any(chunk.start < len(chunk.sequence.request.prompt) for chunk in chunks)
    return {
        "decode": not scores and not prompts and all(chunk.count == 1 for chunk in chunks),
        "full": any(p.needs_full for p in params),
    }
