"""Streaming output: the tokens and text that a step adds to a completion."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.infer.scheduling.sequence import Finish, Request, Sequence


@dataclass(frozen=True)
class OutputDelta:
    """Output delta: tokens and text that a completion has gained since its last delta.

    Attributes:
        request, number: request, and index of the completion; best first if the best were selected.
        tokens: generated tokens.
        text: their text; empty without a tokenizer. Text that may start a stop string is held back; an echoed prompt
            comes first.
        logprobs: log-probabilities of the tokens, if requested.
        top: top tokens at each position and their log-probabilities, if requested.
        finish: "stop", "length", "cancelled", "error" (its grammar exceeded its work limit, or its adapter or the
            weights cannot be read, see ``Request.failure``); None while it runs.
        stop: stop string that ended the completion; None where none did.
    """

    request: Request
    number: int
    tokens: tuple[int, ...]
    text: str = ""
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish: Finish | None = None
    stop: str | None = None


def output_delta(sequence: Sequence, tokens: tuple[int, ...], text: str, finish: Finish | None = None) -> OutputDelta:
    """Delta of a sequence's last tokens with their log-probabilities; the echo first, if it is still due."""
    wanted = sequence.request.params.logprobs is not None
    first = len(sequence.logprobs) - len(tokens)
    text, sequence.echo = sequence.echo + text, ""
    return OutputDelta(
        sequence.request,
        sequence.number,
        tokens,
        text,
        tuple(sequence.logprobs[first:]) if wanted else (),
        tuple(tuple(best) for best in sequence.top[first:]) if wanted else (),
        finish,
        None if sequence.detokenizer is None or finish != "stop" else sequence.detokenizer.stop_found,
    )
