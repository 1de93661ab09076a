"""Names of block values that gradient checkpointing (remat) can keep for the backward pass."""

from __future__ import annotations

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxllm.models.tpu_layout import row_major


def name_for_remat(x: Float[Array, "..."], name: str) -> Float[Array, "..."]:
    """``x`` under a ``checkpoint_name`` for policies of ``jax.checkpoint``, in row-major layout on TPUs.

    Without the layout constraint the TPU compiler lays out a block's values as the kernels of attention prefer
    (the sequence innermost) but stores the saved ones with the width innermost, and transposes each of them when it is
    read: a tenth of the step of a 1B model with remat = "elementwise" (docs/internals/compiler.md).
    """
    return row_major(checkpoint_name(x, name))
