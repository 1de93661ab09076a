"""Head-wise recurrent network in plain JAX, for any backend: ``jax.lax.scan`` over the tokens in both directions.

Legend: B batch, S sequence, N heads, G gates, H head dim, I the same as H: inputs of a recurrent matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._compat import vary_over, varying_axes
from pallas_kernels.recurrent.cells import CELLS
from pallas_kernels.recurrent.recurrent_loops import States, StatesBefore, StepGrads, two_loops


def recurrent_xla(
    cell: str,
    x: Float[Array, "B S N G H"],
    recurrent: Float[Array, "N G I H"],
    bias: Float[Array, "N G H"],
    resets: Bool[Array, "B S"],
    initial: States,
) -> tuple[Float[Array, "B S N H"], States]:
    """Recurrent network in plain JAX; see ``pallas_kernels.recurrent.recurrent``."""
    return two_loops(ScanLoop(), cell, x, recurrent, bias, resets, initial)


@dataclass(frozen=True)
class ScanLoop:
    """Loops of a recurrent network by ``jax.lax.scan``."""

    def forward(
        self, cell: str, x: Array, recurrent: Array, bias: Array, resets: Array, initial: States, *, save: bool
    ) -> tuple[Array, States, StatesBefore]:
        """Hidden states, last states, and the states before each token."""
        dtype = jnp.promote_types(x.dtype, jnp.float32)

        def step(states: States, token: tuple[Array, Array]) -> tuple[States, Any]:
            x, reset = token
            states = tuple(jnp.where(reset[:, None, None], 0, state) for state in states)
            after = CELLS[cell].forward(_gates(x, dtype), _terms(states[0], recurrent, bias, dtype), states)
            return after, (after[0].astype(x.dtype), states if save else ())

        axes = varying_axes(x, recurrent, bias, resets, *initial)
        initial = tuple(vary_over(state.astype(dtype), axes) for state in initial)
        last, (out, before) = jax.lax.scan(step, initial, (jnp.moveaxis(x, 1, 0), resets.T))
        return jnp.moveaxis(out, 0, 1), last, tuple(jnp.moveaxis(one, 0, 1) for one in before)

    def backward(
        self,
        cell: str,
        x: Array,
        recurrent: Array,
        bias: Array,
        resets: Array,
        before: StatesBefore,
        d_out: Array,
        d_last: States,
    ) -> StepGrads:
        """Gradients of one pass over the tokens in reverse."""
        kind, dtype = CELLS[cell], jnp.promote_types(x.dtype, jnp.float32)

        def step(grads: States, token: Any) -> tuple[States, Any]:
            x, reset, states, d_out = token
            grads = (grads[0] + d_out.astype(dtype), *grads[1:])
            a = _terms(states[0], recurrent, bias, dtype)
            d_x, d_a, d_states = kind.backward(_gates(x, dtype), a, states, grads)
            d_x, d_terms = (jnp.stack(one, axis=2).astype(x.dtype) for one in (d_x, d_a))
            d_h = jnp.einsum("bngh,ngih->bni", d_terms, recurrent, preferred_element_type=dtype)
            d_states = (d_states[0] + d_h, *d_states[1:])
            d_states = tuple(jnp.where(reset[:, None, None], 0, one) for one in d_states)
            return d_states, (d_x, d_terms if cell == "gru" else None)

        tokens = (jnp.moveaxis(x, 1, 0), resets.T, tuple(jnp.moveaxis(one, 1, 0) for one in before))
        axes = varying_axes(x, recurrent, bias, resets, d_out, *before)
        last = tuple(vary_over(one.astype(dtype), axes) for one in d_last[: kind.grads])
        first, (inputs, terms) = jax.lax.scan(step, last, (*tokens, jnp.moveaxis(d_out, 1, 0)), reverse=True)
        return StepGrads(jnp.moveaxis(inputs, 0, 1), None if terms is None else jnp.moveaxis(terms, 0, 1), tuple(first))


def _gates(x: Float[Array, "B N G H"], dtype: jnp.dtype) -> tuple[Array, ...]:
    return tuple(x[:, :, g].astype(dtype) for g in range(x.shape[2]))


def _terms(h: Float[Array, "B N H"], recurrent: Array, bias: Array, dtype: jnp.dtype) -> tuple[Array, ...]:
    """Recurrent terms of each gate: the hidden state, rounded to the matrices' dtype, times them, plus the bias."""
    a = jnp.einsum("bni,ngih->bngh", h.astype(recurrent.dtype), recurrent, preferred_element_type=dtype)
    a = a + bias.astype(dtype)
    return tuple(a[:, :, g] for g in range(a.shape[2]))
