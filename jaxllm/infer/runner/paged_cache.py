"""Keys and values in pages, as the forward pass sees them: a context whose requests share one pool.

Layers that are alike in kv heads, head dim and window keep their pages together, in a pool and with a page table of
their own, so that a window's pages can be given back while other layers keep theirs.

A mesh may have replicas: each has a row of the batch, requests, tables and pages of its own, and only the experts of a
mixture are shared by them.

Legend: B replicas, L layers of a group, P pages of all replicas, K kv heads, C slots of a page, W numbers of a slot, Z
scales of a slot, R requests, J columns of a page table, T tokens, N query heads, H head dim of keys, V of values.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import sharding
from jaxllm.models import DecoderConfig, Segments
from jaxllm.models.attention_context import SINK_AXES, Cached, LayerIndex, Scoring, share_kv_heads
from pallas_kernels._compat import target_device
from pallas_kernels.paged_attention import PageFormat, PagePool, Slots, paged_attention
from pallas_kernels.paged_attention.encoding import SCALED
from pallas_kernels.paged_attention.ragged import Ragged
from pallas_kernels.paged_attention.reference import write

HEADS = ("batch", "attn_seq", "attn_heads", None)
KV_HEADS = ("batch", None, "attn_kv_heads", None)
POOL_AXES = ("layers", "batch", "attn_kv_heads", None, None)
HELD_AXES = ("layers", None, "attn_kv_heads", None, None)
TABLES, NUMBERS = ("batch", None, None), ("batch", None)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep their pages together.

    Attributes:
        cached, window: what they have in common.
        layers: their numbers in the model.
        dtype: of what is kept: a floating-point type, or an encoding of ``PageFormat``.
        rounded: what is read again is not what was computed.
    """

    cached: Cached
    window: int | None
    layers: tuple[int, ...]
    dtype: str = "float32"
    rounded: bool = False

    def format(self, shards: int = 1) -> PageFormat:
        """What a slot holds; few kv heads are repeated up to the number of shards, as ``share_kv_heads`` does."""
        one = self.cached
        kv = shards if one.kv_heads < shards and shards % one.kv_heads == 0 else one.kv_heads
        platform = target_device().platform
        multiple = 128 if platform == "tpu" else 1
        encoding = self.dtype if self.dtype in SCALED else "plain"
        if self.dtype == "bfloat16" and platform == "cpu":
            encoding = "bits of bfloat16"
        return PageFormat(kv, one.key_dim, one.value_dim, one.latent, encoding, multiple)

    def token_bytes(self, shards: int = 1) -> int:
        """Of a token in all its layers, on all shards."""
        form = self.format(shards)
        return len(self.layers) * form.kv_heads * form.slot_bytes(self.plain)

    @property
    def plain(self) -> str:
        """What a pool is asked to hold, whatever the encoding makes of it."""
        return "float32" if self.dtype in SCALED else self.dtype


def layer_groups(config: DecoderConfig, kv_dtype: str = "auto") -> tuple[LayerGroup, ...]:
    """The groups of a model's layers; those without a window first. ``kv_dtype`` as of ``EngineConfig``."""
    dtype = config.dtype if kv_dtype == "auto" else kv_dtype
    rounded = dtype in SCALED or jnp.promote_types(dtype, config.dtype) != jnp.dtype(dtype)
    found: dict[tuple[Cached, int | None], list[int]] = {}
    for number, block in enumerate(config.blocks):
        found.setdefault((block.attention.cached, block.attention.window), []).append(number)
    groups = [LayerGroup(*key, tuple(layers), dtype, rounded) for key, layers in found.items()]
    return tuple(sorted(groups, key=lambda g: g.window or 0))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """A step's requests and their pages; see ``paged_attention`` for the arrays.

    The forward pass is given each replica's flat batch as a row of T tokens.

    Attributes:
        pools: of each group, ``Slots``: numbers [L, P, K, C, W] and scales [L, P, K, Z, C], if any; a replica has as
            many pages as the others, next to each other.
        tables: of each group, Int[Array, "B R J"], of pages by their numbers in the replica.
        starts: Int[Array, "B R1"], where each request's tokens begin in the row, and their count.
        kv_lens: Int[Array, "B R"], tokens of each request, those of this step included.
        groups: the model's.
        decode_only: no request has more than one token in this step.
        invariant: one way of computing, whatever the step's other requests are.
    """

    pools: tuple[Any, ...]
    tables: tuple[Any, ...]
    starts: Any
    kv_lens: Any
    groups: tuple[LayerGroup, ...] = field(metadata={"static": True})
    decode_only: bool = field(default=False, metadata={"static": True})
    invariant: bool = field(default=False, metadata={"static": True})
    keeps: ClassVar[bool] = True

    def attend(
        self,
        layer: LayerIndex,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K V"] | None,
        positions: Int[Array, "B T"],
        scoring: Scoring,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B T N V"], PagedCache]:
        """Writes k, v to their pages, in place where the pools are a loop's carry, then attends."""
        value_dim = scoring.latent if v is None else v.shape[3]
        which = Cached(k.shape[2], k.shape[3], value_dim or 0, latent=v is None), scoring.window
        index = next(i for i, g in enumerate(self.groups) if (g.cached, g.window) == which)
        place, whole = self._place(index, layer)
        split = sharding.axis_names("attn_seq")

        def local(
            q: Array,
            k: Array,
            v: Array | None,
            rows: Array,
            scales: Array | None,
            place: Array,
            table: Array,
            starts: Array,
            kv_lens: Array,
            sinks: Array | None,
        ) -> tuple[Array, ...]:
            form = dataclasses.replace(whole, kv_heads=rows.shape[2])
            ragged, held = Ragged(table[0], starts[0], kv_lens[0]), Slots(rows, scales)
            q, k, v = q[0], k[0], None if v is None else v[0]
            if split:  # each device has its part of the queries, and writes all keys and values to its own pages
                held = write(held, form.pack(k, v, rows.dtype), place, ragged, ragged.tokens(len(k)))
                first, many = jax.lax.axis_index(split) * len(q), len(q)
                k, v = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, many), (k, v))
                ragged = ragged.part(first, many)
            out, pool = paged_attention(
                q, k, v, PagePool(held.numbers, form, held.scales), place, ragged.page_table, ragged.starts,
                ragged.kv_lens, sinks=sinks, scale=scoring.scale, window=scoring.window, softcap=scoring.softcap,
                decode_only=self.decode_only,
            )  # fmt: skip
            return out[None], *_there(pool.slots)

        slots = self.pools[index]
        run = sharding.shard_map(
            local,
            (HEADS, KV_HEADS, KV_HEADS, POOL_AXES, POOL_AXES, (), TABLES, NUMBERS, NUMBERS, SINK_AXES),
            (HEADS, *(POOL_AXES for _ in _there(slots))),
            check=not split,  # that the devices of a row write the same
        )
        held = (None if x is None else share_kv_heads(x) for x in (k, v))
        out, *slots = run(q, *held, *slots, place, self.tables[index], self.starts, self.kv_lens, sinks)
        return out, self._with(index, Slots(*slots))

    def begins(self, positions: Int[Array, "B T"]) -> Bool[Array, ""] | None:
        """Whether every request's tokens so far are those of this step; None where that must make no difference."""
        if self.decode_only or self.invariant or any(group.rounded for group in self.groups):
            return None
        lengths = self.starts[:, 1:] - self.starts[:, :-1]
        return jnp.all((lengths == 0) | (self.kv_lens == lengths))

    def own(self, tokens: int) -> Segments:
        """Each request a document."""

        def local(table: Array, starts: Array, kv_lens: Array) -> Array:
            rows = Ragged(table, starts, kv_lens).tokens(tokens)
            return jnp.where(rows.real, rows.request + 1, 0)

        return Segments(sharding.per_shard(local, "batch")(self.tables[0], self.starts, self.kv_lens))

    def keep(self, layer: LayerIndex, k: Float[Array, "B T 1 H"], positions: Int[Array, "B T"]) -> PagedCache:
        """Writes latents to their pages."""
        index = next(i for i, g in enumerate(self.groups) if g.cached.latent and g.cached.key_dim == k.shape[3])
        place, whole = self._place(index, layer)

        def local(
            k: Array, rows: Array, scales: Array | None, place: Array, table: Array, starts: Array, kv_lens: Array
        ) -> tuple[Array, ...]:
            ragged, held = Ragged(table[0], starts[0], kv_lens[0]), Slots(rows, scales)
            form = dataclasses.replace(whole, kv_heads=rows.shape[2])
            new = form.pack(k[0], None, rows.dtype)
            return _there(write(held, new, place, ragged, ragged.tokens(k.shape[1])))

        slots = self.pools[index]
        run = sharding.shard_map(
            local,
            (KV_HEADS, POOL_AXES, POOL_AXES, (), TABLES, NUMBERS, NUMBERS),
            tuple(POOL_AXES for _ in _there(slots)),
        )
        slots = run(share_kv_heads(k), *slots, place, self.tables[index], self.starts, self.kv_lens)
        return self._with(index, Slots(*slots))

    def _place(self, index: int, layer: LayerIndex) -> tuple[Int[Array, ""], PageFormat]:
        """Where in a group's pool a layer is, and what its slots hold."""
        group = self.groups[index]
        places = np.zeros(max(group.layers) + 1, np.int32)
        places[list(group.layers)] = np.arange(len(group.layers))
        return jnp.asarray(places)[layer], group.format(sharding.axis_size("attn_kv_heads"))

    def _with(self, index: int, slots: Slots) -> PagedCache:
        return dataclasses.replace(self, pools=(*self.pools[:index], slots, *self.pools[index + 1 :]))


def _there(slots: Slots) -> tuple[Array, ...]:
    """The arrays that there are."""
    return tuple(x for x in slots if x is not None)
