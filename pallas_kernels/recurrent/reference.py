"""Reference head-wise recurrent network: one token after the other with the cells' equations; defines the operation.

Legend: B batch, S sequence, N heads, G gates, H head dim, I the same as H: inputs of a recurrent matrix.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._compat import vary_over, varying_axes

States = tuple[Array, ...]
"""States of a cell, [B N H] each."""


def recurrent_reference(
    cell: str,
    x: Float[Array, "B S N G H"],
    recurrent: Float[Array, "N G I H"],
    bias: Float[Array, "N G H"],
    resets: Bool[Array, "B S"],
    initial: States,
) -> tuple[Float[Array, "B S N H"], States]:
    """Reference recurrent network; see ``pallas_kernels.recurrent.recurrent``."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)

    def step(states: States, token: tuple[Array, Array]) -> tuple[States, Array]:
        x, reset = token
        states = tuple(jnp.where(reset[:, None, None], 0, state) for state in states)
        h = states[0].astype(recurrent.dtype)
        a = jnp.einsum("bni,ngih->bngh", h, recurrent, preferred_element_type=dtype) + bias.astype(dtype)
        states = _next(cell, x.astype(dtype), a, states)
        return states, states[0].astype(x.dtype)

    axes = varying_axes(x, recurrent, bias, resets, *initial)
    initial = tuple(vary_over(state.astype(dtype), axes) for state in initial)
    last, out = jax.lax.scan(step, initial, (jnp.moveaxis(x, 1, 0), resets.T))
    return jnp.moveaxis(out, 0, 1), last


def _next(cell: str, x: Float[Array, "B N G H"], a: Float[Array, "B N G H"], states: States) -> States:
    if cell == "gru":
        r, z = (jax.nn.sigmoid(x[:, :, g] + a[:, :, g]) for g in range(2))
        n = jnp.tanh(x[:, :, 2] + r * a[:, :, 2])
        return ((1 - z) * n + z * states[0],)
    i, f, z, o = jnp.moveaxis(x + a, 2, 0)
    z, o = jnp.tanh(z), jax.nn.sigmoid(o)
    if cell == "lstm":
        c = jax.nn.sigmoid(f) * states[1] + jax.nn.sigmoid(i) * z
        return o * jnp.tanh(c), c
    _, c, n, m = states
    # The stabiliser is a common factor of c and n, which no result depends on: it has no gradient.
    before = jnp.where(n == 0, -jnp.inf, m)
    m = jax.lax.stop_gradient(jnp.maximum(jax.nn.log_sigmoid(f) + before, i))
    i, f = jnp.exp(i - m), jnp.exp(jax.nn.log_sigmoid(f) + jax.lax.stop_gradient(before) - m)
    c, n = f * c + i * z, f * n + i
    return o * c / n, c, n, m
