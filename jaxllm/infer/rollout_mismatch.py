"""Rollout mismatch: difference between the log-probabilities of a rollout and those of the model that learns from it.

A policy-gradient step assumes that its tokens were sampled with the probabilities that it computes. Other kernels,
another precision or older weights violate that; this measures by how much, for each completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RolloutMismatch:
    """Mismatch of one completion.

    Attributes:
        rollout, train: log-probabilities of its tokens in nats: as sampled, and by the training forward.
        mean, largest: mean and maximum of their absolute differences.
        kl: nats per token, KL divergence of the rollout's distribution from the training one's; unbiased and
            non-negative estimate from the sampled tokens: mean of ratio - 1 - log ratio.
        effective_share: effective sample size over the number of tokens, with ratios of probabilities as importance
            weights; 1 if all agree: (sum of ratios)^2 / (tokens x sum of squares).
    """

    rollout: tuple[float, ...]
    train: tuple[float, ...]
    mean: float
    largest: float
    kl: float
    effective_share: float


def rollout_mismatch(rollout: Sequence[float], train: Sequence[float]) -> RolloutMismatch:
    """Compares log-probabilities token by token.

    Args:
        rollout: ``Output.logprobs`` of a completion sampled at temperature 1 without filters.
        train: log-probabilities of the same tokens by the training forward.

    Raises:
        ValueError: there are none, unequally many, or one is not finite.
    """
    one, other = np.asarray(rollout, np.float64), np.asarray(train, np.float64)
    if one.shape != other.shape or one.size == 0:
        raise ValueError(f"{one.size} log-probabilities of a rollout and {other.size} of training; give one of each.")
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        raise ValueError("a log-probability is not finite; a token of probability zero cannot have been sampled.")
    gap = other - one
    ratio = np.exp(gap)
    return RolloutMismatch(
        tuple(one.tolist()),
        tuple(other.tolist()),
        float(np.abs(gap).mean()),
        float(np.abs(gap).max()),
        float((np.expm1(gap) - gap).mean()),
        float(ratio.sum() ** 2 / (ratio.size * (ratio**2).sum())),
    )
