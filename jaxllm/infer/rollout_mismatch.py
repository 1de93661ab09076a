"""How far the log-probabilities of a rollout are from those of the model that learns from it.

A policy-gradient step trusts that the tokens it weighs were drawn with the probabilities that it computes. Other
kernels, other precision or older weights break that; this says by how much, for each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Trust:
    """Of one text.

    Attributes:
        rollout, train: log-probabilities of its tokens, nats: as they were drawn, and by the training forward.
        mean, most: of their absolute differences.
        kl: nats a token, of the rollout's distribution from the training one's, estimated without bias and never below
            zero from the tokens drawn: mean of ratio - 1 - log ratio.
        effective: share of the tokens that are left when each weighs by its ratio of probabilities, 1 where all agree:
            (sum of ratios)^2 / (tokens x sum of squares).
    """

    rollout: tuple[float, ...]
    train: tuple[float, ...]
    mean: float
    most: float
    kl: float
    effective: float


def trust(rollout: Sequence[float], train: Sequence[float]) -> Trust:
    """Compares them, token by token.

    Args:
        rollout: ``Output.logprobs`` of a text drawn at temperature 1 without filters: what it was drawn by.
        train: the training forward's, of the same tokens.

    Raises:
        ValueError: none, not as many of one as of the other, or one that is not finite.
    """
    one, other = np.asarray(rollout, np.float64), np.asarray(train, np.float64)
    if one.shape != other.shape or one.size == 0:
        raise ValueError(f"{one.size} log-probabilities of a rollout and {other.size} of training; give one of each.")
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        raise ValueError("a log-probability is not finite; what has no probability was not drawn.")
    gap = other - one
    ratio = np.exp(gap)
    return Trust(
        tuple(one.tolist()),
        tuple(other.tolist()),
        float(np.abs(gap).mean()),
        float(np.abs(gap).max()),
        float((np.expm1(gap) - gap).mean()),
        float(ratio.sum() ** 2 / (ratio.size * (ratio**2).sum())),
    )
