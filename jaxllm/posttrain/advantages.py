"""Advantages: how much better a completion is than expected, from the rewards of its group or batch.

A group are the completions of one prompt. All functions take rewards [P, G] of P prompts with G completions each, NaN
where a completion has no reward (its reward function failed), and return advantages [P, G], 0 there.

Legend: P prompts, G completions of each.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

SMALLEST_STD = 1e-6
"""Added to standard deviations, so that a group of equal rewards has advantages of zero."""

Rewards = Float[np.ndarray, "P G"]


def group_normalised(rewards: Rewards) -> Rewards:
    """Rewards less their group's mean, over its standard deviation (GRPO, arXiv:2402.03300, section 4.1.2)."""
    centred = group_centred(rewards)
    count = np.maximum(_count(rewards) - 1, 1)
    return centred / (np.sqrt((centred**2).sum(axis=1, keepdims=True) / count) + SMALLEST_STD)


def group_centred(rewards: Rewards) -> Rewards:
    """Rewards less their group's mean (Dr. GRPO, arXiv:2503.20783)."""
    given, count = np.isfinite(rewards), np.maximum(_count(rewards), 1)
    mean = np.where(given, rewards, 0.0).sum(axis=1, keepdims=True) / count
    centred = np.where(given, rewards - mean, 0.0)
    # Once more, for the rounding of the mean: equal rewards are exactly zero, whatever they are divided by.
    return np.where(given, centred - centred.sum(axis=1, keepdims=True) / count, 0.0)


def leave_one_out(rewards: Rewards) -> Rewards:
    """Rewards less the mean of the group's others (RLOO, arXiv:2402.14740, equation 8); 0 in a group of one."""
    count = _count(rewards)
    return group_centred(rewards) * np.where(count > 1, count / np.maximum(count - 1, 1), 0.0)


def batch_whitened(rewards: Rewards) -> Rewards:
    """Rewards less the batch's mean, over its standard deviation (REINFORCE++, arXiv:2501.03262)."""
    return group_normalised(rewards.reshape(1, -1)).reshape(rewards.shape)


def rewards_alone(rewards: Rewards) -> Rewards:
    """Rewards as they are, for algorithms whose advantages come from values (``jaxllm.posttrain.gae``)."""
    return np.where(np.isfinite(rewards), rewards, 0.0)


def _count(rewards: Rewards) -> Float[np.ndarray, "P 1"]:
    return np.isfinite(rewards).sum(axis=1, keepdims=True).astype(np.float64)
