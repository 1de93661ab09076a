"""Latent slices (TPLA, arXiv:2508.15881): each tensor shard has a slice of every MLA latent, and attends to it alone.

Plain tensor parallel serving of multi-head latent attention repeats the pages of latents on every shard. Here a shard's
slot holds C / I numbers of the latent and the whole rotated key. All heads of a generated token come to every shard,
by an all-to-all; a shard computes their scores from its slice and the rotated key, a softmax of its own, and its slice
of the output, which an all-to-all takes back to the shards of the heads. The scores of a slice stand for those of the
whole latent (section 4.2), so this is an approximation; ``latent_rotation`` makes it a good one.

Tokens of a prompt attend exactly (section 4.5): slices of their requests' pages are all-gathered into a pool of whole
latents for the time of the layer. Which of the two a token does depends on its position alone, so chunked prefill,
preemption and the company of a step change nothing.

Unlike the paper's, the RMSNorm before a latent is not sliced, and no weights are repeated: the heads travel instead.

Legend: B replicas, T tokens, N query heads, M = N / I heads of a shard, I slices, C latent dim, R rotated dims, H = C
+ R, Q requests, J columns of a page table, P page size, W values of a slot.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import PageFormat, PagePool, Slots, paged_attention
from pallas_kernels.paged_attention.ragged import RaggedBatch
from pallas_kernels.paged_attention.reference import write

Axes = tuple[str, ...]
"""Mesh axes over which latents are sliced."""


def sliced(k: Float[Array, "B T 1 H"], latent: int, slices: int) -> Float[Array, "B T I W"]:
    """Slices of latents with the rotated key behind each, as kv heads."""
    parts, shared = jnp.split(k[..., :latent], slices, axis=-1), k[..., latent:]
    return jnp.concatenate([jnp.concatenate([part, shared], axis=-1) for part in parts], axis=2)


def decode_over_slices(
    attend: Callable[[Float[Array, "T N W"]], Float[Array, "T N V"]],
    q: Float[Array, "T M H"],
    factors: Float[Array, " I"],
    latent: int,
    axes: Axes,
) -> Float[Array, "T M C"]:
    """Attention output of this shard's heads, of which every shard computes its slice.

    Args:
        attend: attention of all heads over this shard's slices.
        factors: factor of each slice on its part of the scores.
    """
    (t, heads, h), slices = q.shape, factors.shape[0]
    parts = q[..., :latent].reshape(t, heads, slices, -1) * factors.astype(q.dtype)[:, None]
    shared = jnp.broadcast_to(q[:, :, None, latent:], (t, heads, slices, h - latent))
    sent = jnp.concatenate([parts, shared], axis=-1)
    every = jax.lax.all_to_all(sent, axes, split_axis=2, concat_axis=1, tiled=True)  # T N 1 W
    out = attend(every[:, :, 0]).reshape(t, slices, heads, -1)
    return jax.lax.all_to_all(out, axes, split_axis=1, concat_axis=3, tiled=True)[:, 0]


def mixed_over_slices(
    q: Float[Array, "T M H"],
    k: Float[Array, "T 1 W"],
    factors: Float[Array, " I"],
    pool: Slots,
    layer: Int[Array, ""],
    ragged: RaggedBatch,
    prompts: Int[Array, " Q"],
    *,
    format: PageFormat,
    scale: float,
    axes: Axes,
) -> tuple[Float[Array, "T M C"], Slots]:
    """Output of a step with prompts, exact for their tokens and slice by slice for generated ones; the updated pages.

    Args:
        k: this shard's slices of the step's latents.
        pool: this shard's pages.
        prompts: length of each request's prompt: tokens from there on are generated.
        format: of a slot of a shard.
    """
    rows = ragged.tokens(len(q))
    pool = write(pool, format.pack(k, None, pool.data.dtype), layer, ragged, rows)
    table = ragged.page_table
    page = jnp.clip(table, 0, pool.data.shape[1] - 1)
    held = jax.tree.map(lambda x: x[layer, page], pool)  # Q J 1 P W
    held = format.unpack(held, q.dtype)[..., : format.key_dim]
    # Slots that hold no token may hold nan, and 0 * nan is nan.
    at = jnp.arange(table.shape[1] * held.shape[3]).reshape(table.shape[1], 1, -1, 1)
    held = jnp.where(at < ragged.kv_lens[:, None, None, None, None], held, 0)
    count, (latent, part) = table.size, (format.value_dim * factors.shape[0], format.value_dim)
    own = RaggedBatch(jnp.arange(count, dtype=jnp.int32).reshape(table.shape), ragged.starts, ragged.kv_lens)
    place = own.slots(count, held.shape[3], rows)
    generated = rows.real & (rows.position >= prompts[rows.request])

    def over(held: Float[Array, "Q J 1 P W"], q: Array, value_dim: int) -> Array:
        """Attention over pages of all requests, the step's tokens among them."""
        form = PageFormat(1, held.shape[-1], value_dim, latent=True, multiple=format.multiple)
        pages = held.reshape(1, count, *held.shape[2:])
        missing = form.stored_width - form.key_dim
        data = jnp.pad(pages, ((0, 0),) * 4 + ((0, missing),)) if missing else pages
        new = pages[0, jnp.minimum(place[0], count - 1), 0, place[1]][:, None]
        out, _ = paged_attention(q, new, None, PagePool(data, form), 0, *own, scale=scale)
        return out

    def exact() -> Float[Array, "T M C"]:
        parts = jax.lax.all_gather(held[..., :part], axes, axis=held.ndim - 1, tiled=True)
        return over(jnp.concatenate([parts, held[..., part:]], axis=-1), q, latent)

    def by_slices() -> Float[Array, "T M C"]:
        return decode_over_slices(lambda q: over(held, q, part), q, factors, latent, axes)

    some, every = jnp.any(generated), jnp.all(generated | ~rows.real)
    nothing = jnp.zeros((*q.shape[:2], latent), q.dtype)
    whole = jax.lax.cond(every, lambda: nothing, exact)
    apart = jax.lax.cond(some, by_slices, lambda: nothing)
    return jnp.where(generated[:, None, None], apart, whole), pool
