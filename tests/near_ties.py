"""Where greedy completions of one model may differ: places at which float32 cannot tell the likeliest token."""

from __future__ import annotations

from jaxllm.infer import Output

NEAR_TIE = 1e-3
"""Nats between the two likeliest tokens, below which float32 in steps of other sizes may decide otherwise."""


def first_near_tie(want: Output, got: Output) -> int | None:
    """First token in which a greedy completion differs from another; None: in none.

    Args:
        want: completion with the two likeliest tokens of each place (``SamplingParams.logprobs``).
        got: the other, of the same length.

    Raises:
        AssertionError: the two likeliest tokens of ``want`` are further apart there than ``NEAR_TIE``.
    """
    assert len(want.tokens) == len(got.tokens)
    for place, (one, other) in enumerate(zip(want.tokens, got.tokens, strict=True)):
        if one != other:
            (_, first), (_, second) = want.top[place][:2]
            assert first - second < NEAR_TIE, f"token {place} differs: {first - second:.1e} nats between the two"
            return place
    return None
