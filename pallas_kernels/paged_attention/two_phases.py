"""Two phases of a kernel: attention over some of the keys by each, and their merging.

With shared pages (``shared_pages``) one call reads the pages that requests share, and one those of each alone. With
pages that are encoded as a whole (``residual_window``) a call reads those, and plain JAX the tokens in full precision.
Both phases return the logsumexp of their scores beside the output, from which plain JAX makes the softmax over all
keys, as it does with the parts that one call splits a request's slots into.

Legend: R requests, T tokens, N query heads, V head dim of values, C slots of a page, X parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._pallas import MASK_VALUE
from pallas_kernels.paged_attention.pages import Slots
from pallas_kernels.paged_attention.ragged import RaggedBatch
from pallas_kernels.paged_attention.residual_window import Residual, ResidualStep
from pallas_kernels.paged_attention.xla import attend_in_full_precision


class AttentionPhase(NamedTuple):
    """Phase of a kernel call.

    Attributes:
        begin: in the second phase, the slot from which each request's pages are read, the first of a page. None: the
            call reads pages alone: the tokens do not attend to themselves, and are not written.
        reach: in such a call, the slot before which each token sees slots, the first of a page, no less than that of
            the request's tokens before it. None: the tokens are those of one request, whose pages hold the slots before
            them, and see all of those.
    """

    begin: Int[Array, " R"] | None
    reach: Int[Array, " T"] | None = None

    @property
    def reads_alone(self) -> bool:
        """Whether the call writes nothing."""
        return self.begin is None

    @property
    def is_shared(self) -> bool:
        """Whether it is that of the shared pages."""
        return self.begin is None and self.reach is None

    @property
    def name(self) -> str:
        """Name of the phase: "shared", "encoded" or "own"."""
        if self.begin is not None:
            return "own"
        return "shared" if self.is_shared else "encoded"


def in_two_phases(
    attend: Callable[[Slots, RaggedBatch, AttentionPhase], tuple[Float[Array, "T N V"], Float[Array, "T N"], Slots]],
    tokens: int,
    pool: Slots,
    ragged: RaggedBatch,
    shared: Int[Array, " R"],
) -> tuple[Float[Array, "T N V"], Slots]:
    """Attention in two phases by a kernel: (output, pages).

    Args:
        attend: calls the kernel: (output, logsumexp, pages), the pages as they were in the first phase.
        tokens: T.
        pool, ragged, shared: see ``paged_attention``.
    """
    leader, page_size = jnp.argmax(shared), pool.data.shape[3]
    reach = shared[leader] * page_size
    starts = jnp.array([0, tokens], jnp.int32)
    together = RaggedBatch(ragged.page_table[leader][None], starts, reach[None] + tokens)
    common, common_lse, _ = attend(pool, together, AttentionPhase(None))
    # The second call writes to the pages in place: otherwise XLA copies them for the first.
    common, pool = jax.lax.optimization_barrier((common, pool))
    own, own_lse, pool = attend(pool, ragged, AttentionPhase(shared * page_size))
    rows = ragged.tokens(tokens)
    member = rows.real & (shared[rows.request] > 0)
    common_lse = jnp.where(member[:, None], common_lse, -MASK_VALUE)
    out, _ = merge_parts(jnp.stack([common, own]), jnp.stack([common_lse, own_lse]))
    return jnp.where(rows.real[:, None, None], out, 0), pool


def with_residual_window(
    attend: Callable[[Slots, RaggedBatch, AttentionPhase], tuple[Float[Array, "T N V"], Float[Array, "T N"], Slots]],
    q: Float[Array, "T N H"],
    new: Slots,
    pool: Slots,
    layer: Int[Array, ""],
    sinks: Float[Array, " N"] | None,
    ragged: RaggedBatch,
    residual: Residual,
    **options: Any,
) -> tuple[Float[Array, "T N V"], Slots]:
    """Attention to encoded pages by a kernel, and to the tokens in full precision by plain JAX: (output, pages).

    Args:
        attend: calls the kernel, as in ``in_two_phases``.
        q, new, pool, layer, sinks, ragged, residual: see ``paged_attention``.
        options: its further static arguments, ``format`` and ``decode_only`` among them.
    """
    step = ResidualStep(residual, new.data, options["format"], options["window"])
    with jax.named_scope("kv_write"):
        pool = step.encode_pages(pool, layer, ragged)
    tokens = ragged.tokens(q.shape[0])
    reach = step.encoded(tokens.position + 1, residual.found[tokens.request], pool.data.shape[3])
    reach = jnp.where(tokens.real, reach, 0).astype(jnp.int32)
    held, held_lse, _ = attend(pool, ragged, AttentionPhase(None, reach))
    latest, latest_lse = attend_in_full_precision(q, step, pool, layer, sinks, ragged, **options)
    # After the ring buffers have been read: otherwise XLA copies them.
    latest, recent = jax.lax.optimization_barrier((latest, pool.recent))
    with jax.named_scope("kv_write"):
        pool = step.write_ring(pool._replace(recent=recent), layer, ragged, tokens)
    held_lse = jnp.where(tokens.real[:, None], held_lse, -MASK_VALUE)
    out, _ = merge_parts(jnp.stack([held.astype(jnp.float32), latest]), jnp.stack([held_lse, latest_lse]))
    return jnp.where(tokens.real[:, None, None], out, 0), pool


def merge_parts(
    out: Float[Array, "X T N V"], lse: Float[Array, "X T N"]
) -> tuple[Float[Array, "T N V"], Float[Array, "T N"]]:
    """Output and logsumexp over all keys, of those over each part of them (arXiv:2311.01282).

    The logsumexp of a part that has seen nothing is ``-MASK_VALUE``, which stands for minus infinity; so it is where
    all parts have seen nothing.
    """
    lse = jnp.where(lse != -MASK_VALUE, lse, -jnp.inf)[..., None]
    top = jnp.max(lse, axis=0)
    weights = jnp.exp(lse - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights, axis=0)
    safe = jnp.where(total > 0.0, total, 1.0)
    out = jnp.sum(jnp.where(weights > 0.0, out, 0.0) * weights, axis=0) / safe
    return out, jnp.where(total > 0.0, top + jnp.log(safe), -MASK_VALUE)[..., 0]
