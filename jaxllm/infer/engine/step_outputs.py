"""What a step has made, entered into the requests it was made for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from jaxllm.infer.engine.sequence import Finish, Sequence
from jaxllm.infer.engine.step_plan import Entry


def score(entry: Entry, made: Mapping[str, np.ndarray], at: int) -> None:
    """Log-probabilities of a piece of a prompt, whose rows begin at ``at``."""
    request = entry.sequence.request
    many = min(entry.count, len(request.prompt) - 1 - entry.start)
    if many > 0:
        pairs = zip(made["scores"][at : at + many].tolist(), made["ranks"][at : at + many].tolist(), strict=True)
        request.prompt_scores[entry.start : entry.start + many] = list(pairs)
    for row, place in enumerate(range(entry.start, entry.start + many), at):
        best = zip(made["prompt_ids"][row].tolist(), made["prompt_top"][row].tolist(), strict=True)
        request.prompt_top[place] = tuple(itertools.islice(best, request.params.prompt_logprobs))


def gain(
    sequence: Sequence, fresh: list[int], made: Mapping[str, np.ndarray], row: int, version: int
) -> tuple[tuple[int, ...], str, Finish | None]:
    """Adds tokens to a continuation, up to where it ends.

    Args:
        fresh: tokens that the device has made of it.
        made, row: where their log-probabilities are.
        version: of the weights.

    Returns:
        The tokens that were added, their text, and how it ended.
    """
    params = sequence.request.params
    before = len(sequence.tokens)
    finish: Finish | None = None
    text = ""
    for number, token in enumerate(fresh):
        if params.max_tokens == 0:
            finish = "length"
            break
        sequence.tokens.append(token)
        sequence.versions.append(version)
        if params.scores:
            sequence.logprobs.append(float(made["logprobs"][number, row]))
            ids, values = made["top_ids"][number, row], made["top_logprobs"][number, row]
            best = zip(ids.tolist(), values.tolist(), strict=True)
            sequence.top.append(list(itertools.islice(best, params.logprobs or 0)))
        ended = token in sequence.request.stop_ids
        if ended:
            finish = "stop"
        elif len(sequence.tokens) - len(sequence.request.prompt) >= params.max_tokens:
            finish = "length"
        if sequence.guide is not None and not ended and not sequence.guide.advance(token):
            finish = "error" if sequence.guide.error else "stop"
        if sequence.reader is not None and not ended:
            piece, stopped = sequence.reader.push(token)
            text += piece
            finish = "stop" if stopped else finish
        if finish is not None:
            break
    return tuple(sequence.tokens[before:]), text, finish
