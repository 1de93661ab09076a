"""Values of a block that its backward pass finds again, where ``remat`` keeps them."""

from __future__ import annotations

from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

import sharding
from pallas_kernels._compat import target_device
from sharding import LogicalAxes


def name_for_remat(x: Float[Array, "..."], name: str, axes: LogicalAxes) -> Float[Array, "..."]:
    """``x``, named for policies of ``jax.checkpoint``, in row-major order wherever it is used on a TPU.

    Left alone, the TPU compiler lays a block's values out as attention's backward kernels like them, the sequence
    innermost, but writes what is kept with the width innermost, and turns every kept value around when it is read: of a
    1B model's step with remat = "elementwise" that was a tenth (docs/internals/compiler.md).
    """
    x = checkpoint_name(x, name)
    if target_device().platform != "tpu":
        return x
    order = Layout(tuple(range(x.ndim)))
    return sharding.shard_map(lambda part: with_layout_constraint(part, order), (axes,), axes)(x)
