"""Reference linear cross-entropy: all logits are materialised at once; defines the operation.

Legend: T tokens, D embed, V vocab (or this shard's slice of it).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy_reference(
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
    """Reference cross-entropy; see ``linear_cross_entropy``: (loss, sum of nll, sum of squared lse).

    Raises:
        NotImplementedError: ``chunk`` is given.
    """
    if chunk is not None:
        raise NotImplementedError(f"the reference holds all {hidden.shape[0]} tokens' logits; chunk = {chunk}.")
    logits = _logits(hidden, head, weights.dtype, softcap)
    vocab = head.shape[0]
    first = 0 if vocab_axis is None else jax.lax.axis_index(vocab_axis) * vocab
    top = jax.lax.stop_gradient(logits.max(-1))
    if vocab_axis is not None:
        top = jax.lax.pmax(top, vocab_axis)
    total = jnp.exp(logits - top[:, None]).sum(-1)
    target = jnp.where(jnp.arange(vocab) == (targets - first)[:, None], logits, 0.0).sum(-1)
    if vocab_axis is not None:
        total, target = jax.lax.psum((total, target), vocab_axis)
    lse = top + jnp.log(total)
    nll_sum, z_sum = jnp.sum(weights * (lse - target)), jnp.sum(weights * lse**2)
    return nll_sum + z_loss * z_sum, nll_sum, z_sum


def token_logprobs_reference(
    hidden: Float[Array, "T D"], head: Float[Array, "V D"], targets: Int[Array, " T"], softcap: float | None = None
) -> tuple[Float[Array, " T"], Float[Array, " T"]]:
    """Reference token log-probabilities over the whole vocabulary; see ``linear_token_logprobs``."""
    logits = _logits(hidden, head, jnp.promote_types(hidden.dtype, jnp.float32), softcap)
    logprobs = jax.nn.log_softmax(logits)
    target = jnp.where(jnp.arange(head.shape[0]) == targets[:, None], logits, 0.0).sum(-1)
    return target - jax.nn.logsumexp(logits, -1), -jnp.sum(jnp.exp(logprobs) * logprobs, -1)


def _logits(hidden: Array, head: Array, wide: jnp.dtype, softcap: float | None) -> Float[Array, "T V"]:
    logits = jnp.einsum("td,vd->tv", hidden, head, preferred_element_type=wide)
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
