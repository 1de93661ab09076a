"""Names of block values that gradient checkpointing (remat) can keep for the backward pass."""

from __future__ import annotations

from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

import sharding
from pallas_kernels._compat import target_device
from sharding import LogicalAxes


def name_for_remat(x: Float[Array, "..."], name: str, axes: LogicalAxes) -> Float[Array, "..."]:
    """``x`` under a ``checkpoint_name`` for policies of ``jax.checkpoint``; on TPUs also in row-major layout.

    Without the layout constraint the TPU compiler lays out a block's values as the backward kernels of attention prefer
    (the sequence innermost) but stores the saved ones with the width innermost, and transposes each of them when it is
    read: a tenth of the step of a 1B model with remat = "elementwise" (docs/internals/compiler.md).
    """
    x = checkpoint_name(x, name)
    if target_device().platform != "tpu":
        return x
    order = Layout(tuple(range(x.ndim)))
    return sharding.shard_map(lambda part: with_layout_constraint(part, order), (axes,), axes)(x)
