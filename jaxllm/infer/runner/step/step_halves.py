"""Halves of a step: the rows of a step as two parts, so that one computes while the all-reduces of the other travel.

A step with prompts is cut in the middle of its rows, which may be inside of a prompt (ISO, arXiv:2409.11155): the
second half of the prompt attends to the keys that the first one has written. A decode-only step is cut between its
requests (nano-batches, NanoFlow, arXiv:2408.12757). The results are those of the whole step.

Legend: B replicas, T rows of the flat batch, H of a half, R requests, D embed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import sharding
from jaxllm.infer.runner.paged_cache import PagedCache
from jaxllm.models import Functional
from jaxllm.models.layers.token_parts import TokenParts
from pallas_kernels.paged_attention.ragged import RaggedBatch

OPTIONS = {
    "gpu": {"xla_gpu_all_reduce_combine_threshold_bytes": "0"},
    "tpu": {
        "xla_jf_crs_combiner_threshold_count": "1",
        "xla_enable_async_all_reduce": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": "true",
    },
}
"""Compiler options by platform: the all-reduces of both halves are not combined, or they would wait for each other; on
TPUs they are started ahead of what needs them."""

Requests = tuple[tuple[Array, ...], Array, Array]
"""Page tables, ``starts`` and ``kv_lens`` of a half, see ``PagedCache``."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["cache", "halves"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class HalvedCache:
    """Paged KV cache of a step in two halves.

    Attributes:
        cache: of the whole step.
        halves: the requests of each half.
    """

    cache: PagedCache
    halves: tuple[Requests, Requests]

    def part(self, number: int) -> PagedCache:
        """The KV cache as the rows of a half have it."""
        tables, starts, kv_lens = self.halves[number]
        return dataclasses.replace(self.cache, tables=tables, starts=starts, kv_lens=kv_lens)

    def after(self, part: PagedCache) -> HalvedCache:
        """The KV cache with the pages that a half has written."""
        return dataclasses.replace(self, cache=dataclasses.replace(self.cache, pools=part.pools))


def forward_in_halves(
    model: Functional, params: Any, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: PagedCache
) -> tuple[Float[Array, "B T D"], PagedCache]:
    """Hidden states before the head and the updated KV cache, as ``model.forward``, with each layer run for two halves.

    Args:
        model: whose rules do not split the rows of a replica.
    """
    each = functools.partial(sharding.per_shard, over="batch")
    with sharding.use_rules(model.rules):
        size = -(-tokens.shape[1] // 2)
        if cache.decode_only:
            middle, halves = jnp.full(tokens.shape[:1], tokens.shape[1] // 2, jnp.int32), halved_requests(cache)
        else:
            middle, halves = each(halved_rows)(cache.tables, cache.starts, cache.kv_lens)

        def cut(x: Array, middle: Array) -> tuple[Array, Array]:
            first = x[: len(x) // 2] if cache.decode_only else x[:size]
            return first, jax.lax.dynamic_slice_in_dim(x, middle, size)

        def joined(first: Array, second: Array, middle: Array) -> Array:
            rows = jnp.zeros((tokens.shape[1], *first.shape[1:]), first.dtype).at[: len(first)].set(first)
            return jax.lax.dynamic_update_slice_in_dim(rows, second, middle, 0)

        x, places = (TokenParts(each(cut)(one, middle)) for one in (model.embed(params, tokens, positions), positions))
        stream, ctx = model.blocks(params, x, places, HalvedCache(cache, halves))
        assert isinstance(stream, TokenParts)
        assert isinstance(ctx, HalvedCache)
        return each(joined)(*stream.parts, middle), ctx.cache


def halved_rows(
    tables: tuple[Array, ...], starts: Int[Array, " R1"], kv_lens: Int[Array, " R"]
) -> tuple[Int[Array, ""], tuple[Requests, Requests]]:
    """First row of the second half, and the requests of each half. Rows that are in use are halved, not the padding.

    The context of a request that has rows in both ends in the first half before those of the second.
    """
    middle = starts[-1] // 2
    batch = RaggedBatch(tables[0], starts, kv_lens)
    both = batch.part(0, middle), batch.part(middle, starts[-1] - middle)
    return middle, tuple((tables, half.starts, half.kv_lens) for half in both)  # pyright: ignore[reportReturnType]


def halved_requests(cache: PagedCache) -> tuple[Requests, Requests]:
    """The requests of each half of a decode-only step, which has a row for each."""
    middle = cache.kv_lens.shape[1] // 2

    def half(first: int, end: int) -> Requests:
        starts = cache.starts[:, first : end + 1]
        return tuple(x[:, first:end] for x in cache.tables), starts - starts[:, :1], cache.kv_lens[:, first:end]

    return half(0, middle), half(middle, cache.kv_lens.shape[1])
