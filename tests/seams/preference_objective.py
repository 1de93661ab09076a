"""Direct preference optimisation (DPO, arXiv:2305.18290): a training objective over pairs of completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import sharding
from jaxllm.models import Functional
from jaxllm.train.step.objective import HeadObjective, LossSums, sharded_token_logprobs


@dataclass(frozen=True)
class DPOObjective(HeadObjective):
    """``-log sigmoid(beta (log-ratio of chosen - log-ratio of rejected))``, equation 7; ratios are to a reference.

    The first half of a batch's rows are the chosen completions, the second half the rejected ones, in the same order.
    Gradient accumulation keeps them so: a micro-batch has rows i, i + A, i + 2A, ...

    Attributes:
        beta: strength of the constraint to the reference.
    """

    required = ("reference_logprobs",)
    metrics = ("accuracy", "margin")
    per_token = False

    beta: float = 0.1

    def items(self, batch: Any) -> Array:
        """Pairs."""
        return jnp.asarray(batch.targets.shape[0] // 2)

    def sums(self, model: Functional, hidden: Float[Array, "B S D"], head: Float[Array, "V D"], batch: Any) -> LossSums:
        """Loss, how many chosen completions have the higher ratio, and margins, summed over pairs."""
        logprobs, _ = sharded_token_logprobs(hidden, head, batch.targets, model.config.logit_softcap)
        real = batch.targets >= 0
        ratios = jnp.sum(logprobs - jnp.where(real, batch.reference_logprobs, 0.0), axis=1)
        chosen, rejected = sharding.constrain(ratios, None).reshape(2, -1)
        margin = self.beta * (chosen - rejected)
        accurate = jnp.sum(margin > 0).astype(margin.dtype)
        return LossSums(
            loss=-jnp.sum(jax.nn.log_sigmoid(margin)),
            nll=-jnp.sum(logprobs),
            z=jnp.zeros((), margin.dtype),
            count=jnp.sum(real).astype(margin.dtype),
            metrics={"accuracy": accurate, "margin": jnp.sum(margin)},
        )
