"""Paged KV cache: the attention context used for serving. All requests share one page pool per layer group.

Layers with equal kv heads, head dim and sliding window form a group with a page pool and a page table of its own, so
that pages behind a window are freed while other layers keep theirs (paged attention, arXiv:2309.06180). Under a
retention rule that chooses by scores, layers of a group keep different numbers of entries: the group then has several
parts, equally many consecutive layers each, which share the pool and have page tables of their own.

A mesh may have data-parallel replicas: each has a row of the batch, requests, page tables and pages of its own; only
the experts of a mixture of experts are shared.

Legend: B replicas, L layers of a group, P pages of all replicas, K kv heads, C slots of a page, W elements of a slot,
Z scales of a slot, R requests, J columns of a page table, T tokens, N query heads, H head dim of keys, V of values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import sharding
from jaxllm.config import ConfigError
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.runner.kv_span import span_attention, span_axes
from jaxllm.infer.runner.latent_slices import decode_over_slices, mixed_over_slices, sliced
from jaxllm.infer.runner.retention.corm import Corm
from jaxllm.infer.runner.retention.locret import Locret
from jaxllm.infer.runner.retention.pyramid import Pyramid
from jaxllm.infer.runner.retention.window_and_sinks import WindowAndSinks
from jaxllm.models import DecoderConfig, Segments
from jaxllm.models.attention_context import SINK_AXES, AttentionParams, KVSpec, LayerIndex, replicate_kv_heads
from jaxllm.models.layers.layer import AttentionLayer
from jaxllm.models.retaining_heads import RetainingHeads
from pallas_kernels._compat import target_device
from pallas_kernels.paged_attention import PageFormat, PagePool, Slots, paged_attention
from pallas_kernels.paged_attention.kv_formats import is_quantised, kv_format
from pallas_kernels.paged_attention.pages import ring_places
from pallas_kernels.paged_attention.ragged import RaggedBatch
from pallas_kernels.paged_attention.reference import write
from pallas_kernels.paged_attention.residual_window import Residual
from pallas_kernels.paged_attention.retention import Retention, RetentionRule, by_scores
from pallas_kernels.paged_attention.shadow.shadow_format import Turn
from pallas_kernels.paged_attention.tree_mask import TreeMask

HEADS = ("batch", "attn_seq", "attn_heads", None)
KV_HEADS = ("batch", None, "attn_kv_heads", None)
POOL_AXES = ("layers", "pages", "attn_kv_heads", None, None)
TRANSFER_AXES = ("layers", None, "attn_kv_heads", None, None)
TABLES, PER_REQUEST = ("batch", None, None), ("batch", None)

TILE_POSITIONS = 128
"""Positions of a page of which the scales fill tiles on TPUs."""
MAX_PARTS = 8
"""Most parts of a group of layers: each has page tables that the host fills and sends."""

RETENTION_RULES: dict[str, RetentionRule] = {
    "window+sinks": WindowAndSinks(),
    "corm": Corm(),
    "pyramid": Pyramid(),
    "locret": Locret(),
}
"""Retention rules by name, with the sizes that they have by default; ``EngineConfig.retention`` names one, and may give
its sizes behind a colon, which its class reads with ``of``. They hold in the layers without a sliding window."""


@dataclass(frozen=True)
class LayerGroup:
    """Group of layers that share a page table and a page pool.

    Attributes:
        kv_spec, window: shape of keys and values, and sliding window, of all layers of the group.
        layers: indices of the layers in the model.
        dtype: dtype of the KV cache: a floating-point dtype, or an encoding of ``PageFormat``.
        lossy: the stored values differ from the computed ones.
        rule: retention rule; None: every token is kept.
        parts: parts of the layers with page tables of their own; a page holds tokens of one part's layers.
        unrotated: attention layer whose keys are kept as they are before RoPE; None: as they are after it.
        recent_dtype: dtype of the latest tokens, where pages are encoded as a whole: the model's compute dtype.
    """

    kv_spec: KVSpec
    window: int | None
    layers: tuple[int, ...]
    dtype: str = "float32"
    lossy: bool = False
    rule: RetentionRule | None = None
    recent_dtype: str = "float32"
    parts: int = 1
    unrotated: AttentionLayer | None = None

    @property
    def rows(self) -> int:
        """Layers of a part: rows of the pool."""
        return len(self.layers) // self.parts

    @property
    def rules(self) -> tuple[RetentionRule | None, ...]:
        """Retention rule of each part: a rule with ``of_part`` has one for each."""
        if self.rule is None or not hasattr(self.rule, "of_part"):
            return (self.rule,) * self.parts
        return tuple(self.rule.of_part(n, self.parts) for n in range(self.parts))  # pyright: ignore[reportAttributeAccessIssue]

    def format(self, shards: int = 1) -> PageFormat:
        """Format of a slot; few kv heads are repeated up to the number of shards, as ``replicate_kv_heads`` does."""
        one = self.kv_spec
        if one.slices > 1:  # a shard's slice is a kv head
            part = one.value_dim // one.slices
            one = KVSpec(one.slices, part + one.key_dim - one.value_dim, part, latent=True)
        kv = shards if one.kv_heads < shards and shards % one.kv_heads == 0 else one.kv_heads
        platform = target_device().platform
        multiple = 128 if platform == "tpu" else 1
        encoding = self.dtype if is_quantised(self.dtype) else "plain"
        if self.dtype == "bfloat16" and platform == "cpu":
            encoding = "bits of bfloat16"
        return PageFormat(kv, one.key_dim, one.value_dim, one.latent, encoding, multiple)

    def page_bytes(self, page_size: int, shards: int = 1) -> int:
        """Bytes of a page of the KV cache on devices, in all layers of a part of the group and on all shards."""
        return self.rows * self.format(shards).device_page_bytes(page_size, self.plain)

    def host_page_bytes(self, page_size: int) -> int:
        """Bytes of a page of the KV cache in host memory, in all layers of the group; 0 unless the format has some."""
        return self.rows * self.format().host_page_bytes(page_size, self.plain)

    def token_bytes(self, shards: int = 1, page_size: int = 32) -> int:
        """Bytes of KV cache per token, in all layers of the group and on all shards, of a whole page of this size."""
        return -(-self.parts * self.page_bytes(page_size, shards) // page_size)

    def sequence_bytes(self, length: int, page_size: int) -> int:
        """Bytes of KV cache of a sequence on one device: whole pages, and its ring buffer where it has one.

        What a format has in host memory does not count.
        """
        if self.rule is not None:
            pages = sum(-(-rule.capacity(length) // page_size) for rule in self.rules if rule is not None)
            return pages * self.page_bytes(page_size)
        form = self.format()
        if not self.residual:
            return -(-length // page_size) * self.page_bytes(page_size)
        places = ring_places(form.kv_format, page_size)
        ring = len(self.layers) * form.kv_heads * places * form.width * jnp.dtype(self.recent_dtype).itemsize
        return max(0, length - self.residual) // page_size * self.page_bytes(page_size) + ring

    @property
    def residual(self) -> int:
        """Latest tokens of a sequence in full precision, see ``residual_window``; 0 where there are none apart."""
        return kv_format(self.dtype).residual if is_quantised(self.dtype) else 0

    @property
    def plain(self) -> str:
        """Floating-point dtype of the group's values before encoding."""
        if self.residual:
            return self.recent_dtype
        return "float32" if is_quantised(self.dtype) else self.dtype

    @property
    def turn(self) -> Turn | None:
        """Rotates the layers' keys, where the KV cache keeps them unrotated, see ``paged_attention``."""
        return None if self.unrotated is None else self.unrotated.turned


def layer_groups(config: DecoderConfig, kv_dtype: str = "auto", retention: str | None = None) -> tuple[LayerGroup, ...]:
    """Layer groups of a model, those without a sliding window first; arguments as in ``EngineConfig``.

    Raises:
        ValueError: there is no such retention rule.
    """
    rule = None if retention is None else retention_rule(retention)
    dtype = config.dtype if kv_dtype == "auto" else kv_dtype
    lossy = is_quantised(dtype) or jnp.promote_types(dtype, config.dtype) != jnp.dtype(dtype)
    found: dict[tuple[KVSpec, int | None], list[int]] = {}
    for number, block in enumerate(config.blocks):
        found.setdefault((block.attention.kv_spec, block.attention.window), []).append(number)
    groups = []
    for key, layers in found.items():
        own = rule if key[1] is None else None
        parts, unrotated = parts_of(len(layers), own), None
        if is_quantised(dtype) and kv_format(dtype).chunk:
            unrotated = _unrotated([config.blocks[number].attention for number in layers], dtype)
        groups.append(LayerGroup(*key, tuple(layers), dtype, lossy, own, config.dtype, parts, unrotated))
    if rule is not None and not any(group.rule for group in groups):
        raise ConfigError(f"engine: retention = {retention!r}, but every layer has a sliding window; leave it out.")
    return tuple(sorted(groups, key=lambda g: g.window or 0))


def _unrotated(layers: list[AttentionLayer], dtype: str) -> AttentionLayer:
    """Layer whose keys a KV cache keeps as they are before RoPE, for all of a group.

    Raises:
        ValueError: their keys cannot be turned back, or not by the same rotation.
    """
    first, keys, by = layers[0], jnp.zeros((1, layers[0].key_dim)), jnp.zeros(1, jnp.int32)
    if first.kv_spec.latent:
        raise ConfigError(
            f"engine: kv_dtype = {dtype!r} is for keys and values, not for MLA latents; use int8 or int4."
        )
    try:
        jax.eval_shape(first.turned, keys, by)
    except ValueError as error:
        raise ConfigError(
            f"engine: kv_dtype = {dtype!r} keeps keys as they are before RoPE, and {error}; use kivi4."
        ) from error
    if len({getattr(layer, "rope", None) for layer in layers}) > 1:
        raise ConfigError(
            f"engine: kv_dtype = {dtype!r} keeps keys as they are before RoPE, and layers of one shape have different "
            "rotations; use kivi4."
        )
    return first


def check_pages(groups: Sequence[LayerGroup], page_size: int) -> None:
    """Checks that pages of this size can have the format of their groups.

    Raises:
        ConfigError: names the size, and what is legal.
    """
    for group in groups:
        if (form := group.format()).kv_format.chunk:
            try:
                form.kv_format.check(page_size, form.kv_heads, form.value_parts)  # pyright: ignore[reportAttributeAccessIssue]
            except ValueError as error:
                raise ConfigError(str(error)) from None


def with_whole_tiles(config: EngineConfig, platform: str) -> EngineConfig:
    """Configuration whose pages the platform's kernels read without a copy.

    On TPUs the scales of a page fill the lanes of whole tiles only if it has a multiple of 128 positions: with fewer,
    XLA copies the scales of all pages in each step, or the kernel refuses the format.

    Args:
        config: sizes of an engine.
        platform: "tpu", "gpu" or "cpu".

    Raises:
        ConfigError: other sizes do not go with so large a page.
    """
    size, dtype = config.page_size, config.kv_dtype
    if platform != "tpu" or size is None or not is_quantised(dtype) or kv_format(dtype).chunk:
        return config
    return dataclasses.replace(config, page_size=-(-size // TILE_POSITIONS) * TILE_POSITIONS)


def parts_of(layers: int, rule: RetentionRule | None) -> int:
    """Number of parts of a group with so many layers: 1, or as many as its rule's scores make worthwhile."""
    return 1 if by_scores(rule) is None else max(n for n in range(1, MAX_PARTS + 1) if layers % n == 0)


def retention_rule(text: str) -> RetentionRule:
    """Retention rule by its name and sizes, such as "window+sinks:1024,4".

    Raises:
        ValueError: there is no such rule, or the sizes are not legal; says what is.
    """
    name, colon, sizes = text.partition(":")
    if name not in RETENTION_RULES:
        raise ConfigError(f"engine: retention = {text!r}; legal: None, or a row of {tuple(RETENTION_RULES)}.")
    rule = RETENTION_RULES[name]
    if not colon and name != "locret":  # which has no heads of its own
        return rule
    if not hasattr(rule, "of"):
        raise ConfigError(f"engine: retention = {text!r}: the rule {name!r} has no sizes to give.")
    return rule.of(sizes)  # pyright: ignore[reportAttributeAccessIssue]


def pool_sizes(
    config: EngineConfig, groups: Sequence[LayerGroup], page_size: int, columns: int, most: int
) -> tuple[int, ...]:
    """Pages of each group's pool; with a sliding window, no more than the windows of all sequences cover, unless cached
    chunks stay there, which are copied whole.

    Args:
        config: sizes of the engine.
        groups: layer groups of the model.
        page_size, columns: positions of a page, and pages of the longest sequence.
        most: pages of the pools of layers without a window.
    """
    ahead = max(config.max_batched_tokens, config.decode_steps)

    def windows(window: int) -> int:
        reach = -(-(window + ahead) // page_size) + 2
        return config.max_sequences * min(reach, columns) + columns + 1

    return tuple(
        most * g.parts if g.window is None else most if config.chunk_cache else min(most, windows(g.window))
        for g in groups
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """Paged KV cache of a step: page pools and page tables of its requests; see ``paged_attention`` for the arrays.

    The forward pass gets each replica's flat batch as a row of T tokens.

    Attributes:
        pools: ``Slots`` of each group: data [L, P, K, C, W] and, if encoded, scales [L, P, K, Z, C], and with a
            retention rule positions [L, P, K, 1, C] (and scores of that shape); the replicas' pages are next to each
            other, equally many of each. L is the number of layers of a part.
        tables: page table of each part of each group, Int[Array, "B R J"], by page numbers of the replica.
        starts: Int[Array, "B R1"], first row of each request's tokens in the flat batch, and the number of rows.
        kv_lens: Int[Array, "B R"], tokens of each request, those of this step included.
        groups: layer groups of the model.
        decode_only: no request has more than one token in this step.
        invariant: batch-invariant: the computation does not depend on the step's other requests.
        columns: of each part with a retention rule: Int[Array, "B R"], pages of each request; None of the others.
        rings: where pages are encoded as a whole: Int[Array, "B R"], ring buffer of each request, and its tokens found
            in the prefix cache, see ``Residual``.
        tree: tree mask of the step: Int[Array, "B T E"] and Int[Array, "B R"], see ``TreeMask``; None: there is none.
        heads: ``RetainingHeads`` that score the entries when they are written; None: there are none.
        shared: of each page table: Int[Array, "B R"], pages that requests begin with and that are read once for all of
            them, see ``shared_pages``; None: each request's pages are read for itself.
        prompts: where latents are in slices: Int[Array, "B R"], length of each request's prompt, see ``latent_slices``.
    """

    pools: tuple[Any, ...]
    tables: tuple[Any, ...]
    starts: Any
    kv_lens: Any
    groups: tuple[LayerGroup, ...] = field(metadata={"static": True})
    decode_only: bool = field(default=False, metadata={"static": True})
    invariant: bool = field(default=False, metadata={"static": True})
    columns: tuple[Any, ...] | None = None
    rings: tuple[Any, Any] | None = None
    heads: RetainingHeads | None = None
    tree: tuple[Any, Any] | None = None
    shared: tuple[Any, ...] | None = None
    prompts: Any = None
    is_kv_cache: ClassVar[bool] = True

    def attend(
        self,
        layer: LayerIndex,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K V"] | None,
        positions: Int[Array, "B T"],
        params: AttentionParams,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B T N V"], PagedCache]:
        """Paged attention: writes k, v to their pages, in place if the pools are a loop's carry, then attends."""
        value_dim = params.latent if v is None else v.shape[3]
        index = self._group(KVSpec(k.shape[2], k.shape[3], value_dim or 0, latent=v is None), params.window)
        return self.attend_in(index, layer, q, k, v, params, sinks)

    def attend_in(
        self,
        index: int,
        layer: LayerIndex,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K V"] | None,
        params: AttentionParams,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "B T N V"], PagedCache]:
        """``attend`` in the layer group ``index``; few kv heads may have been repeated for the shards before."""
        split, span = sharding.axis_names("attn_seq"), span_axes()

        def local(
            q: Array, k: Array, v: Array | None, sinks: Array | None, scores: Array | None, *shared: Any
        ) -> tuple[Array, ...]:
            held, form, place, ragged, retention, residual, tree, common = self._unshared(index, *shared)
            q, k, v = q[0], k[0], None if v is None else v[0]
            if span:
                assert v is not None
                out, slots = span_attention(
                    q, k, v, held, place, ragged, sinks, format=form, scale=params.scale, window=params.window,
                    softcap=params.softcap, decode_only=self.decode_only, axes=span,
                )  # fmt: skip
                return out[None], *jax.tree.leaves(slots)
            if split:  # each device has a shard of the queries, and writes all keys and values to its own pages
                held = write(held, form.pack(k, v, held.data.dtype), place, ragged, ragged.tokens(len(k)))
                first, many = jax.lax.axis_index(split) * len(q), len(q)
                k, v = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, many), (k, v))
                ragged = ragged.part(first, many)
                if tree is not None:
                    tree = tree._replace(hidden=jax.lax.dynamic_slice_in_dim(tree.hidden, first, many))
            out, pool = paged_attention(
                q, k, v, PagePool(held.data, form, *held[1:]), place, ragged.page_table,
                ragged.starts, ragged.kv_lens, sinks=sinks, scale=params.scale, window=params.window,
                softcap=params.softcap, decode_only=self.decode_only, retention=retention, residual=residual,
                scores=None if scores is None else scores[0], tree=tree,
                shared=common, turn=self.groups[index].turn,
            )  # fmt: skip
            return out[None], *jax.tree.leaves(pool.slots)

        run = sharding.shard_map(
            local,
            (HEADS, KV_HEADS, KV_HEADS, SINK_AXES, KV_HEADS[:3], *_SHARED_AXES),
            (HEADS, *(POOL_AXES for _ in jax.tree.leaves(self.pools[index]))),
            check=not (split or span),  # with split queries, the devices of a row write the same pages
        )
        kv = (None if x is None else replicate_kv_heads(x) for x in (k, v))
        scores = None
        if self.heads is not None and v is not None and self.groups[index].rule is not None:
            scores = self.heads.score(layer, q, k, v)
        out, *slots = run(q, *kv, sinks, scores, *self._shared(index, layer))
        if span:
            out = sharding.constrain(out, "batch", "seq", "act_heads", None)
        return out, self._with(index, slots)

    def is_fresh_prefill(self, positions: Int[Array, "B T"]) -> Bool[Array, ""] | None:
        """Whether this step holds every token of all its requests; None if the computation must not depend on that."""
        if self.decode_only or self.invariant or any(group.lossy or group.rule for group in self.groups):
            return None
        lengths = self.starts[:, 1:] - self.starts[:, :-1]
        fresh = self.kv_lens == lengths
        if self.prompts is not None:  # generated tokens, which are computed again, attend to slices
            fresh &= self.kv_lens <= self.prompts
        return jnp.all((lengths == 0) | fresh)

    def self_segments(self, tokens: int) -> Segments:
        """Segments of the flat batch: each request is a document."""

        def local(table: Array, starts: Array, kv_lens: Array) -> Array:
            rows = RaggedBatch(table, starts, kv_lens).tokens(tokens)
            return jnp.where(rows.real, rows.request + 1, 0)

        return Segments(sharding.per_shard(local, "batch")(self.tables[0], self.starts, self.kv_lens))

    def write_latents(self, layer: LayerIndex, k: Float[Array, "B T 1 H"], positions: Int[Array, "B T"]) -> PagedCache:
        """Writes MLA latents to their pages."""
        index, k = self._latents(k)

        def local(k: Array, *shared: Any) -> tuple[Array, ...]:
            held, form, place, ragged, retention, *_ = self._unshared(index, *shared)
            new = form.pack(k[0], None, held.data.dtype)
            return tuple(jax.tree.leaves(write(held, new, place, ragged, ragged.tokens(k.shape[1]), retention)))

        run = sharding.shard_map(
            local, (KV_HEADS, *_SHARED_AXES), tuple(POOL_AXES for _ in jax.tree.leaves(self.pools[index]))
        )
        return self._with(index, run(replicate_kv_heads(k), *self._shared(index, layer)))

    def attend_slices(
        self,
        layer: LayerIndex,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T 1 H"],
        factors: Float[Array, " I"],
        params: AttentionParams,
    ) -> tuple[Float[Array, "B T N C"], PagedCache]:
        """Writes MLA latents in slices, then attends: exactly in prompts, slice by slice otherwise."""
        index, k = self._latents(k)
        latent, axes = self.groups[index].kv_spec.value_dim, sharding.axis_names("attn_kv_heads")

        def local(q: Array, k: Array, factors: Array, prompts: Array, *shared: Any) -> tuple[Array, ...]:
            held, form, place, ragged, *_ = self._unshared(index, *shared)
            q, k, slots = q[0], k[0], held
            if not self.decode_only:
                out, slots = mixed_over_slices(
                    q, k, factors, held, place, ragged, prompts[0], format=form, scale=params.scale, axes=axes
                )
                return out[None], *jax.tree.leaves(slots)

            def attend(q: Array) -> Array:
                nonlocal slots
                pool = PagePool(held.data, form, *held[1:])
                out, pool = paged_attention(q, k, None, pool, place, *ragged, scale=params.scale, decode_only=True)
                slots = pool.slots
                return out

            out = decode_over_slices(attend, q, factors, latent, axes)
            return out[None], *jax.tree.leaves(slots)

        pools = tuple(POOL_AXES for _ in jax.tree.leaves(self.pools[index]))
        axes_in = (HEADS, KV_HEADS, (None,), PER_REQUEST, *_SHARED_AXES)
        # Devices choose between branches with collectives by the same numbers, which JAX cannot know.
        run = sharding.shard_map(local, axes_in, (HEADS, *pools), check=False)
        out, *slots = run(q, k, factors, self.prompts, *self._shared(index, layer))
        return out, self._with(index, slots)

    def _latents(self, k: Float[Array, "B T 1 H"]) -> tuple[int, Float[Array, "B T K W"]]:
        """Group of latents, and their slices as kv heads; one kv head where they are whole."""
        index = next(i for i, g in enumerate(self.groups) if g.kv_spec.latent and g.kv_spec.key_dim == k.shape[3])
        spec = self.groups[index].kv_spec
        return index, k if spec.slices == 1 else sliced(k, spec.value_dim, spec.slices)

    def _group(self, kv_spec: KVSpec, window: int | None) -> int:
        """Index of the layer group of a layer, known when the program is traced."""
        return next(i for i, g in enumerate(self.groups) if (g.kv_spec, g.window) == (kv_spec, window))

    def _place(self, group: LayerGroup, layer: LayerIndex) -> Int[Array, ""]:
        """Place of a layer in its group."""
        places = np.zeros(max(group.layers) + 1, np.int32)
        places[list(group.layers)] = np.arange(len(group.layers))
        return jnp.asarray(places)[layer]

    def _shared(self, index: int, layer: LayerIndex) -> tuple[Array | None, ...]:
        """Pool of a group, place of a layer in it, and which slots the requests have, with axes ``_SHARED_AXES``."""
        group = self.groups[index]
        place = self._place(group, layer)
        first = sum(g.parts for g in self.groups[:index])
        table = self.tables[first]
        columns = None if self.columns is None else self.columns[first]
        if group.parts > 1:
            own = slice(first, first + group.parts)
            part, place = place // group.rows, place % group.rows
            table = jnp.stack(self.tables[own])[part]
            columns = None if self.columns is None else jnp.stack(self.columns[own])[part]
        rings = (None, None) if self.rings is None else self.rings
        tree = (None, None) if self.tree is None else self.tree
        common = None if self.shared is None or group.window is not None else self.shared[first]
        return *self.pools[index], place, table, self.starts, self.kv_lens, columns, *rings, *tree, common

    def _unshared(
        self,
        index: int,
        *shared: Any,
    ) -> tuple[Slots, PageFormat, Array, RaggedBatch, Retention | None, Residual | None, TreeMask | None, Array | None]:
        """Shards of ``_shared`` as one replica reads them, with the format of the shard's slots."""
        arrays = len(Slots._fields)
        held, rest = Slots(*shared[:arrays]), shared[arrays:]
        place, table, starts, kv_lens, columns, rings, found, *tree, common = rest
        group = self.groups[index]
        form = dataclasses.replace(group.format(), kv_heads=held.data.shape[2])
        retention = None if group.rule is None else Retention(group.rule, columns[0])
        residual = None if rings is None else Residual(rings[0], found[0])
        mask = None if tree[0] is None else TreeMask(tree[0][0], tree[1][0])
        common = None if common is None else common[0]
        return held, form, place, RaggedBatch(table[0], starts[0], kv_lens[0]), retention, residual, mask, common

    def _with(self, index: int, leaves: Sequence[Array]) -> PagedCache:
        slots = jax.tree.unflatten(jax.tree.structure(self.pools[index]), leaves)
        return dataclasses.replace(self, pools=(*self.pools[:index], slots, *self.pools[index + 1 :]))


_SHARED_AXES = (
    *(POOL_AXES,) * len(Slots._fields),
    (),
    TABLES,
    *(PER_REQUEST,) * 5,
    ("batch", None, None),
    PER_REQUEST,
    PER_REQUEST,
)
"""Logical axes of ``PagedCache._shared``."""
