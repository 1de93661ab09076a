"""What an engine gives out, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.infer.engine.sequence import Finish, Request, Sequence


@dataclass(frozen=True)
class Piece:
    """What a continuation has gained.

    Attributes:
        request, number: which continuation of which request; the best first where there was a choice.
        tokens: made since the last piece.
        text: of them; empty without a tokenizer. Text that may begin a stop text comes later; what is echoed, first.
        logprobs: of the tokens, where asked for.
        top: the likeliest tokens at each place and their log-probabilities, where asked for.
        finish: "stop", "length", "cancelled", "error" (its grammar took too much work); None while it goes on.
    """

    request: Request
    number: int
    tokens: tuple[int, ...]
    text: str = ""
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish: Finish | None = None


def piece_of(sequence: Sequence, tokens: tuple[int, ...], text: str, finish: Finish | None = None) -> Piece:
    """The last tokens of a continuation, with what belongs to them; the echo first, if it is still to come."""
    wanted = sequence.request.params.logprobs is not None
    first = len(sequence.logprobs) - len(tokens)
    text, sequence.echo = sequence.echo + text, ""
    return Piece(
        sequence.request,
        sequence.number,
        tokens,
        text,
        tuple(sequence.logprobs[first:]) if wanted else (),
        tuple(tuple(best) for best in sequence.top[first:]) if wanted else (),
        finish,
    )
