"""Fused linear cross-entropy in plain JAX over chunks of tokens, for any backend.

A chunk's logits live only while its loss is computed. Where a gradient will be needed, the forward pass also computes
the chunk's gradients from those logits, so nothing is recomputed: the loss is a scalar, so its incoming gradient is
one factor, applied at the end.

Legend: T tokens, C tokens of a chunk, D embed, V vocab (or this shard's slice of it).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

DEFAULT_CHUNKS = 8
MIN_CHUNK = 128
MAX_LOGITS = 2**26
"""Most logits of a chunk (256 MiB in float32), unless that is fewer than MIN_CHUNK tokens."""


class ChunkedLossOptions(NamedTuple):
    """Static options of the chunked loss, the nondifferentiable argument of ``_sums``."""

    z_loss: float
    softcap: float | None
    vocab_axis: str | tuple[str, ...] | None
    chunk: int


class CrossEntropySums(NamedTuple):
    """Loss and its two statistics, as the operation returns them."""

    loss: Float[Array, ""]
    nll: Float[Array, ""]
    z: Float[Array, ""]


def cross_entropy_xla(
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
    """Fused cross-entropy over token chunks: (loss, sum of nll, sum of squared lse); see ``linear_cross_entropy``."""
    chunk = default_chunk(hidden.shape[0], head.shape[0]) if chunk is None else chunk
    return tuple(_sums(ChunkedLossOptions(z_loss, softcap, vocab_axis, chunk), hidden, head, targets, weights))


def default_chunk(tokens: int, vocab: int) -> int:
    """Default chunk size: an eighth of the tokens, in multiples of MIN_CHUNK, within MAX_LOGITS."""
    want = min(-(-tokens // DEFAULT_CHUNKS), MAX_LOGITS // vocab)
    return max(MIN_CHUNK, want // MIN_CHUNK * MIN_CHUNK)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(options: ChunkedLossOptions, hidden: Array, head: Array, targets: Array, weights: Array) -> CrossEntropySums:
    def add(
        sums: CrossEntropySums, hidden: Array, targets: Array, weights: Array
    ) -> tuple[CrossEntropySums, tuple[()]]:
        return CrossEntropySums(*map(jnp.add, sums, _chunk(options, hidden, head, targets, weights).sums)), ()

    sums, _ = _over_chunks(add, _zero(weights), options.chunk, hidden, targets, weights)
    return sums


def _forward(
    options: ChunkedLossOptions, hidden: Array, head: Array, targets: Array, weights: Array
) -> tuple[CrossEntropySums, Any]:
    def add(
        carry: tuple[CrossEntropySums, Array], hidden: Array, targets: Array, weights: Array
    ) -> tuple[Any, tuple[Array, Array]]:
        sums, d_head = carry
        part = _chunk(options, hidden, head, targets, weights)
        d_logits = part.d_logits().astype(hidden.dtype)
        d_hidden = jnp.einsum("cv,vd->cd", d_logits, head)
        # The small operand is transposed explicitly and the gradient kept transposed: contracting the first dimension
        # of the large operand would copy it transposed on CPU. The barrier keeps XLA from undoing this.
        columns = jax.lax.optimization_barrier(hidden.T)
        d_head += jnp.einsum("dc,cv->dv", columns, d_logits, preferred_element_type=weights.dtype)
        return (CrossEntropySums(*map(jnp.add, sums, part.sums)), d_head), (d_hidden, part.losses)

    start = (_zero(weights), jnp.zeros_like(head.T, weights.dtype))
    (sums, d_head), (d_hidden, losses) = _over_chunks(add, start, options.chunk, hidden, targets, weights)
    return sums, (d_hidden, jax.lax.optimization_barrier(d_head).T.astype(head.dtype), losses)


def _backward(
    options: ChunkedLossOptions, residuals: Any, d_sums: CrossEntropySums
) -> tuple[Array, Array, None, Array]:
    d_hidden, d_head, losses = residuals
    d_loss = d_sums.loss  # the two statistics are not differentiable
    return (d_hidden * d_loss).astype(d_hidden.dtype), (d_head * d_loss).astype(d_head.dtype), None, losses * d_loss


_sums.defvjp(_forward, _backward)


class _Chunk(NamedTuple):
    """Loss sums of one chunk of tokens, and the closure that computes its logit gradients."""

    sums: CrossEntropySums
    losses: Float[Array, " C"]  # unweighted
    d_logits: Callable[[], Float[Array, "C V"]]


def _chunk(options: ChunkedLossOptions, hidden: Array, head: Array, targets: Array, weights: Array) -> _Chunk:
    axis, vocab = options.vocab_axis, head.shape[0]
    logits = jnp.einsum("cd,vd->cv", hidden, head, preferred_element_type=weights.dtype)
    if options.softcap is not None:
        logits = options.softcap * jnp.tanh(logits / options.softcap)
    local = targets if axis is None else targets - jax.lax.axis_index(axis) * vocab
    held = (local >= 0) & (local < vocab)
    top = jnp.max(logits, axis=-1)
    target = jnp.take_along_axis(logits, jnp.where(held, local, 0)[:, None], axis=-1)[:, 0]
    target = jnp.where(held, target, 0.0)
    if axis is not None:
        top = jax.lax.pmax(top, axis)
    exps = jnp.exp(logits - top[:, None])
    total = jnp.sum(exps, axis=-1)
    if axis is not None:
        total, target = jax.lax.psum((total, target), axis)
    lse = top + jnp.log(total)
    nll, z = lse - target, jnp.square(lse)
    losses = nll + options.z_loss * z

    def d_logits() -> Array:
        # softmax * (d loss / d lse) - weight at the target.
        slope = weights * (1.0 + 2.0 * options.z_loss * lse) / total
        hit = jnp.arange(vocab) == local[:, None]
        slopes = exps * slope[:, None] - jnp.where(hit, weights[:, None], 0.0)
        return slopes if options.softcap is None else slopes * (1.0 - jnp.square(logits / options.softcap))

    sums = CrossEntropySums(jnp.sum(weights * losses), jnp.sum(weights * nll), jnp.sum(weights * z))
    return _Chunk(sums, losses, d_logits)


def _zero(weights: Array) -> CrossEntropySums:
    zero = jnp.sum(jnp.zeros_like(weights))  # varies over the same mesh axes as the weights
    return CrossEntropySums(zero, zero, zero)


def _over_chunks(step: Callable[..., tuple[Any, Any]], carry: Any, chunk: int, *arrays: Array) -> tuple[Any, Any]:
    """Scans ``step(carry, *parts) -> (carry, outs)`` over ``chunk`` rows at a time; the last part may be shorter."""
    tokens = arrays[0].shape[0]
    whole = tokens // chunk
    cut = whole * chunk
    outs = []
    if whole:
        parts = [x[:cut].reshape(whole, chunk, *x.shape[1:]) for x in arrays]
        carry, out = jax.lax.scan(lambda c, xs: step(c, *xs), carry, parts)
        outs.append(jax.tree.map(lambda x: x.reshape(cut, *x.shape[2:]), out))
    if cut < tokens:
        carry, out = step(carry, *(x[cut:] for x in arrays))
        outs.append(out)
    return carry, jax.tree.map(lambda *xs: xs[0] if len(xs) == 1 else jnp.concatenate(xs), *outs)
