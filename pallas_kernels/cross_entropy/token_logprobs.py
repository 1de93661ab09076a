"""Fused token log-probabilities and entropies of their distributions, for objectives over single tokens.

In plain JAX over tiles of tokens by vocabulary: the forward pass keeps each token's running maximum and sums (online
softmax), the backward pass recomputes a tile's logits. With ``p = softmax(logits)`` and entropy ``H``, the gradients by
a logit are ``[is target] - p`` for the log-probability and ``-p (log p + H)`` for the entropy.

Legend: T tokens, C tokens of a chunk, D embed, V vocab (or this shard's slice of it), W vocab of a band.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_over, varying_axes
from pallas_kernels._pallas import MASK_VALUE
from pallas_kernels.cross_entropy import config
from pallas_kernels.cross_entropy.bands import fold_blocks, is_target, slice_rows, update_rows
from pallas_kernels.cross_entropy.blockwise import LossOptions, apply_softcap, axes_of, local_targets


def linear_token_logprobs(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " T"],
    softcap: float | None = None,
    vocab_axis: str | tuple[str, ...] | None = None,
    *,
    chunk: int | None = None,
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Log-probability of each target and entropy of each token's distribution, of the logits ``hidden @ head.T``.

    Args:
        hidden: hidden states, the input of the output head.
        head: output matrix; with ``vocab_axis``, this shard's rows of it, slices in the order of the axis.
        targets: token ids. A target outside [0, vocabulary) counts as a logit of zero: mask what comes of it.
        softcap: soft cap of the logits, as in ``linear_cross_entropy``.
        vocab_axis: mesh axis or axes over which the vocabulary is split, as in ``linear_cross_entropy``; the results
            are replicated over its shards.
        chunk: number of tokens of a tile; None chooses.

    Returns:
        log-probabilities and entropies, in nats and at least float32. Both are differentiable in hidden and head.

    Raises:
        ValueError: ``head`` does not vary over ``vocab_axis``, chunk < 1, or the soft cap is not positive.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"linear_token_logprobs: chunk = {chunk}; it must be at least 1 token, or None.")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"linear_token_logprobs: softcap = {softcap}; give a positive number, or None for none.")
    split = axes_of(vocab_axis)
    if not split <= varying_axes(head) or split & varying_axes(targets):
        raise ValueError(
            f"linear_token_logprobs: head must vary over vocab_axis {vocab_axis!r}, and targets must not; call inside "
            "jax.shard_map with check_vma=True, head split over that axis and targets replicated."
        )
    axes = varying_axes(hidden, head, targets)
    chunk = chunk or config.chunk_tokens(hidden.shape[0])
    tiles = _Tiles(chunk, config.band_vocab(chunk, head.shape[0]), LossOptions(0.0, softcap, vocab_axis))
    return _logprobs(tiles, vary_over(hidden, axes), vary_over(head, axes), vary_over(targets, axes - split))


class _Tiles(NamedTuple):
    """Static options: tokens and vocabulary columns of a tile, soft cap and vocabulary axis."""

    chunk: int
    band: int
    options: LossOptions


class _Stats(NamedTuple):
    """Online-softmax statistics of each token over one slice of the vocabulary."""

    top: Float[Array, " T"]  # largest logit
    total: Float[Array, " T"]  # sum of exp(logit - top)
    moment: Float[Array, " T"]  # sum of exp(logit - top) * (logit - top)
    target: Float[Array, " T"]  # logit of the target; zero where the target is not in the slice

    def moved(self, top: Array) -> _Stats:
        """Statistics relative to a higher ``top``."""
        scale, drop = jnp.exp(self.top - top), self.top - top
        return _Stats(top, self.total * scale, scale * (self.moment + drop * self.total), self.target)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(
    tiles: _Tiles, hidden: Array, head: Array, targets: Array
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    return _forward(tiles, hidden, head, targets)[0]


def _forward(tiles: _Tiles, hidden: Array, head: Array, targets: Array) -> tuple[tuple[Array, Array], Any]:
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    local, axis = local_targets(tiles.options, head, targets), tiles.options.vocab_axis

    def band(first: Any, size: int, stats: _Stats) -> _Stats:
        rows = slice_rows(head, first, size)

        def chunk(start: Any, count: int, stats: _Stats) -> _Stats:
            products = jnp.einsum("cd,wd->cw", slice_rows(hidden, start, count), rows, preferred_element_type=wide)
            logits, _ = apply_softcap(products, tiles.options.softcap)
            part = _Stats(*(slice_rows(x, start, count) for x in stats))
            part = part.moved(jnp.maximum(part.top, jnp.max(logits, axis=-1)))
            below = logits - part.top[:, None]
            exps = jnp.exp(below)
            hit = is_target(slice_rows(local, start, count), first, size)
            found = part._replace(
                total=part.total + jnp.sum(exps, axis=-1),
                moment=part.moment + jnp.sum(exps * below, axis=-1),
                target=part.target + jnp.sum(jnp.where(hit, logits, 0.0), axis=-1),
            )
            return _Stats(*(update_rows(x, new, start) for x, new in zip(stats, found, strict=True)))

        return fold_blocks(hidden.shape[0], tiles.chunk, chunk, stats)

    zero = jnp.zeros_like(local, wide)
    stats = fold_blocks(head.shape[0], tiles.band, band, _Stats(zero + MASK_VALUE, zero, zero, zero))
    if axis is not None:
        stats = stats.moved(jax.lax.pmax(stats.top, axis))
        total, moment, target = jax.lax.psum((stats.total, stats.moment, stats.target), axis)
        stats = _Stats(stats.top, total, moment, target)
    log_total = jnp.log(stats.total)
    lse, entropy = stats.top + log_total, log_total - stats.moment / stats.total
    return (stats.target - lse, entropy), (hidden, head, targets, lse, entropy)


def _backward(tiles: _Tiles, residuals: Any, slopes: tuple[Array, Array]) -> tuple[Array, Array, None]:
    hidden, head, targets, lse, entropy = residuals
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    local = local_targets(tiles.options, head, targets)
    terms = [vary_over(x, varying_axes(hidden)) for x in (lse, entropy, *slopes)]

    def band(first: Any, size: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_head = state
        rows = slice_rows(head, first, size)

        def chunk(start: Any, count: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
            d_hidden, d_rows = state
            here = slice_rows(hidden, start, count)
            products = jnp.einsum("cd,wd->cw", here, rows, preferred_element_type=wide)
            logits, slope = apply_softcap(products, tiles.options.softcap)
            lse, entropy, of_logprob, of_entropy = (slice_rows(x, start, count)[:, None] for x in terms)
            logprobs = logits - lse
            hit = is_target(slice_rows(local, start, count), first, size)
            spread = jnp.exp(logprobs) * (of_logprob + of_entropy * (logprobs + entropy))
            d_logits = ((jnp.where(hit, of_logprob, 0.0) - spread) * slope).astype(hidden.dtype)
            more = jnp.einsum("cw,wd->cd", d_logits, rows, preferred_element_type=wide)
            d_rows += jnp.einsum("cw,cd->wd", d_logits, here, preferred_element_type=wide)
            return update_rows(d_hidden, slice_rows(d_hidden, start, count) + more, start), d_rows

        d_hidden, d_rows = fold_blocks(hidden.shape[0], tiles.chunk, chunk, (d_hidden, jnp.zeros_like(rows, wide)))
        return d_hidden, update_rows(d_head, d_rows.astype(head.dtype), first)

    state = jnp.zeros_like(hidden, wide), jnp.zeros_like(head)
    d_hidden, d_head = fold_blocks(head.shape[0], tiles.band, band, state)
    return d_hidden.astype(hidden.dtype), d_head, None


_logprobs.defvjp(_forward, _backward)
