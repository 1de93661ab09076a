"""Algorithm table: GRPO and its relatives, as choices of advantages, token weights, ratio and groups.

One objective computes the loss of all (``jaxllm.train.objectives.policy_loss``), that of PPO with a value loss besides
(``jaxllm.train.objectives.actor_critic``); the options here are its defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from jaxllm.config import ConfigError, closest
from jaxllm.posttrain import advantages
from jaxllm.train.step.objective import OBJECTIVES


@dataclass(frozen=True)
class Algorithm:
    """Row of the table.

    Attributes:
        advantage: rewards of groups -> advantages (``jaxllm.posttrain.advantages``).
        objective: row of the objective table; one with a value head has advantages of its own for each token, by
            generalised advantage estimation (``jaxllm.posttrain.gae``).
        grouped: whether completions of a group are compared, so that it must have several.
        mean_over: what the loss is a mean over: ``sequences``: the mean over completions of the mean over their tokens;
            ``tokens``: all tokens of the batch; ``longest``: tokens of as many completions of the largest length.
        options: options of the objective by name.
        dynamic: groups whose rewards are all equal are replaced by those of further prompts (DAPO).
        overlong: share of the largest length over which a completion that is too long is punished, linearly up to -1
            (DAPO); 0: none.
        oversample: completions that are sampled for each that is kept (GRPO-RoC); 1: all are kept.
    """

    advantage: Callable[[Any], Any]
    mean_over: Literal["sequences", "tokens", "longest"]
    options: tuple[str, ...] = ()
    dynamic: bool = False
    overlong: float = 0.0
    oversample: int = 1
    objective: str = "policy"
    grouped: bool = True

    @property
    def has_values(self) -> bool:
        """Whether its objective has a value head."""
        return OBJECTIVES[self.objective].value_head


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(advantages.group_normalised, "sequences"),
    "dr_grpo": Algorithm(advantages.group_centred, "longest"),
    "dapo": Algorithm(advantages.group_normalised, "tokens", ("clip_high=0.28",), dynamic=True, overlong=0.2),
    "gspo": Algorithm(
        advantages.group_normalised, "sequences", ("ratio=sequence_mean", "clip_low=0.0003", "clip_high=0.0004")
    ),
    "rloo": Algorithm(advantages.leave_one_out, "sequences", ("ratio=sequence_sum",)),
    "reinforce++": Algorithm(advantages.batch_whitened, "tokens", ("kl_estimator=k2",), grouped=False),
    "ppo": Algorithm(advantages.rewards_alone, "tokens", objective="actor_critic", grouped=False),
    "grpo_roc": Algorithm(advantages.group_normalised, "tokens", ("clip_high=0.28",), oversample=2),
}
"""Algorithm table: name -> row. A row may be added from outside the package."""


def find_algorithm(name: str) -> Algorithm:
    """Row of an algorithm; raises ConfigError, which lists those that there are."""
    if (found := ALGORITHMS.get(name)) is None:
        raise ConfigError(f"algorithm = {name!r}; legal: {', '.join(ALGORITHMS)}.{closest(name, ALGORITHMS)}")
    return found


def token_weights(lengths: Float[np.ndarray, " N"], mean_over: str, largest: int) -> Float[np.ndarray, " N"]:
    """Weight of each completion's tokens in a loss that is a sum over tokens, divided by their number.

    Args:
        lengths: tokens of the completions that have a loss.
        mean_over: see ``Algorithm``.
        largest: largest length of a completion.
    """
    total, count = lengths.sum(), max(len(lengths), 1)
    if mean_over == "sequences":
        return total / (count * np.maximum(lengths, 1))
    if mean_over == "longest":
        return np.full(len(lengths), total / (count * largest))
    return np.ones(len(lengths))


def overlong_penalty(lengths: Float[np.ndarray, "P G"], largest: int, share: float) -> Float[np.ndarray, "P G"]:
    """Penalty of completions near the largest length (DAPO, arXiv:2503.14476, equation 13): 0 down to -1."""
    room = share * largest
    return np.zeros_like(lengths) if room <= 0 else -np.clip((lengths - (largest - room)) / room, 0.0, 1.0)


def resample_on_correct(
    rewards: Float[np.ndarray, " M"], penalties: Float[np.ndarray, " M"], keep: int, rng: np.random.Generator
) -> list[int]:
    """Completions of one prompt that are kept out of more (GRPO-RoC: resample on correct, arXiv:2508.20722).

    Correct and wrong ones keep their proportion, and two of each where there are so many. Of the correct ones those
    with the smallest penalty are kept, of the wrong ones a uniform draw, so that the policy sees clean successes and
    all kinds of failures.

    Args:
        rewards: of all completions; those above 0 are correct, NaN counts as wrong.
        penalties: flaws of each, such as the share of failed tool calls.
        keep: number of completions to keep.
        rng: draws the wrong ones.

    Returns:
        indices in rising order.
    """
    correct = np.flatnonzero(rewards > 0)
    wrong = np.flatnonzero(~(rewards > 0))
    least_correct, least_wrong = min(2, len(correct)), min(2, len(wrong))
    number = int(np.floor(keep * len(correct) / len(rewards) + 0.5))
    number = min(max(number, least_correct, keep - len(wrong)), len(correct), keep - min(least_wrong, keep))
    number = max(number, keep - len(wrong))
    cleanest = correct[np.argsort(penalties[correct], kind="stable")[:number]]
    drawn = rng.choice(wrong, keep - number, replace=False) if keep > number else np.array([], np.int64)
    return sorted([*cleanest.tolist(), *drawn.tolist()])
