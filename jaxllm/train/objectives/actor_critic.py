"""Actor-critic objective: the clipped policy gradient, and the clipped squared error of a value head (PPO).

Legend: B batch, S sequence, D embed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

import sharding
from jaxllm.config import ConfigError
from jaxllm.models import Functional
from jaxllm.models.value_head import state_values
from jaxllm.train.objectives.objective_base import LossSums
from jaxllm.train.objectives.policy_loss import PolicyObjective


@dataclass(frozen=True)
class ActorCriticObjective(PolicyObjective):
    """Clipped policy gradient with a value loss (arXiv:1707.06347, equation 9).

    The policy and the value head share all layers. The value of a token is that of the state that it was chosen in: the
    hidden state which gives the token's log-probability. The loss adds ``value_coefficient`` times
    ``max((v - R)^2, (clip(v) - R)^2) / 2``, where ``R`` is the token's return, and ``clip(v)`` is ``v`` no further than
    ``value_clip`` from its value before the step. Batches have both (``returns``, ``old_values``).

    Attributes:
        value_coefficient: weight of the value loss.
        value_clip: how far a value may move in one step before its gradient is removed.
    """

    required = (*PolicyObjective.required, "old_values", "returns")
    metrics = (*PolicyObjective.metrics, "value_loss", "value_clipped", "value")
    value_head = True

    value_coefficient: float = 0.1
    value_clip: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, why in (
            ("value_coefficient", 'values are learned by their loss; algorithm = "reinforce++" has none'),
            ("value_clip", "how far a value may move in one step"),
        ):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ConfigError(f"objective.options: {name} = {getattr(self, name)}; give a positive number: {why}.")

    def from_hidden(self, model: Functional, params: Any, hidden: Float[Array, "B S D"], batch: Any) -> LossSums:
        """Loss sums from hidden states before the final norm.

        Metrics besides those of the policy: ``value_loss``, without its coefficient; ``value_clipped``, the share of
        tokens whose gradient the value clip removes; ``value``, the mean value.
        """
        normed, head = model.unembed(params, hidden)
        with sharding.use_rules(model.rules):
            policy = self.sums(model, normed, head, batch)
            values = state_values(params, normed)
            real, dtype = batch.targets >= 0, values.dtype
            old, returns = batch.old_values.astype(dtype), batch.returns.astype(dtype)
            error = (values - returns) ** 2
            near = (jnp.clip(values, old - self.value_clip, old + self.value_clip) - returns) ** 2
            losses = jnp.maximum(error, near) / 2
            weights = 1.0 if batch.weights is None else batch.weights.astype(dtype)

            def total(terms: Array) -> Array:
                return jnp.sum(jnp.where(real, terms, 0.0))

            own = {
                "value_loss": total(losses),
                "value_clipped": total((near > error).astype(dtype)),
                "value": total(values),
            }
            loss = policy.loss + self.value_coefficient * total(losses * weights)
        return policy._replace(loss=loss, metrics={**(policy.metrics or {}), **own})
