"""Policy objective: the clipped policy gradient of completions that an earlier policy sampled (PPO, GRPO and alike).

Legend: B batch, S sequence, D embed, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.config import ConfigError
from jaxllm.models import Functional
from jaxllm.train.objectives.objective_base import HeadObjective, LossSums, sharded_token_logprobs
from jaxllm.train.objectives.segment_sums import of_segments, segment_sums

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped to this absolute value, so that no ratio overflows."""
RATIOS = ("token", "sequence_mean", "sequence_sum")
KL_ESTIMATORS = ("k2", "k3")


@dataclass(frozen=True)
class PolicyObjective(HeadObjective):
    """Clipped policy gradient (arXiv:1707.06347, equation 7): ``-min(ratio A, clip(ratio) A)`` of each token.

    Batches have each token's advantage ``A``, its log-probability when it was sampled, and a weight; the loss is the
    weighted sum over target tokens, divided by their number. The weights decide over what the loss is a mean
    (``jaxllm.posttrain.algorithms``).

    Attributes:
        clip_low, clip_high: how far ratios below and above 1 are rewarded; ratios are clipped to
            ``1 - clip_low .. 1 + clip_high``.
        ratio: ``token``: of each token's probabilities; ``sequence_mean``: of a completion's, the geometric mean over
            its tokens (GSPO, arXiv:2507.18071); ``sequence_sum``: of the whole completion's.
        kl: weight of the KL divergence from the reference model in the loss; 0: none, and no reference is needed.
        kl_estimator: with ``x`` the log-ratio to the reference, ``k3``: ``exp(-x) - 1 + x``; ``k2``: ``x^2 / 2``, whose
            gradient is that of the divergence.
        entropy: weight of an entropy bonus.
    """

    contents = ("prompts",)
    required = ("advantages", "old_logprobs")
    optional = ("weights", "reference_logprobs")
    metrics = ("entropy", "clipped", "kl", "mismatch", "mismatch_squared")

    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio: Literal["token", "sequence_mean", "sequence_sum"] = "token"
    kl: float = 0.0
    kl_estimator: Literal["k2", "k3"] = "k3"
    entropy: float = 0.0

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"objective.options: {name} = {getattr(self, name)}; give a positive number.")
        if self.clip_low > 1:
            raise ConfigError(f"objective.options: clip_low = {self.clip_low}; a ratio is positive: give at most 1.")
        if self.kl < 0:
            raise ConfigError(f"objective.options: kl = {self.kl}; give 0 (none) or a positive weight.")
        for name, legal in (("ratio", RATIOS), ("kl_estimator", KL_ESTIMATORS)):
            if getattr(self, name) not in legal:
                raise ConfigError(f"objective.options: {name} = {getattr(self, name)!r}; legal: {', '.join(legal)}.")

    @property
    def per_token(self) -> bool:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the loss is a sum over single tokens: ratios of whole completions are not."""
        return self.ratio == "token"

    def sums(self, model: Functional, hidden: Float[Array, "B S D"], head: Float[Array, "V D"], batch: Any) -> LossSums:
        """Loss and metrics, summed over target tokens.

        Metrics: ``entropy`` of the policy; ``clipped``, the share of tokens whose gradient the clip removes; ``kl``,
        the divergence from the reference; ``mismatch`` and ``mismatch_squared``, the absolute and squared difference of
        log-probabilities now and when sampled, which on-policy is what the engine and this forward pass differ by.
        """
        real = batch.targets >= 0
        logprobs, entropies = sharded_token_logprobs(hidden, head, batch.targets, model.config.logit_softcap)
        advantages = jnp.where(real, batch.advantages, 0.0).astype(logprobs.dtype)
        gap = jnp.where(real, logprobs - batch.old_logprobs, 0.0)
        ratio = jnp.exp(jnp.clip(self._log_ratio(gap, real, batch), -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
        clipped = jnp.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
        losses = -jnp.minimum(ratio * advantages, clipped * advantages) - self.entropy * entropies
        kl = jnp.zeros_like(logprobs)
        if batch.reference_logprobs is not None:
            kl = kl_divergence(jnp.where(real, logprobs - batch.reference_logprobs, 0.0), self.kl_estimator)
            losses = losses + self.kl * kl
        weights = 1.0 if batch.weights is None else batch.weights.astype(logprobs.dtype)

        def total(values: Array) -> Array:
            return jnp.sum(jnp.where(real, values, 0.0))

        removed = clipped * advantages < ratio * advantages
        return LossSums(
            loss=total(losses * weights),
            nll=-total(logprobs),
            z=jnp.zeros((), logprobs.dtype),
            count=jnp.sum(real).astype(logprobs.dtype),
            metrics={
                "entropy": total(entropies),
                "clipped": total(removed.astype(logprobs.dtype)),
                "kl": total(kl),
                "mismatch": total(jnp.abs(gap)),
                "mismatch_squared": total(gap**2),
            },
        )

    def _log_ratio(self, gap: Array, real: Array, batch: Any) -> Array:
        if self.ratio == "token":
            return gap
        sums = segment_sums(gap, batch.segment_ids)
        if self.ratio == "sequence_mean":
            sums = sums / jnp.maximum(segment_sums(real.astype(gap.dtype), batch.segment_ids), 1)
        return of_segments(sums, batch.segment_ids)


def kl_divergence(x: Float[Array, "B S"], estimator: str) -> Float[Array, "B S"]:
    """Estimate of the KL divergence from a reference, of log-ratios to it (http://joschu.net/blog/kl-approx.html)."""
    x = jnp.clip(x, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return x**2 / 2 if estimator == "k2" else jnp.expm1(-x) + x


def check_policy_reference(options: PolicyObjective, reference: str) -> None:
    """Checks that a KL term has a reference model; raises ConfigError."""
    if options.kl and not reference:
        raise ConfigError(
            f'objective.options: kl = {options.kl} needs a reference model; set reference = "start", or kl to 0.'
        )
