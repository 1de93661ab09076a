"""Fused linear cross-entropy: public operation and its implementations. Logits are never materialised as a whole.

Legend: T tokens, D embed, V vocab (or this shard's slice of it).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._compat import vary_over, varying_axes
from pallas_kernels._dispatch import Implementation, dispatch
from pallas_kernels.cross_entropy.bands import cross_entropy_bands
from pallas_kernels.cross_entropy.blockwise import axes_of
from pallas_kernels.cross_entropy.reference import cross_entropy_reference
from pallas_kernels.cross_entropy.xla import cross_entropy_xla


def _pallas_tpu(*args: Any, **kw: Any) -> tuple[Array, Array, Array]:
    from pallas_kernels.cross_entropy.pallas_tpu import cross_entropy_pallas_tpu

    return cross_entropy_pallas_tpu(*args, **kw)


def _pallas_gpu(*args: Any, **kw: Any) -> tuple[Array, Array, Array]:
    from pallas_kernels.cross_entropy.pallas_gpu import cross_entropy_pallas_gpu

    return cross_entropy_pallas_gpu(*args, **kw)


IMPLEMENTATIONS = {
    "xla_bands": cross_entropy_bands,
    "xla": cross_entropy_xla,
    "pallas_tpu": _pallas_tpu,
    "pallas_gpu": _pallas_gpu,
    "reference": cross_entropy_reference,
}


class CrossEntropyStats(NamedTuple):
    """Loss statistics: weighted sums over tokens, in at least float32; no gradient flows through them.

    Attributes:
        nll_sum: sum of negative log-likelihoods, nats.
        z_sum: sum of squared log-partition functions (logsumexp of the logits).
    """

    nll_sum: Float[Array, ""]
    z_sum: Float[Array, ""]


def linear_cross_entropy(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " T"],
    weights: Float[Array, " T"],
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    vocab_axis: str | tuple[str, ...] | None = None,
    chunk: int | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, ""], CrossEntropyStats]:
    """Fused cross-entropy loss ``sum_t weights[t] * (nll[t] + z_loss * lse[t]^2)`` of the logits ``hidden @ head.T``.

    ``lse`` is the logsumexp of a token's logits and ``nll = lse - logit of its target``. The z-loss term is that of
    arXiv:2204.02311, section 5.

    Args:
        hidden: hidden states, the input of the output head.
        head: output matrix; with ``vocab_axis``, this shard's rows of it, slices in the order of the axis.
        targets: token ids. A target outside [0, vocabulary) counts as a logit of zero: give it weight zero.
        weights: loss weight of each token (loss mask); zero for tokens without a target.
        z_loss: weight of the squared log-partition function.
        softcap: soft cap: logits become ``softcap * tanh(logits / softcap)`` (arXiv:2408.00118, section 2).
        vocab_axis: mesh axis, or axes, the outermost first, over which the vocabulary is split. Requires a
            ``jax.shard_map`` that checks varying axes (its default) in which ``head`` varies over that axis; the sums
            are replicated over its shards.
        chunk: number of tokens whose logits are held at a time; None chooses.
        implementation: "xla_bands", "xla", "pallas_tpu", "pallas_gpu" or "reference"; see ``pallas_kernels._dispatch``.

    Returns:
        The loss, and its two parts without their coefficients. Sums and logits are in at least float32. The sums cover
        the given tokens; the caller sums them over mesh axes that split the tokens. Differentiable in hidden, head
        and weights; an operand's gradient is summed over the axes on which the operand is replicated.

    Raises:
        ValueError: ``head`` does not vary over ``vocab_axis``, chunk < 1, or the soft cap is not positive.
        NotImplementedError: the implementation does not support these arguments.
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"linear_cross_entropy: chunk = {chunk}; it must be at least 1 token, or None.")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"linear_cross_entropy: softcap = {softcap}; give a positive number, or None for none.")
    split = axes_of(vocab_axis)
    if split & varying_axes(weights, targets):
        raise ValueError(
            f"linear_cross_entropy: targets or weights vary over vocab_axis {vocab_axis!r}; every slice of the "
            "vocabulary must see the same tokens."
        )
    if not split <= varying_axes(head):
        raise ValueError(
            f"linear_cross_entropy: head does not vary over vocab_axis {vocab_axis!r} (it does over "
            f"{sorted(varying_axes(head))}); call inside jax.shard_map with check_vma=True "
            "and head split over that axis."
        )
    axes = varying_axes(hidden, head, targets, weights)
    over_tokens = axes - split
    loss, nll_sum, z_sum = dispatch(
        "linear_cross_entropy",
        IMPLEMENTATIONS,
        implementation,
        vary_over(hidden, axes),
        vary_over(head, axes),
        vary_over(targets, over_tokens),
        vary_over(weights, over_tokens).astype(jnp.promote_types(hidden.dtype, jnp.float32)),
        z_loss=z_loss,
        softcap=softcap,
        vocab_axis=vocab_axis,
        chunk=chunk,
    )
    return loss, CrossEntropyStats(jax.lax.stop_gradient(nll_sum), jax.lax.stop_gradient(z_sum))
