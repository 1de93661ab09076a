"""Two phases of a kernel: a call for the pages that requests share, one for those of each alone, and their merging.

See ``shared_pages``. Both return the logsumexp of their scores beside the output, from which plain JAX makes the
softmax over all keys, as it does with the parts that one call splits a request's slots into.

Legend: R requests, T tokens, N query heads, V head dim of values, C slots of a page, X parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels._pallas import MASK_VALUE
from pallas_kernels.paged_attention.pages import Slots
from pallas_kernels.paged_attention.ragged import RaggedBatch


class AttentionPhase(NamedTuple):
    """Phase of a kernel call.

    Attributes:
        begin: in the second phase, the slot from which each request's pages are read, the first of a page. None: the
            first phase: the tokens are those of one request, whose pages hold the slots before them; they do not attend
            to themselves, and are not written.
    """

    begin: Int[Array, " R"] | None

    @property
    def is_first(self) -> bool:
        """Whether it is that of the shared pages."""
        return self.begin is None


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
