"""Batch: the arrays that a training step receives. Legend: B batch, S sequence."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Batch(NamedTuple):
    """Batch of packed rows: a pytree, so `jax.device_put` and `jax.tree.map` accept it as a whole.

    tokens: int32 input tokens.
    targets: int32 token that follows each input in its document; -1 where the loss mask excludes it.
    segment_ids: int32; 0 is padding, 1, 2, ... number the documents of a row. Attention stays inside a segment.
    positions: int32, counted from 0 in each segment.

    Optional values of each target token for objectives, None where the data has none:
    weights: factor of the token's loss. The loss stays a mean over all target tokens, not over their weights.
    advantages: advantage of having chosen the token, for policy gradients.
    old_logprobs: log-probability of the target under the policy that generated it.
    reference_logprobs: log-probability of the target under a frozen reference model.
    old_values: value of the state that the target was chosen in, before the step.
    returns: what that value should have been: the discounted rewards from there on.
    """

    tokens: Int[np.ndarray, "B S"]
    targets: Int[np.ndarray, "B S"]
    segment_ids: Int[np.ndarray, "B S"]
    positions: Int[np.ndarray, "B S"]
    weights: Float[np.ndarray, "B S"] | None = None
    advantages: Float[np.ndarray, "B S"] | None = None
    old_logprobs: Float[np.ndarray, "B S"] | None = None
    reference_logprobs: Float[np.ndarray, "B S"] | None = None
    old_values: Float[np.ndarray, "B S"] | None = None
    returns: Float[np.ndarray, "B S"] | None = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays that the batch has, in the order of fields."""
        return tuple(part for part in self if part is not None)


TOKEN_VALUES = Batch._fields[4:]
"""Names of the optional fields of a batch."""
