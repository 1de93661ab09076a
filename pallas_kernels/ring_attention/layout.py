"""Sequence layouts of context parallelism: which positions of a sequence each shard holds.

- contiguous: shard r has the r-th part. Under a causal mask the last shard computes at every step and the first at one.
- zigzag: the sequence in 2 n chunks, shard r has the r-th chunk and the r-th from the end; every step is half a step's
  work on every shard (as in Llama 3 training, arXiv:2407.21783, section 3.3.2).
- striped: shard r has every n-th position from r (arXiv:2311.09431).

Legend: n shards, S positions of a shard.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

Layout = Literal["contiguous", "zigzag", "striped"]
"""Name of a sequence layout."""
LAYOUTS: tuple[Layout, ...] = ("contiguous", "zigzag", "striped")
"""All sequence layouts."""


def places(
    layout: Layout, shard: int | Int[Array, ""], shards: int, size: int
) -> Int[Array, " S"] | Int[np.ndarray, " S"]:
    """Positions of the sequence that a shard holds, in its order; a numpy array where the shard is a Python int.

    Raises:
        ValueError: the layout is unknown, or zigzag gets an odd number of positions.
    """
    xp = np if isinstance(shard, int) else jnp
    here = xp.arange(size, dtype=np.int32)
    if layout == "contiguous":
        return shard * size + here
    if layout == "striped":
        return here * shards + shard
    if layout != "zigzag":
        raise ValueError(f"layout = {layout!r}; choose from {', '.join(LAYOUTS)}.")
    if size % 2:
        raise ValueError(f"zigzag: a shard of {size} tokens cannot be halved; give each an even number.")
    half = size // 2
    return xp.where(here < half, shard * half + here, (2 * shards - 1 - shard) * half + here - half)


def order(layout: Layout, shards: int, length: int) -> Int[np.ndarray, " length"]:
    """Permutation of a sequence for a layout: ``tokens[:, order(...)]`` is to be split contiguously over the shards.

    Raises:
        ValueError: the length is not divisible by the number of parts.
    """
    parts = 2 * shards if layout == "zigzag" else shards
    if length % parts:
        raise ValueError(f"{layout}: a sequence of {length} does not divide into {parts} parts; pad it to a multiple.")
    return np.concatenate([places(layout, r, shards, length // shards) for r in range(shards)])
