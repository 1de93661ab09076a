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
    vocab_axis: str | None,
    chunk: int | None,
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Reference cross-entropy; see ``linear_cross_entropy``: (loss, sum of nll, sum of squared lse).

    Raises:
        NotImplementedError: ``chunk`` is given.
    """
    if chunk is not None:
        raise NotImplementedError(f"the reference holds all {hidden.shape[0]} tokens' logits; chunk = {chunk}.")
    logits = jnp.einsum("td,vd->tv", hidden, head, preferred_element_type=weights.dtype)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
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
