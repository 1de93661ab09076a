"""Chunk moves: copies of tokens in the paged KV cache to other places, with keys turned to other positions.

Legend: L layers of a group, P pages, K kv heads, C slots of a page, W elements of a slot, Z scales of a slot, M tokens
of a copy, H head dim of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxllm.config import ConfigError
from jaxllm.infer.chunks.cached_chunks import Reuse
from jaxllm.infer.runner.paged_cache import LayerGroup
from jaxllm.infer.scheduling.page_allocator import NO_PAGE
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.models import DecoderConfig
from jaxllm.models.layers.layer import AttentionLayer
from pallas_kernels.paged_attention import Slots

TOKENS_PER_MOVE = 256
"""Tokens that one program copies."""


@dataclass(frozen=True)
class ChunkMove:
    """Copy of a chunk's tokens into a sequence's pages.

    Attributes:
        sequence: sequence that the copies are of.
        turn: positions by which the keys are turned.
        sources, targets: int32[M] by layer group: slots of the pool, ``page * C + slot``.
    """

    sequence: Sequence
    turn: int
    sources: tuple[np.ndarray, ...]
    targets: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, sequence: Sequence, reuse: Reuse, start: int, held: list[list[int]], page_size: int) -> ChunkMove:
        """Copy of what a sequence reuses from ``start`` on, of a chunk's pages by layer group."""
        new = np.arange(start, reuse.stop)
        turn = reuse.origin - reuse.lead
        old = new - turn

        def slots(pages: list[int], at: np.ndarray) -> np.ndarray:
            found = np.asarray(pages)[at // page_size]
            assert np.all(found != NO_PAGE)
            return (found * page_size + at % page_size).astype(np.int32)

        targets = tuple(slots(own, new) for own in sequence.pages)
        return cls(sequence, turn, tuple(slots(pages, old) for pages in held), targets)


def check_chunk_cache(model: DecoderConfig, mesh: jax.sharding.Mesh | None) -> None:
    """Checks that an engine can have a chunk cache.

    Raises:
        ValueError: the model's keys cannot be turned to other positions, or it serves on several devices.
    """
    refused = {
        "a mesh of several devices": mesh is not None and mesh.size > 1,
        "learned positions": model.learned_positions is not None,
        "virtual tokens at the start of each sequence": model.virtual_tokens > 0,
    }
    for what in (what for what, is_so in refused.items() if is_so):
        raise ConfigError(f"engine: chunk_cache does not go with {what}; leave one of them out.")
    for layer in {block.attention for block in model.blocks}:
        key = jax.ShapeDtypeStruct((1, layer.kv_spec.key_dim), jnp.float32)
        try:
            jax.eval_shape(layer.turned, key, jax.ShapeDtypeStruct((), jnp.int32))
        except ValueError as error:
            raise ConfigError(f"engine: chunk_cache turns keys to other positions: {error}; leave it out.") from None


class ChunkMover:
    """Runs chunk moves on a runner's pools; its programs are compiled when it is built.

    Args:
        runner: ``ModelRunner`` of a model that ``check_chunk_cache`` accepts.
    """

    def __init__(self, runner: Any):
        self._runner, model = runner, runner.model.config
        ints, turn = jax.ShapeDtypeStruct((TOKENS_PER_MOVE,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
        self._programs: list[Callable[..., Slots]] = []
        for group, pool in zip(runner.spec.groups, runner.pools, strict=True):
            run = functools.partial(move_tokens, _layers(model, group), group)
            self._programs.append(jax.jit(run, donate_argnums=0).lower(pool, ints, ints, turn).compile())

    def move(self, moves: list[ChunkMove]) -> None:
        """Starts copies, in order."""
        pools = list(self._runner.pools)
        for one in moves:
            for group, (sources, targets) in enumerate(zip(one.sources, one.targets, strict=True)):
                beyond = pools[group].data.shape[1] * pools[group].data.shape[3]
                for first in range(0, len(sources), TOKENS_PER_MOVE):
                    rows = np.zeros((2, TOKENS_PER_MOVE), np.int32)
                    rows[1] = beyond  # out of range: nothing is written
                    part = slice(first, first + TOKENS_PER_MOVE)
                    rows[:, : len(sources[part])] = sources[part], targets[part]
                    pools[group] = self._programs[group](pools[group], *rows, np.int32(one.turn))
        self._runner.pools = tuple(pools)


def move_tokens(
    layers: tuple[AttentionLayer, ...],
    group: LayerGroup,
    pool: Slots,
    sources: Int[Array, " M"],
    targets: Int[Array, " M"],
    turn: Int[Array, ""],
) -> Slots:
    """Pool of a layer group with the tokens of some slots copied to others, their keys ``turn`` positions later.

    Args:
        layers: attention layer of each row of the pool.
        group: layer group of the pool.
        pool: data [L, P, K, C, W], and scales [L, P, K, Z, C] where the format has them.
        sources, targets: slots; targets out of range are not written.
    """
    form, size = group.format(), pool.data.shape[3]
    rows, _, kv, _, _ = pool.data.shape
    page, slot = sources // size, sources % size
    data = pool.data[:, page, :, slot]  # M L K W
    scales = None if pool.scales is None else pool.scales[:, page, :, :, slot][..., None]  # M L K Z 1
    dtype = jnp.promote_types(group.plain, jnp.float32)
    held = form.unpack(Slots(data[..., None, :], scales), dtype)[..., 0, :]  # M L K W
    keys, values = form.keys(held), None if form.latent else form.values(held)
    turned = keys
    for layer in dict.fromkeys(layers):
        here = np.asarray([other == layer for other in layers])[:, None, None]
        turned = jnp.where(here, layer.turned(keys, turn), turned)
    flat = (None if x is None else x.reshape(-1, *x.shape[2:]) for x in (turned, values))
    new = form.pack(*flat, pool.data.dtype)  # pyright: ignore[reportCallIssue]
    page, slot = targets // size, targets % size
    written = new.data.reshape(-1, rows, kv, new.data.shape[-1])
    found = pool.data.at[:, page, :, slot].set(written.astype(pool.data.dtype), mode="drop")
    if pool.scales is None:
        return pool._replace(data=found)
    scales = new.scales.reshape(-1, rows, kv, new.scales.shape[-1])
    return pool._replace(data=found, scales=pool.scales.at[:, page, :, :, slot].set(scales, mode="drop"))


def _layers(model: DecoderConfig, group: LayerGroup) -> tuple[AttentionLayer, ...]:
    """Attention layer of each row of a group's pool."""
    return tuple(model.blocks[number].attention for number in group.layers)
