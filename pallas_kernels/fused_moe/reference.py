"""Reference fused mixture of experts: every expert sees every token; defines the operation.

Legend: T tokens, A experts per token, E experts, D embed, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def fused_moe_reference(
    x: Float[Array, "T D"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    experts: Int[Array, "T A"],
    weights: Float[Array, "T A"],
    activation: Callable[[Array], Array],
) -> Float[Array, "T D"]:
    """Reference fused mixture of experts; see ``fused_moe``."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    tokens = x.astype(dtype)

    def add(out: Array, one: tuple[Array, ...]) -> tuple[Array, None]:
        index, *matrices = one
        first, second, third = (matrix.astype(dtype) for matrix in matrices)
        inner = activation(tokens @ first) * (tokens @ second)
        scale = jnp.sum(jnp.where(experts == index, weights.astype(dtype), 0), axis=1, keepdims=True)
        return out + (inner * scale) @ third, None

    index = jnp.arange(gate.shape[0], dtype=experts.dtype)
    out, _ = jax.lax.scan(add, jnp.zeros_like(tokens), (index, gate, up, down))
    return out.astype(x.dtype)
