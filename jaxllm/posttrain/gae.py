"""Generalised advantage estimation: advantages of tokens and targets of their values, from a reward at the end (PPO).

A completion is an episode whose actions are the tokens that the policy wrote. Its reward comes with the last of them,
and nothing follows: a completion that was cut counts as ended.

Legend: N completions, T tokens that the policy wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxllm.data import Batch

SMALLEST_VARIANCE = 1e-8
"""Added to the variance of advantages, so that equal ones are zero."""


@dataclass(frozen=True)
class GaeConfig:
    """Generalised advantage estimation (arXiv:1506.02438, equation 16).

    Attributes:
        gamma: discount of a reward for each token that it lies ahead.
        lam: lambda: 1 estimates returns by the reward alone, 0 by the value of the next token's state.
    """

    gamma: float = 1.0
    lam: float = 0.95

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"gae.{name} = {getattr(self, name)}; give a number from 0 to 1.")


class TokenPlaces(NamedTuple):
    """Tokens that the policy wrote of one completion: their row of a batch, and their columns in order."""

    row: int
    columns: np.ndarray


def generalised_advantages(
    rewards: Float[np.ndarray, "N T"], values: Float[np.ndarray, "N T"], gamma: float, lam: float
) -> Float[np.ndarray, "N T"]:
    """Advantages: the sum over later tokens of ``(gamma lam)^l delta``, ``delta = r + gamma V' - V``.

    Args:
        rewards: of each token; 0 after a completion's end.
        values: of the state that each token was chosen in; 0 after a completion's end.
        gamma, lam: see ``GaeConfig``.
    """
    following = np.pad(values[:, 1:], ((0, 0), (0, 1)))
    delta = rewards + gamma * following - values
    found, later = np.zeros_like(delta), np.zeros(len(delta), delta.dtype)
    for token in reversed(range(delta.shape[1])):
        later = delta[:, token] + gamma * lam * later
        found[:, token] = later
    return found


def whitened(advantages: Float[np.ndarray, "N T"], real: Bool[np.ndarray, "N T"]) -> Float[np.ndarray, "N T"]:
    """Advantages less the mean of all real ones, over their standard deviation; 0 elsewhere."""
    own = advantages[real]
    variance = own.var(ddof=1) if len(own) > 1 else 0.0
    mean = own.mean() if len(own) else 0.0
    return np.where(real, (advantages - mean) / np.sqrt(variance + SMALLEST_VARIANCE), 0.0)


class CriticBatch(NamedTuple):
    """Batch with advantages, returns and values of its tokens.

    Attributes:
        batch: the rows.
        advantages: mean advantage of each completion's tokens, for the log.
        metrics: ``advantage_std`` of tokens, before whitening, and ``explained_variance``: the share of the variance of
            returns that the values before the step explain; it is negative where they are worse than a constant.
    """

    batch: Batch
    advantages: list[float]
    metrics: dict[str, float]


def with_values(
    batch: Batch,
    places: Sequence[TokenPlaces],
    rewards: Sequence[float],
    values: Float[np.ndarray, "B S"],
    config: GaeConfig,
) -> CriticBatch:
    """Batch of completions with what an actor-critic objective reads.

    Args:
        batch: packed rows.
        places: of each completion.
        rewards: of each completion.
        values: of the batch, before the step.
        config: discount and lambda.
    """
    longest = max((len(one.columns) for one in places), default=0)
    real = np.arange(longest) < np.array([len(one.columns) for one in places], np.int64)[:, None]
    own, reward = np.zeros(real.shape), np.zeros(real.shape)
    for number, (one, given) in enumerate(zip(places, rewards, strict=True)):
        own[number, : len(one.columns)] = values[one.row, one.columns]
        reward[number, len(one.columns) - 1] = given
    found = generalised_advantages(reward, own, config.gamma, config.lam)
    returns, scaled = found + own, whitened(found, real)
    advantages, targets, before = (np.zeros(batch.tokens.shape, np.float32) for _ in range(3))
    for number, one in enumerate(places):
        for into, rows in ((advantages, scaled), (targets, returns), (before, own)):
            into[one.row, one.columns] = rows[number, : len(one.columns)]
    spread = float(returns[real].var()) if real.any() else 0.0
    metrics = {
        "advantage_std": float(found[real].std()) if real.any() else 0.0,
        "explained_variance": 1 - float((returns - own)[real].var()) / spread if spread > 0 else 0.0,
    }
    means = [float(scaled[number][real[number]].mean()) for number in range(len(places))]
    batch = batch._replace(advantages=advantages, returns=targets, old_values=before)
    return CriticBatch(batch, means, metrics)
