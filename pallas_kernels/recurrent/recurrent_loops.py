"""Custom VJP of the recurrent networks that go through the tokens twice: forward, and in reverse for gradients.

The forward pass saves the states before each token, in float32; the backward pass recomputes the gates from them. The
gradient of the recurrent matrices is one matmul over all tokens after the loop (FlashRNN, arXiv:2412.07752).

Legend: B batch, S sequence, N heads, G gates, H head dim, I the same as H: inputs of a recurrent matrix.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from pallas_kernels.flash_attention import RESIDUALS
from pallas_kernels.recurrent.cells import CELLS

States = tuple[Array, ...]
"""States of a cell, [B N H] each."""
StatesBefore = tuple[Array, ...]
"""States before each token, [B S N H] each."""


class StepGrads(NamedTuple):
    """Gradients that the backward loop computes.

    Attributes:
        inputs: of the gate inputs.
        terms: of the recurrent terms, where they are not those of the gate inputs; None where they are.
        initial: of the initial states that carry one.
    """

    inputs: Float[Array, "B S N G H"]
    terms: Float[Array, "B S N G H"] | None
    initial: States


@runtime_checkable
class RecurrentLoop(Protocol):
    """Protocol of an implementation: the two loops over the tokens. Instances are hashable."""

    def forward(
        self, cell: str, x: Array, recurrent: Array, bias: Array, resets: Array, initial: States, *, save: bool
    ) -> tuple[Array, States, StatesBefore]:
        """Hidden states, last states, and if ``save`` the states before each token, after resets."""
        ...

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
        ...


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def two_loops(
    loop: RecurrentLoop,
    cell: str,
    x: Float[Array, "B S N G H"],
    recurrent: Float[Array, "N G I H"],
    bias: Float[Array, "N G H"],
    resets: Bool[Array, "B S"],
    initial: States,
) -> tuple[Float[Array, "B S N H"], States]:
    """Recurrent network by the loops of an implementation; see ``pallas_kernels.recurrent.recurrent``."""
    out, last, _ = loop.forward(cell, x, recurrent, bias, resets, initial, save=False)
    return out, last


def _forward(
    loop: RecurrentLoop, cell: str, x: Array, recurrent: Array, bias: Array, resets: Array, initial: States
) -> tuple[tuple[Array, States], tuple[Any, ...]]:
    # Gradient checkpointing keeps gate inputs as it keeps queries, and states as it keeps the results of attention.
    x = checkpoint_name(x, RESIDUALS[0])
    out, last, before = loop.forward(cell, x, recurrent, bias, resets, initial, save=True)
    out, *before = (checkpoint_name(one, RESIDUALS[3]) for one in (out, *before))
    return (out, last), (x, recurrent, bias, resets, tuple(before))


def _backward(loop: RecurrentLoop, cell: str, residuals: tuple[Any, ...], grads: tuple[Array, States]) -> tuple:
    x, recurrent, bias, resets, before = residuals
    d_out, d_last = grads
    found = loop.backward(cell, x, recurrent, bias, resets, before, d_out, d_last)
    terms, wide = found.inputs if found.terms is None else found.terms, jnp.promote_types(x.dtype, jnp.float32)
    h = before[0].astype(terms.dtype)
    d_recurrent = jnp.einsum("bsni,bsngh->ngih", h, terms, preferred_element_type=wide)
    d_bias = jnp.sum(terms, axis=(0, 1), dtype=wide)
    still = [jnp.zeros_like(state) for state in d_last[CELLS[cell].grads :]]
    return (
        found.inputs.astype(x.dtype),
        d_recurrent.astype(recurrent.dtype),
        d_bias.astype(bias.dtype),
        None,
        (*found.initial, *still),
    )


two_loops.defvjp(_forward, _backward)
