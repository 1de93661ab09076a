"""Cross-entropy of a linear head in bands of the vocabulary, for devices with much arithmetic for each byte.

The forward pass keeps a running maximum and sum of each token. The backward pass computes a band's logits again, now
elementwise from known sums, so that only their gradient in the operands' own dtype passes through memory, and finishes
the band's rows of the head's gradient. Four products instead of the three of ``xla.py``, which adds every chunk of
tokens to a float32 gradient of the whole head.

Legend: T tokens, C tokens of a chunk, D embed, V vocab (or this shard's slice of it), W vocab of a band.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cross_entropy import config
from pallas_kernels.cross_entropy.blockwise import LOWEST, Options, Part, Slopes, cap, sums

State = TypeVar("State")


def cross_entropy_bands(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " T"],
    weights: Float[Array, " T"],
    *,
    z_loss: float,
    softcap: float | None,
    vocab_axis: str | None,
    chunk: int | None,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """See ``linear_cross_entropy``: (loss, sum of nll, sum of squared lse)."""
    chunk = chunk or config.tokens_of_a_chunk(hidden.shape[0])
    bands = _Bands(chunk, config.vocab_of_a_band(chunk, head.shape[0]))
    return sums(bands, Options(z_loss, softcap, vocab_axis), hidden, head, targets, weights)


@dataclass(frozen=True)
class _Bands:
    """Kernels, see ``blockwise``, in plain JAX."""

    chunk: int
    band: int

    def forward(self, options: Options, hidden: Array, head: Array, local: Array, gradients: bool) -> tuple[Part, None]:
        wide = jnp.promote_types(hidden.dtype, jnp.float32)

        def band(first: Any, size: int, part: Part) -> Part:
            rows = _cut(head, first, size)

            def chunk(start: Any, count: int, part: Part) -> Part:
                products = jnp.einsum("cd,wd->cw", _cut(hidden, start, count), rows, preferred_element_type=wide)
                logits, _ = cap(products, options.softcap)
                top, total, target = (_cut(x, start, count) for x in part)
                highest = jnp.maximum(top, jnp.max(logits, axis=-1))
                total = total * jnp.exp(top - highest) + jnp.sum(jnp.exp(logits - highest[:, None]), axis=-1)
                target += jnp.sum(jnp.where(_hit(_cut(local, start, count), first, size), logits, 0.0), axis=-1)
                return Part(*(_put(x, new, start) for x, new in zip(part, (highest, total, target), strict=True)))

            return _over(hidden.shape[0], self.chunk, chunk, part)

        zero = jnp.zeros_like(local, wide)
        return _over(head.shape[0], self.band, band, Part(zero + LOWEST, zero, zero)), None

    def backward(
        self, options: Options, hidden: Array, head: Array, local: Array, slopes: Slopes, saved: None
    ) -> tuple[Array, Array]:
        wide = jnp.promote_types(hidden.dtype, jnp.float32)

        def band(first: Any, size: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
            d_hidden, d_head = state
            rows = _cut(head, first, size)

            def chunk(start: Any, count: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
                d_hidden, d_rows = state
                here = _cut(hidden, start, count)
                logits, slope = cap(jnp.einsum("cd,wd->cw", here, rows, preferred_element_type=wide), options.softcap)
                lse, of_softmax, of_target = (_cut(x, start, count)[:, None] for x in slopes)
                hit = _hit(_cut(local, start, count), first, size)
                d_logits = (of_softmax * jnp.exp(logits - lse) - jnp.where(hit, of_target, 0.0)) * slope
                d_logits = d_logits.astype(hidden.dtype)
                more = jnp.einsum("cw,wd->cd", d_logits, rows, preferred_element_type=wide)
                d_rows += jnp.einsum("cw,cd->wd", d_logits, here, preferred_element_type=wide)
                return _put(d_hidden, _cut(d_hidden, start, count) + more, start), d_rows

            d_hidden, d_rows = _over(hidden.shape[0], self.chunk, chunk, (d_hidden, jnp.zeros_like(rows, wide)))
            return d_hidden, _put(d_head, d_rows.astype(head.dtype), first)

        state = jnp.zeros_like(hidden, wide), jnp.zeros_like(head)
        d_hidden, d_head = _over(head.shape[0], self.band, band, state)
        return d_hidden.astype(hidden.dtype), d_head


def _over(total: int, size: int, step: Callable[[Any, int, State], State], state: State) -> State:
    """``step(first, size, state)`` for each whole piece, then for what is left."""
    whole, rest = divmod(total, size)
    if whole == 1:
        state = step(0, size, state)
    elif whole:
        state = jax.lax.fori_loop(0, whole, lambda i, state: step(i * size, size, state), state)
    return step(whole * size, rest, state) if rest else state


def _hit(local: Int[Array, " C"], first: Any, size: int) -> Array:
    return jnp.arange(size) == (local - first)[:, None]


def _cut(x: Array, start: Any, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size)


def _put(x: Array, part: Array, start: Any) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, 0)
