"""Fused linear cross-entropy shared by the kernels: the loss from per-slice softmax statistics, and its custom VJP.

A kernel computes tiles of logits and keeps, for each token, the largest logit, the sum of exponentials and the
target's logit. No array of size tokens x vocabulary outlives a tile (or, on GPUs, a narrow vocabulary band).

Legend: T tokens, D embed, V vocab (or this shard's slice of it).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_over, varying_axes

NO_TARGET = -1
"""Local index of a token whose target is not in this shard's slice of the vocabulary."""


def axes_of(vocab_axis: str | tuple[str, ...] | None) -> frozenset[str]:
    """Mesh axes over which the vocabulary is split."""
    return frozenset([vocab_axis] if isinstance(vocab_axis, str) else vocab_axis or ())


class LossOptions(NamedTuple):
    """Static options of the loss, the nondifferentiable argument of ``sums``."""

    z_loss: float
    softcap: float | None
    vocab_axis: str | tuple[str, ...] | None


class SoftmaxStats(NamedTuple):
    """Online-softmax statistics of each token over one slice of the vocabulary."""

    top: Float[Array, " T"]  # largest logit
    total: Float[Array, " T"]  # sum of exp(logit - top)
    target: Float[Array, " T"]  # logit of the target; zero where the target is not in the slice


class LogitGradTerms(NamedTuple):
    """Per-token terms of the logits' gradient.

    A logit's gradient is ``(softmax * exp(logit - lse) - target * is_target) * derivative of the soft cap``.
    """

    lse: Float[Array, " T"]
    softmax: Float[Array, " T"]
    target: Float[Array, " T"]


@runtime_checkable
class CrossEntropyKernels(Protocol):
    """Interface of a platform's forward and backward kernels."""

    def forward(
        self, options: LossOptions, hidden: Array, head: Array, local: Int[Array, " T"], gradients: bool
    ) -> tuple[SoftmaxStats, Any]:
        """Softmax statistics of each token, and the residuals that ``backward`` receives if ``gradients`` is true."""
        ...

    def backward(
        self,
        options: LossOptions,
        hidden: Array,
        head: Array,
        local: Int[Array, " T"],
        slopes: LogitGradTerms,
        saved: Any,
    ) -> tuple[Float[Array, "T D"], Float[Array, "V D"]]:
        """Gradients of hidden and head."""
        ...


def apply_softcap(products: Array, softcap: float | None) -> tuple[Array, Array | float]:
    """Soft-capped logits and their derivative with respect to the uncapped ones; (logits, 1.0) without a cap."""
    if softcap is None:
        return products, 1.0
    part = jnp.tanh(products * (1 / softcap))
    return softcap * part, 1.0 - part * part


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sums(
    kernels: CrossEntropyKernels, options: LossOptions, hidden: Array, head: Array, targets: Array, weights: Array
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Loss sums (loss, sum of nll, sum of squared lse) by a platform's kernels; only the loss is differentiable."""
    part, _ = kernels.forward(options, hidden, head, local_targets(options, head, targets), False)
    return _weighted_sums(options, weights, *_over_vocabulary(options, part))


def _forward(
    kernels: CrossEntropyKernels, options: LossOptions, hidden: Array, head: Array, targets: Array, weights: Array
) -> tuple[tuple[Array, Array, Array], Any]:
    part, saved = kernels.forward(options, hidden, head, local_targets(options, head, targets), True)
    lse, target = _over_vocabulary(options, part)
    return _weighted_sums(options, weights, lse, target), (hidden, head, targets, weights, lse, target, saved)


def _backward(
    kernels: CrossEntropyKernels, options: LossOptions, residuals: Any, d_sums: tuple[Array, ...]
) -> tuple[Any, ...]:
    hidden, head, targets, weights, lse, target, saved = residuals
    d_nll = weights * d_sums[0]  # the two statistics are not differentiable
    slopes = LogitGradTerms(lse, d_nll * (1.0 + 2.0 * options.z_loss * lse), d_nll)
    slopes = LogitGradTerms(*(vary_over(x, varying_axes(hidden)) for x in slopes))
    d_hidden, d_head = kernels.backward(options, hidden, head, local_targets(options, head, targets), slopes, saved)
    return d_hidden, d_head, None, d_sums[0] * (lse - target + options.z_loss * lse**2)


sums.defvjp(_forward, _backward)


def local_targets(options: LossOptions, head: Array, targets: Array) -> Int[Array, " T"]:
    """Targets as row indices of this shard's head; ``NO_TARGET`` for targets of other shards."""
    vocab, local = head.shape[0], targets.astype(jnp.int32)
    if options.vocab_axis is not None:
        first = jax.lax.axis_index(options.vocab_axis).astype(jnp.int32) * vocab
        # Compare before subtracting: the difference could wrap around.
        held = (targets >= first) & (targets < first + vocab)
        return jnp.where(held, local - first, NO_TARGET)
    return vary_over(jnp.where((targets >= 0) & (targets < vocab), local, NO_TARGET), varying_axes(head))


def _over_vocabulary(options: LossOptions, part: SoftmaxStats) -> tuple[Array, Array]:
    """(logsumexp, logit of the target) over the whole vocabulary, reduced over ``vocab_axis``."""
    top, total, target = part
    if options.vocab_axis is not None:
        top = jax.lax.pmax(part.top, options.vocab_axis)
        total = jax.lax.psum(part.total * jnp.exp(part.top - top), options.vocab_axis)
        target = jax.lax.psum(part.target, options.vocab_axis)
    return top + jnp.log(total), target


def _weighted_sums(options: LossOptions, weights: Array, lse: Array, target: Array) -> tuple[Array, Array, Array]:
    nll, z = jnp.sum(weights * (lse - target)), jnp.sum(weights * lse**2)
    return nll + options.z_loss * z, nll, z
