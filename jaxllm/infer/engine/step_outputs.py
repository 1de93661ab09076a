"""Step outputs: records sampled tokens and log-probabilities in the sequences they belong to, and ends subtasks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from jaxllm.infer.engine.engine_metrics import EngineMetrics
from jaxllm.infer.scheduling.sequence import Finish, Sequence
from jaxllm.infer.scheduling.step_plan import ScheduledChunk, StepScheduler
from jaxllm.infer.scheduling.subtasks import SubtaskStack


def record_prompt_scores(chunk: ScheduledChunk, outputs: Mapping[str, np.ndarray], at: int) -> None:
    """Records the prompt log-probabilities of a prefill chunk, whose rows begin at ``at``."""
    request = chunk.sequence.request
    many = min(chunk.count, len(request.prompt) - 1 - chunk.start)
    if many > 0:
        pairs = zip(outputs["scores"][at : at + many].tolist(), outputs["ranks"][at : at + many].tolist(), strict=True)
        request.prompt_scores[chunk.start : chunk.start + many] = list(pairs)
    for row, place in enumerate(range(chunk.start, chunk.start + many), at):
        best = zip(outputs["prompt_ids"][row].tolist(), outputs["prompt_top"][row].tolist(), strict=True)
        request.prompt_top[place] = tuple(itertools.islice(best, request.params.prompt_logprobs))


def append_tokens(
    sequence: Sequence, fresh: list[int], outputs: Mapping[str, np.ndarray], row: int, version: int, first: int = 0
) -> tuple[tuple[int, ...], str, Finish | None]:
    """Appends sampled tokens to a sequence, up to its end.

    Args:
        fresh: tokens that the device has sampled for it.
        outputs, row: outputs of the step, and the sequence's row in them.
        version: version of the weights.
        first: index of the first of them among the sequence's outputs.

    Returns:
        the tokens that were appended, their text, and the finish reason.
    """
    params = sequence.request.params
    before = len(sequence.tokens)
    finish: Finish | None = None
    text = ""
    for number, token in enumerate(fresh, first):
        if params.max_tokens == 0:
            finish = "length"
            break
        sequence.tokens.append(token)
        sequence.versions.append(version)
        if params.needs_logprobs:
            sequence.logprobs.append(float(outputs["logprobs"][number, row]))
            ids, values = outputs["top_ids"][number, row], outputs["top_logprobs"][number, row]
            best = zip(ids.tolist(), values.tolist(), strict=True)
            sequence.top.append(list(itertools.islice(best, params.logprobs or 0)))
        ended = token in sequence.request.stop_ids
        if ended:
            finish = "stop"
        elif len(sequence.tokens) + sequence.left - len(sequence.request.prompt) >= params.max_tokens:
            finish = "length"
        if sequence.guide is not None and not ended and not sequence.guide.advance(token):
            finish = "error" if sequence.guide.error else "stop"
        if sequence.detokenizer is not None and not ended:
            new_text, stopped = sequence.detokenizer.push(token)
            text += new_text
            finish = "stop" if stopped else finish
        if finish is not None:
            break
    return tuple(sequence.tokens[before:]), text, finish


def end_subtask(
    sequence: Sequence, subtasks: SubtaskStack, scheduler: StepScheduler, metrics: EngineMetrics
) -> Finish | None:
    """Takes a finished subtask out of a sequence after its last token; "length" if there is no room for another token.

    Args:
        sequence: sequence without pending tokens.
        subtasks: its subtasks.
        scheduler: scheduler of the engine.
        metrics: where it is counted.
    """
    if (span := subtasks.push(sequence.tokens)) is not None:
        scheduler.cut(sequence, *span)
        metrics.cut_tokens += span[1] - span[0]
        metrics.recomputed_tokens += sequence.length - 1 - sequence.computed
    return "length" if sequence.length >= sequence.request.longest else None
