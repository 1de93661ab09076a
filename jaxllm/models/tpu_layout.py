"""Layouts and fusion bounds of a block's values on TPUs, where the compiler's own choices cost more cycles.

By the compiler's estimates for a layer of Llama 3 8B on a v6e (docs/internals/compiler.md): it lays out the residual
stream and the queries with the sequence innermost, and re-lays them out around the matmuls and the kernels of
attention; and it fuses norms and activation functions into the matmuls that read them, which compute them again for
every tile of the result. Elsewhere all functions here return their arguments.

Legend: B batch, S sequence, N heads, H head dim.
"""

from __future__ import annotations

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

import sharding
from pallas_kernels._compat import target_device

LANES = 128


def row_major(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """``x``, and its gradient, in row-major layout."""
    return _laid_out(x, tuple(range(x.ndim))) if _on_tpu() else x


def heads_first(x: Float[Array, "B S N H"]) -> Float[Array, "B S N H"]:
    """``x``, and its gradient, laid out as [B, N, S, H], which the kernels of attention read; where H fills lanes."""
    return _laid_out(x, (0, 2, 1, 3)) if _on_tpu() and x.shape[3] % LANES == 0 else x


def materialized(*arrays: Float[Array, "..."]) -> tuple[Float[Array, "..."], ...]:
    """The arrays, all written to memory before any is used, and so their gradients: a bound of fusions and schedule.

    Not on TPU7x, where it saves 0.6% of the cycles of a step of Llama 3 8B and takes 8% more memory.
    """
    return jax.lax.optimization_barrier(arrays) if _on_tpu() and not _fuses_well() else arrays


def _on_tpu() -> bool:
    return target_device().platform == "tpu"


def _fuses_well() -> bool:
    return target_device().kind == "TPU7x"


def _laid_out(x: Array, order: tuple[int, ...]) -> Array:
    return sharding.by_shard(lambda part: with_layout_constraint(part, Layout(order)), x)
