"""Preference objectives: losses of pairs of a chosen and a rejected completion of one prompt.

Each is a function of the two completions' log-probabilities under the policy, and some under a frozen reference.
The completions of a pair are neighbouring segments of a row (``segment_sums``). A loss is the mean over pairs.

Legend: B batch, S sequence, D embed, V vocab, P pairs of a row.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import sharding
from jaxllm.config import ConfigError
from jaxllm.models import Functional
from jaxllm.models.operand_specs import without_reduced
from jaxllm.train.objectives.objective_base import HIDDEN, TOKENS, HeadObjective, LossSums, sharded_token_logprobs
from jaxllm.train.objectives.segment_sums import of_segments, pair_count, pairs, segment_maxima, segment_sums


class CompletionScores(NamedTuple):
    """Scores of the completions on one side of the pairs, [B P] each.

    Attributes:
        logprob: log-probability of a completion, summed over its tokens.
        ratio: log-probability less that under the reference; without a reference the log-probability.
        tokens: number of its tokens, at least 1.
    """

    logprob: Array
    ratio: Array
    tokens: Array

    @property
    def mean(self) -> Array:
        """Log-probability per token."""
        return self.logprob / self.tokens


class PairObjective(HeadObjective):
    """Preference objective: ``pair_losses`` of the completions' scores, as a mean over pairs.

    Its metrics are means over pairs: ``accuracy``, the share of pairs whose chosen completion has the higher implicit
    reward; ``margin``, the difference of the rewards; and both rewards.
    """

    contents = ("preference",)
    metrics = ("accuracy", "margin", "chosen_reward", "rejected_reward")
    per_token = False

    @abc.abstractmethod
    def pair_losses(self, chosen: CompletionScores, rejected: CompletionScores) -> Array:
        """Loss of each pair, [B P]."""

    @abc.abstractmethod
    def reward(self, scores: CompletionScores) -> Array:
        """Implicit reward of each completion, [B P], for metrics."""

    def items(self, batch: Any) -> Array:
        """Pairs."""
        return pair_count(batch.segment_ids)

    def sums(self, model: Functional, hidden: Float[Array, "B S D"], head: Float[Array, "V D"], batch: Any) -> LossSums:
        """Loss and metrics, summed over pairs."""
        real = batch.targets >= 0
        logprobs, _ = sharded_token_logprobs(hidden, head, batch.targets, model.config.logit_softcap)
        reference = jnp.zeros_like(logprobs) if batch.reference_logprobs is None else batch.reference_logprobs
        ratios = jnp.where(real, logprobs - reference, 0.0)
        by_segment = [segment_sums(x, batch.segment_ids) for x in (logprobs, ratios, real.astype(logprobs.dtype))]
        chosen, rejected = (CompletionScores(*side) for side in zip(*map(pairs, by_segment), strict=True))
        paired = (chosen.tokens > 0) & (rejected.tokens > 0)
        chosen, rejected = (one._replace(tokens=jnp.maximum(one.tokens, 1)) for one in (chosen, rejected))
        losses = self.pair_losses(chosen, rejected)
        return pair_sums(losses, self.reward(chosen), self.reward(rejected), paired, logprobs, real)


def pair_sums(losses: Array, chosen: Array, rejected: Array, paired: Array, logprobs: Array, real: Array) -> LossSums:
    """Loss sums of pairs, with their metrics.

    Args:
        losses, chosen, rejected: loss of each pair, and the rewards of its completions, [B P].
        paired: whether there is such a pair.
        logprobs, real: of tokens, [B S], and which of them are targets.
    """

    def total(values: Array) -> Array:
        return jnp.sum(jnp.where(paired, values, 0.0))

    return LossSums(
        loss=total(losses),
        nll=-jnp.sum(jnp.where(real, logprobs, 0.0)),
        z=jnp.zeros((), logprobs.dtype),
        count=jnp.sum(real).astype(logprobs.dtype),
        metrics={
            "accuracy": total((chosen > rejected).astype(losses.dtype)),
            "margin": total(chosen - rejected),
            "chosen_reward": total(chosen),
            "rejected_reward": total(rejected),
        },
    )


def _check_positive(name: str, value: float, why: str) -> None:
    if not value > 0 or math.isinf(value):
        raise ConfigError(f"objective.options: {name} = {value}; give a positive number, {why}.")


def _check_smoothing(value: float) -> None:
    if not 0 <= value < 0.5:
        raise ConfigError(
            f"objective.options: label_smoothing = {value}; give the share of pairs whose order is wrong, from 0 "
            "up to, not including, 0.5."
        )


def smoothed_logistic(logits: Array, smoothing: float) -> Array:
    """Logistic loss of logits, of which a share is expected to have the wrong sign."""
    loss = -jax.nn.log_sigmoid(logits)
    return loss if smoothing == 0 else (1 - smoothing) * loss - smoothing * jax.nn.log_sigmoid(-logits)


@dataclass(frozen=True)
class DPO(PairObjective):
    """Direct preference optimisation (arXiv:2305.18290, equation 7): ``-log sigmoid(beta (ratio_c - ratio_r))``.

    Attributes:
        beta: strength of the constraint to the reference.
        label_smoothing: expected share of pairs in the wrong order (conservative DPO).
    """

    required = ("reference_logprobs",)

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("beta", self.beta, "the strength of the constraint to the reference")
        _check_smoothing(self.label_smoothing)

    def pair_losses(self, chosen: CompletionScores, rejected: CompletionScores) -> Array:
        """Logistic loss of the difference of the implicit rewards."""
        return smoothed_logistic(self.beta * (chosen.ratio - rejected.ratio), self.label_smoothing)

    def reward(self, scores: CompletionScores) -> Array:
        """Scaled log-ratio to the reference."""
        return self.beta * scores.ratio


@dataclass(frozen=True)
class IPO(PairObjective):
    """Identity preference optimisation (arXiv:2310.12036, equation 17): ``(d - 1 / (2 beta))^2``.

    ``d`` is the difference of log-ratios per token: the authors' results are those of ratios that are divided by
    length.

    Attributes:
        beta: strength of the constraint to the reference, called tau in the paper.
    """

    required = ("reference_logprobs",)

    beta: float = 0.1

    def __post_init__(self) -> None:
        _check_positive("beta", self.beta, "the strength of the constraint to the reference")

    def pair_losses(self, chosen: CompletionScores, rejected: CompletionScores) -> Array:
        """Squared distance of the difference from its target."""
        return (chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens - 1 / (2 * self.beta)) ** 2

    def reward(self, scores: CompletionScores) -> Array:
        """Scaled log-ratio per token."""
        return self.beta * scores.ratio / scores.tokens


@dataclass(frozen=True)
class ORPO(PairObjective):
    """Odds-ratio preference optimisation (arXiv:2403.07691, equations 6 and 7), without a reference.

    The loss of a pair is the chosen completion's cross-entropy per token, plus ``beta`` times
    ``-log sigmoid(log odds of chosen - log odds of rejected)``; the odds are those of the geometric mean of the tokens'
    probabilities.

    Attributes:
        beta: weight of the odds-ratio term, called lambda in the paper.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        _check_positive("beta", self.beta, "the weight of the odds-ratio term")

    def pair_losses(self, chosen: CompletionScores, rejected: CompletionScores) -> Array:
        """Cross-entropy of the chosen completion and the odds-ratio term."""
        return -chosen.mean - self.beta * jax.nn.log_sigmoid(log_odds(chosen.mean) - log_odds(rejected.mean))

    def reward(self, scores: CompletionScores) -> Array:
        """Scaled log-probability per token."""
        return self.beta * scores.mean


def log_odds(logprob: Float[Array, "..."]) -> Float[Array, "..."]:
    """Log-odds ``log(p / (1 - p))`` of an event of log-probability ``log p``, precise at both ends; p < 1."""
    tiny = jnp.finfo(logprob.dtype).tiny
    x = jnp.minimum(logprob, -tiny)
    near_one = x > -math.log(2)
    # Each branch is given a value at which the other one's derivative is finite.
    expm1 = jnp.log(-jnp.expm1(jnp.where(near_one, x, -1.0)))
    log1p = jnp.log1p(-jnp.exp(jnp.where(near_one, -1.0, x)))
    return x - jnp.where(near_one, expm1, log1p)


@dataclass(frozen=True)
class SimPO(PairObjective):
    """Simple preference optimisation (arXiv:2405.14734, equation 6): ``-log sigmoid(beta (mean_c - mean_r) - gamma)``.

    ``mean`` is the log-probability per token; there is no reference.

    Attributes:
        beta: scale of the implicit reward.
        gamma: margin by which the chosen completion's reward should be larger.
        label_smoothing: expected share of pairs in the wrong order.
    """

    beta: float = 2.0
    gamma: float = 1.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("beta", self.beta, "the scale of the reward")
        _check_smoothing(self.label_smoothing)
        if not (self.gamma >= 0 and math.isfinite(self.gamma)):
            raise ConfigError(f"objective.options: gamma = {self.gamma}; give 0 or a positive margin.")

    def pair_losses(self, chosen: CompletionScores, rejected: CompletionScores) -> Array:
        """Logistic loss of the difference of rewards, less the margin."""
        return smoothed_logistic(self.beta * (chosen.mean - rejected.mean) - self.gamma, self.label_smoothing)

    def reward(self, scores: CompletionScores) -> Array:
        """Scaled log-probability per token."""
        return self.beta * scores.mean


@dataclass(frozen=True)
class BradleyTerry(HeadObjective):
    """Reward model of pairs (Bradley-Terry): ``-log sigmoid(reward_c - reward_r)``.

    The reward of a text is the product of one row of the output matrix, the score head, with the final hidden state at
    the last token before the completion's end.

    Attributes:
        reward_token: token whose row of the output matrix is the score head; it is trained with the other parameters.
        center: weight of the mean squared sum of both rewards, which keeps them around zero (arXiv:2312.09244).
    """

    contents = ("preference",)
    metrics = ("accuracy", "margin", "chosen_reward", "rejected_reward")
    per_token = False

    reward_token: int = 0
    center: float = 0.0

    def __post_init__(self) -> None:
        if self.reward_token < 0:
            raise ConfigError(f"objective.options: reward_token = {self.reward_token}; give a token of the vocabulary.")
        if self.center < 0:
            raise ConfigError(f"objective.options: center = {self.center}; give 0 (none) or a positive weight.")

    def items(self, batch: Any) -> Array:
        """Pairs."""
        return pair_count(batch.segment_ids)

    def sums(self, model: Functional, hidden: Float[Array, "B S D"], head: Float[Array, "V D"], batch: Any) -> LossSums:
        """Loss and metrics, summed over pairs; there is no cross-entropy."""
        if self.reward_token >= head.shape[0]:
            raise ConfigError(
                f"objective.options: reward_token = {self.reward_token}; the vocabulary has {head.shape[0]} tokens."
            )
        real = batch.targets >= 0
        last = last_targets(batch)
        scores = jnp.where(last, token_scores(hidden, without_reduced(head), self.reward_token), 0.0)
        chosen, rejected = pairs(segment_sums(scores, batch.segment_ids))
        both = pairs(segment_sums(last.astype(scores.dtype), batch.segment_ids))
        losses = -jax.nn.log_sigmoid(chosen - rejected) + self.center * (chosen + rejected) ** 2
        return pair_sums(losses, chosen, rejected, (both[0] > 0) & (both[1] > 0), jnp.zeros_like(scores), real)


def last_targets(batch: Any) -> Array:
    """Whether each token is the last one of its segment that has a target, [B S]."""
    real, dtype = batch.targets >= 0, jnp.float32
    places = jnp.where(real, batch.positions + 1, 0).astype(dtype)
    return real & (places == of_segments(segment_maxima(places, batch.segment_ids), batch.segment_ids))


def token_scores(hidden: Float[Array, "B S D"], head: Float[Array, "V D"], token: int) -> Float[Array, "B S"]:
    """Products of hidden states with the row of one token of the output matrix, in at least float32."""
    vocab_axes = sharding.axis_names("act_vocab")

    def local(hidden: Array, head: Array) -> Array:
        dtype, rows = jnp.promote_types(hidden.dtype, jnp.float32), head.shape[0]
        place = token - (jax.lax.axis_index(vocab_axes) * rows if vocab_axes else 0)
        row = jax.lax.dynamic_slice_in_dim(head, jnp.clip(place, 0, rows - 1), 1)
        found = hidden.astype(dtype) @ row[0].astype(dtype)
        scores = jnp.where((place >= 0) & (place < rows), found, 0.0)
        return jax.lax.psum(scores, vocab_axes) if vocab_axes else scores

    return sharding.shard_map(local, (HIDDEN, ("act_vocab", None)), TOKENS)(hidden, head)
