"""KTO: Kahneman-Tversky optimisation (arXiv:2402.01306), of single completions that are labelled good or bad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.config import ConfigError
from jaxllm.models import Functional
from jaxllm.train.objectives.objective_base import HeadObjective, LossSums, sharded_token_logprobs
from jaxllm.train.objectives.segment_sums import pair_count, pairs, segment_sums


@dataclass(frozen=True)
class KTO(HeadObjective):
    """Kahneman-Tversky optimisation, equation 8: a value function of gains and losses beside a reference point.

    A good completion's loss is ``desirable (1 - sigmoid(beta (ratio - z)))``, a bad one's
    ``undesirable (1 - sigmoid(beta (z - ratio)))``. The reference point ``z`` estimates the KL divergence from the
    reference model: the mean log-ratio of completions of other prompts, at least 0, without a gradient. It is estimated
    from the completions of one micro-batch, so it depends on gradient accumulation; the loss is a mean over labelled
    completions.

    Batches have the labelled completion and the one of another prompt as neighbouring segments (``segment_sums``), and
    ``advantages`` of 1 on the tokens of good completions, -1 on those of bad ones, 0 on those of other prompts.

    Attributes:
        beta: strength of the constraint to the reference.
        desirable, undesirable: weights of good and of bad completions.
    """

    contents = ("unpaired_preference",)
    required = ("reference_logprobs", "advantages")
    metrics = ("accuracy", "reward_good", "reward_bad", "good", "kl")
    per_token = False

    beta: float = 0.1
    desirable: float = 1.0
    undesirable: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beta", "desirable", "undesirable"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"objective.options: {name} = {getattr(self, name)}; give a positive number.")

    def items(self, batch: Any) -> Array:
        """Labelled completions."""
        return pair_count(batch.segment_ids)

    def sums(self, model: Functional, hidden: Float[Array, "B S D"], head: Float[Array, "V D"], batch: Any) -> LossSums:
        """Loss and metrics, summed over labelled completions.

        ``accuracy`` is the share whose log-ratio is on the right side of the reference point; ``reward_good`` and
        ``reward_bad`` are sums over one kind as a share of all, ``good`` the share of good ones.
        """
        real = batch.targets >= 0
        logprobs, _ = sharded_token_logprobs(hidden, head, batch.targets, model.config.logit_softcap)
        ratios = jnp.where(real, logprobs - batch.reference_logprobs, 0.0)
        ratio, other = pairs(segment_sums(ratios, batch.segment_ids))
        signs = jnp.where(real, batch.advantages, 0.0).astype(logprobs.dtype)
        label = jnp.sign(pairs(segment_sums(signs, batch.segment_ids))[0])
        labelled = label != 0
        count = jnp.maximum(jnp.sum(labelled), 1)
        point = jax.lax.stop_gradient(jnp.maximum(jnp.sum(jnp.where(labelled, other, 0.0)) / count, 0.0))
        gain = label * (ratio - point)
        weight = jnp.where(label > 0, self.desirable, self.undesirable)

        def total(values: Array, where: Array = labelled) -> Array:
            return jnp.sum(jnp.where(where, values, 0.0))

        return LossSums(
            loss=total(weight * (1 - jax.nn.sigmoid(self.beta * gain))),
            nll=-jnp.sum(jnp.where(real, logprobs, 0.0)),
            z=jnp.zeros((), logprobs.dtype),
            count=jnp.sum(real).astype(logprobs.dtype),
            metrics={
                "accuracy": total((gain > 0).astype(logprobs.dtype)),
                "reward_good": total(self.beta * ratio, label > 0),
                "reward_bad": total(self.beta * ratio, label < 0),
                "good": total(jnp.ones_like(ratio), label > 0),
                "kl": point * jnp.sum(labelled),
            },
        )
