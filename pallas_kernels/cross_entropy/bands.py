"""Fused linear cross-entropy in plain JAX over vocabulary tiles (bands), for devices with high arithmetic intensity.

The forward pass keeps each token's running maximum and sum (online softmax). The backward pass recomputes a band's
logits, elementwise from the known logsumexp, so that only the logit gradients in the operands' own dtype pass through
memory, and finishes the band's rows of the head's gradient. Four matmuls instead of the three of ``xla.py``, which
adds every chunk of tokens to a float32 gradient of the whole head.

Legend: T tokens, C tokens of a chunk, D embed, V vocab (or this shard's slice of it), W vocab of a band.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._pallas import MASK_VALUE
from pallas_kernels.cross_entropy import config
from pallas_kernels.cross_entropy.blockwise import (
    LogitGradTerms,
    LossOptions,
    SoftmaxStats,
    apply_softcap,
    sums,
)

State = TypeVar("State")


def cross_entropy_bands(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " T"],
    weights: Float[Array, " T"],
    *,
    z_loss: float,
    softcap: float | None,
    vocab_axis: str | tuple[str, ...] | None,
    chunk: int | None,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Fused cross-entropy over vocabulary bands: (loss, sum of nll, sum of lse^2); see ``linear_cross_entropy``."""
    chunk = chunk or config.chunk_tokens(hidden.shape[0])
    bands = _VocabBands(chunk, config.band_vocab(chunk, head.shape[0]))
    return sums(bands, LossOptions(z_loss, softcap, vocab_axis), hidden, head, targets, weights)


@dataclass(frozen=True)
class _VocabBands:
    """``CrossEntropyKernels`` in plain JAX, see ``blockwise``."""

    chunk: int
    band: int

    def forward(
        self, options: LossOptions, hidden: Array, head: Array, local: Array, gradients: bool
    ) -> tuple[SoftmaxStats, None]:
        wide = jnp.promote_types(hidden.dtype, jnp.float32)

        def band(first: Any, size: int, part: SoftmaxStats) -> SoftmaxStats:
            rows = slice_rows(head, first, size)

            def chunk(start: Any, count: int, part: SoftmaxStats) -> SoftmaxStats:
                products = jnp.einsum("cd,wd->cw", slice_rows(hidden, start, count), rows, preferred_element_type=wide)
                logits, _ = apply_softcap(products, options.softcap)
                top, total, target = (slice_rows(x, start, count) for x in part)
                highest = jnp.maximum(top, jnp.max(logits, axis=-1))
                total = total * jnp.exp(top - highest) + jnp.sum(jnp.exp(logits - highest[:, None]), axis=-1)
                target += jnp.sum(
                    jnp.where(is_target(slice_rows(local, start, count), first, size), logits, 0.0), axis=-1
                )
                return SoftmaxStats(
                    *(update_rows(x, new, start) for x, new in zip(part, (highest, total, target), strict=True))
                )

            return fold_blocks(hidden.shape[0], self.chunk, chunk, part)

        zero = jnp.zeros_like(local, wide)
        return fold_blocks(head.shape[0], self.band, band, SoftmaxStats(zero + MASK_VALUE, zero, zero)), None

    def backward(
        self, options: LossOptions, hidden: Array, head: Array, local: Array, slopes: LogitGradTerms, saved: None
    ) -> tuple[Array, Array]:
        wide = jnp.promote_types(hidden.dtype, jnp.float32)

        def band(first: Any, size: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
            d_hidden, d_head = state
            rows = slice_rows(head, first, size)

            def chunk(start: Any, count: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
                d_hidden, d_rows = state
                here = slice_rows(hidden, start, count)
                logits, slope = apply_softcap(
                    jnp.einsum("cd,wd->cw", here, rows, preferred_element_type=wide), options.softcap
                )
                lse, of_softmax, of_target = (slice_rows(x, start, count)[:, None] for x in slopes)
                hit = is_target(slice_rows(local, start, count), first, size)
                d_logits = (of_softmax * jnp.exp(logits - lse) - jnp.where(hit, of_target, 0.0)) * slope
                d_logits = d_logits.astype(hidden.dtype)
                more = jnp.einsum("cw,wd->cd", d_logits, rows, preferred_element_type=wide)
                d_rows += jnp.einsum("cw,cd->wd", d_logits, here, preferred_element_type=wide)
                return update_rows(d_hidden, slice_rows(d_hidden, start, count) + more, start), d_rows

            d_hidden, d_rows = fold_blocks(hidden.shape[0], self.chunk, chunk, (d_hidden, jnp.zeros_like(rows, wide)))
            return d_hidden, update_rows(d_head, d_rows.astype(head.dtype), first)

        state = jnp.zeros_like(hidden, wide), jnp.zeros_like(head)
        d_hidden, d_head = fold_blocks(head.shape[0], self.band, band, state)
        return d_hidden.astype(hidden.dtype), d_head


def fold_blocks(total: int, size: int, step: Callable[[Any, int, State], State], state: State) -> State:
    """Folds ``step(first, size, state)`` over the whole blocks of ``size``, then over the remainder."""
    whole, rest = divmod(total, size)
    if whole == 1:
        state = step(0, size, state)
    elif whole:
        state = jax.lax.fori_loop(0, whole, lambda i, state: step(i * size, size, state), state)
    return step(whole * size, rest, state) if rest else state


def is_target(local: Int[Array, " C"], first: Any, size: int) -> Array:
    """Whether a column of a band is the token's target: Bool[C W]."""
    return jnp.arange(size) == (local - first)[:, None]


def slice_rows(x: Array, start: Any, size: int) -> Array:
    """``size`` rows from ``start`` on, which may be traced."""
    return jax.lax.dynamic_slice_in_dim(x, start, size)


def update_rows(x: Array, part: Array, start: Any) -> Array:
    """``x`` with the rows from ``start`` on replaced by ``part``."""
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, 0)
