"""Batch: the arrays that a training step receives. Legend: B batch, S sequence."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Batch(NamedTuple):
    """Batch of packed rows: a pytree, so `jax.device_put` and `jax.tree.map` accept it as a whole.

    tokens: int32 input tokens.
    targets: int32 token that follows each input in its document; -1 where the loss mask excludes it.
    segment_ids: int32; 0 is padding, 1, 2, ... number the documents of a row. Attention stays inside a segment.
    positions: int32, counted from 0 in each segment.
    """

    tokens: Int[np.ndarray, "B S"]
    targets: Int[np.ndarray, "B S"]
    segment_ids: Int[np.ndarray, "B S"]
    positions: Int[np.ndarray, "B S"]
