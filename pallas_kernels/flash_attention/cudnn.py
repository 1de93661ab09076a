"""Flash attention by cuDNN, NVIDIA's own kernel for its GPUs, through ``jax.nn.dot_product_attention``.

It is used where it is named, and nowhere else: its backward pass adds partial sums in the order in which programs end,
unless XLA is asked for deterministic operations, while two runs of a training step here give the same bits. It compiles
where cuDNN is installed; a program for a GPU that is not attached needs the library too.

Legend: B batch, S queries, T keys, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import explicit_axes, target_device


def attention_cudnn(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K V"],
    sinks: Float[Array, " N"] | None,
    *,
    q_positions: Int[Array, "B S"] | None,
    kv_positions: Int[Array, "B T"] | None,
    q_segment_ids: Int[Array, "B S"] | None,
    kv_segment_ids: Int[Array, "B T"] | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Float[Array, "B S N V"], Float[Array, "B S N"]]:
    """Flash attention by cuDNN: (output, logsumexp); see ``flash_attention``.

    JAX rounds cuDNN's logsumexp to the queries' dtype, and it has no gradient.

    Raises:
        NotImplementedError: the target is no GPU, cuDNN is not installed, the mesh has explicit axes outside
            ``jax.shard_map``, an argument is given that cuDNN does not take, or the logsumexp is differentiated.
    """
    here = target_device()
    if here.platform != "gpu":
        raise NotImplementedError(f"cudnn needs a GPU, not {here.kind}.")
    if axes := explicit_axes():
        raise NotImplementedError(f"cudnn must be called inside a jax.shard_map that is manual over {', '.join(axes)}.")
    given = {"sinks": sinks, "positions": q_positions, "segment ids": q_segment_ids, "a soft cap": softcap}
    if refused := [name for name, value in given.items() if value is not None]:
        raise NotImplementedError(
            f"cudnn takes no {', '.join(refused)}: causal attention by index, with or without a sliding window."
        )
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not q.dtype == k.dtype == v.dtype:
        raise NotImplementedError(
            f"cudnn takes arrays all in bfloat16 or all in float16, not {q.dtype}, {k.dtype}, {v.dtype}."
        )
    if q.shape[3] != v.shape[3]:
        raise NotImplementedError(f"cudnn takes keys and values of one head dim, not {q.shape[3]} and {v.shape[3]}.")
    local = None if window is None else (window - 1, 0)
    try:
        out, lse = jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            scale=scale,
            local_window_size=local,
            implementation="cudnn",
            return_residual=True,
        )
    except RuntimeError as error:
        if "cuDNN" not in str(error):
            raise
        raise NotImplementedError(f"cudnn: {error} Install jax's extra for CUDA.") from error
    return out, _without_gradient(lse.astype(jnp.float32), q)


@jax.custom_vjp
def _without_gradient(lse: Array, q: Array) -> Array:
    """The logsumexp, whose gradient in the queries and keys cuDNN does not compute."""
    return lse


def _forward(lse: Any, q: Any) -> tuple[Array, None]:
    return lse.value, None


def _backward(_: None, d_lse: Any) -> tuple[None, None]:
    if not isinstance(d_lse, SymbolicZero):
        raise NotImplementedError("cudnn: the logsumexp has no gradient; choose pallas_gpu.")
    return None, None


_without_gradient.defvjp(_forward, _backward, symbolic_zeros=True)
