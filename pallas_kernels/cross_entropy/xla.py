"""Cross-entropy of a linear head in chunks of tokens, for any backend.

A chunk's logits live only while its loss is computed. Where a gradient will be asked for, the forward pass also takes
the chunk's gradients from those logits, so that nothing is computed twice: the loss is a scalar, so its incoming
gradient is one number, applied at the end.

Legend: T tokens, C tokens of a chunk, D embed, V vocab (or this shard's slice of it).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNKS = 8
LEAST_CHUNK = 128
MOST_LOGITS = 2**26
"""A chunk holds at most this many logits (256 MiB in float32) unless that is fewer than LEAST_CHUNK tokens."""


class Options(NamedTuple):
    """What does not change between traces."""

    z_loss: float
    softcap: float | None
    vocab_axis: str | None
    chunk: int


class Sums(NamedTuple):
    """What the operation returns."""

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
    vocab_axis: str | None,
    chunk: int | None,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """See ``linear_cross_entropy``: (loss, sum of nll, sum of squared lse)."""
    chunk = default_chunk(hidden.shape[0], head.shape[0]) if chunk is None else chunk
    return tuple(_sums(Options(z_loss, softcap, vocab_axis, chunk), hidden, head, targets, weights))


def default_chunk(tokens: int, vocab: int) -> int:
    """An eighth of the tokens, in multiples of LEAST_CHUNK, within MOST_LOGITS."""
    want = min(-(-tokens // CHUNKS), MOST_LOGITS // vocab)
    return max(LEAST_CHUNK, want // LEAST_CHUNK * LEAST_CHUNK)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(options: Options, hidden: Array, head: Array, targets: Array, weights: Array) -> Sums:
    def add(sums: Sums, hidden: Array, targets: Array, weights: Array) -> tuple[Sums, tuple[()]]:
        return Sums(*map(jnp.add, sums, _chunk(options, hidden, head, targets, weights).sums)), ()

    sums, _ = _over_chunks(add, _zero(weights), options.chunk, hidden, targets, weights)
    return sums


def _forward(options: Options, hidden: Array, head: Array, targets: Array, weights: Array) -> tuple[Sums, Any]:
    def add(
        carry: tuple[Sums, Array], hidden: Array, targets: Array, weights: Array
    ) -> tuple[Any, tuple[Array, Array]]:
        sums, d_head = carry
        part = _chunk(options, hidden, head, targets, weights)
        d_logits = part.d_logits().astype(hidden.dtype)
        d_hidden = jnp.einsum("cv,vd->cd", d_logits, head)
        # The small factor is transposed by hand and the sum kept transposed: as a product over its first dimension
        # the large one would be copied transposed on CPU. The barrier keeps the compiler from undoing that.
        columns = jax.lax.optimization_barrier(hidden.T)
        d_head += jnp.einsum("dc,cv->dv", columns, d_logits, preferred_element_type=weights.dtype)
        return (Sums(*map(jnp.add, sums, part.sums)), d_head), (d_hidden, part.losses)

    start = (_zero(weights), jnp.zeros_like(head.T, weights.dtype))
    (sums, d_head), (d_hidden, losses) = _over_chunks(add, start, options.chunk, hidden, targets, weights)
    return sums, (d_hidden, jax.lax.optimization_barrier(d_head).T.astype(head.dtype), losses)


def _backward(options: Options, residuals: Any, d_sums: Sums) -> tuple[Array, Array, None, Array]:
    d_hidden, d_head, losses = residuals
    d_loss = d_sums.loss  # the other two are not differentiated
    return (d_hidden * d_loss).astype(d_hidden.dtype), (d_head * d_loss).astype(d_head.dtype), None, losses * d_loss


_sums.defvjp(_forward, _backward)


class _Chunk(NamedTuple):
    """One chunk of tokens: its sums, and what its gradient needs."""

    sums: Sums
    losses: Float[Array, " C"]  # unweighted
    d_logits: Callable[[], Float[Array, "C V"]]


def _chunk(options: Options, hidden: Array, head: Array, targets: Array, weights: Array) -> _Chunk:
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
        # A softmax times d loss / d lse, less one at the target.
        slope = weights * (1.0 + 2.0 * options.z_loss * lse) / total
        hit = jnp.arange(vocab) == local[:, None]
        slopes = exps * slope[:, None] - jnp.where(hit, weights[:, None], 0.0)
        return slopes if options.softcap is None else slopes * (1.0 - jnp.square(logits / options.softcap))

    sums = Sums(jnp.sum(weights * losses), jnp.sum(weights * nll), jnp.sum(weights * z))
    return _Chunk(sums, losses, d_logits)


def _zero(weights: Array) -> Sums:
    zero = jnp.sum(jnp.zeros_like(weights))  # varies over the mesh as the weights do
    return Sums(zero, zero, zero)


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
