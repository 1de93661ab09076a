"""What the Pallas kernels for TPU and GPU share: the loss made of what each slice of the vocabulary says, its gradient.

A kernel sees blocks of logits and keeps, for each token, the largest logit, the sum of exponentials and the target's
logit. Nothing of the size tokens x vocabulary outlives a block (or, on GPUs, a narrow band of the vocabulary).

Legend: T tokens, D embed, V vocab (or this shard's slice of it).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_over, varying_axes

LOWEST = -0.5 * float(np.finfo(np.float32).max)
"""A finite stand-in for minus infinity, small enough that the difference of two stays finite."""
NOWHERE = -1
"""The target of a token whose target is not in this slice."""


class Options(NamedTuple):
    """What does not change between traces."""

    z_loss: float
    softcap: float | None
    vocab_axis: str | None


class Part(NamedTuple):
    """What a slice of the vocabulary says of each token."""

    top: Float[Array, " T"]  # the largest logit
    total: Float[Array, " T"]  # sum of exp(logit - top)
    target: Float[Array, " T"]  # logit of the target; zero where it is not in the slice


class Slopes(NamedTuple):
    """A logit's gradient is ``(softmax * exp(logit - lse) - target * (is it the target's)) * slope of its cap``."""

    lse: Float[Array, " T"]
    softmax: Float[Array, " T"]
    target: Float[Array, " T"]


@runtime_checkable
class Kernels(Protocol):
    """What a platform provides."""

    def forward(
        self, options: Options, hidden: Array, head: Array, local: Int[Array, " T"], gradients: bool
    ) -> tuple[Part, Any]:
        """The part, and what ``backward`` is to be given, if it will be called."""
        ...

    def backward(
        self, options: Options, hidden: Array, head: Array, local: Int[Array, " T"], slopes: Slopes, saved: Any
    ) -> tuple[Float[Array, "T D"], Float[Array, "V D"]]:
        """Gradients of hidden and head."""
        ...


def cap(products: Array, softcap: float | None) -> tuple[Array, Array | float]:
    """(logits, their derivative by the products)."""
    if softcap is None:
        return products, 1.0
    part = jnp.tanh(products * (1 / softcap))
    return softcap * part, 1.0 - part * part


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sums(
    kernels: Kernels, options: Options, hidden: Array, head: Array, targets: Array, weights: Array
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """(loss, sum of nll, sum of squared lse) by a platform's kernels; only the loss is differentiable."""
    part, _ = kernels.forward(options, hidden, head, _local(options, head, targets), False)
    return _sums(options, weights, *_whole(options, part))


def _forward(
    kernels: Kernels, options: Options, hidden: Array, head: Array, targets: Array, weights: Array
) -> tuple[tuple[Array, Array, Array], Any]:
    part, saved = kernels.forward(options, hidden, head, _local(options, head, targets), True)
    lse, target = _whole(options, part)
    return _sums(options, weights, lse, target), (hidden, head, targets, weights, lse, target, saved)


def _backward(kernels: Kernels, options: Options, residuals: Any, d_sums: tuple[Array, ...]) -> tuple[Any, ...]:
    hidden, head, targets, weights, lse, target, saved = residuals
    d_nll = weights * d_sums[0]  # the other two are not differentiated
    slopes = Slopes(lse, d_nll * (1.0 + 2.0 * options.z_loss * lse), d_nll)
    slopes = Slopes(*(vary_over(x, varying_axes(hidden)) for x in slopes))
    d_hidden, d_head = kernels.backward(options, hidden, head, _local(options, head, targets), slopes, saved)
    return d_hidden, d_head, None, d_sums[0] * (lse - target + options.z_loss * lse**2)


sums.defvjp(_forward, _backward)


def _local(options: Options, head: Array, targets: Array) -> Int[Array, " T"]:
    """Targets as rows of this shard's head."""
    vocab, local = head.shape[0], targets.astype(jnp.int32)
    if options.vocab_axis is not None:
        first = jax.lax.axis_index(options.vocab_axis).astype(jnp.int32) * vocab
        # Compared before anything is subtracted, which could wrap around.
        held = (targets >= first) & (targets < first + vocab)
        return jnp.where(held, local - first, NOWHERE)
    return vary_over(jnp.where((targets >= 0) & (targets < vocab), local, NOWHERE), varying_axes(head))


def _whole(options: Options, part: Part) -> tuple[Array, Array]:
    """(logsumexp, logit of the target) over the whole vocabulary."""
    top, total, target = part
    if options.vocab_axis is not None:
        top = jax.lax.pmax(part.top, options.vocab_axis)
        total = jax.lax.psum(part.total * jnp.exp(part.top - top), options.vocab_axis)
        target = jax.lax.psum(part.target, options.vocab_axis)
    return top + jnp.log(total), target


def _sums(options: Options, weights: Array, lse: Array, target: Array) -> tuple[Array, Array, Array]:
    nll, z = jnp.sum(weights * (lse - target)), jnp.sum(weights * lse**2)
    return nll + options.z_loss * z, nll, z
