"""Eviction by scores as a part of an engine step: before anything is computed, entries leave and the others move up.

Legend: B replicas, S requests of a step, J columns of a page table, K kv heads.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

import sharding
from jaxllm.config import ConfigError
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.runner.page_programs import Pools
from jaxllm.infer.runner.paged_cache import PER_REQUEST, POOL_AXES, TABLES, LayerGroup
from jaxllm.infer.runner.retention.head_files import load_heads
from jaxllm.infer.runner.retention.locret import Locret
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.models import DecoderConfig
from jaxllm.models.retaining_heads import RetainingHeads
from pallas_kernels.paged_attention import Slots
from pallas_kernels.paged_attention.retention import ScoreRule, by_scores, evict

RETAINING_HEADS = "retaining_heads"
"""Name of the retaining heads among the weights that programs take."""


def evict_entries(
    pools: Pools, packed: Int[Array, "B elements"], shape: StepShape, groups: tuple[LayerGroup, ...]
) -> tuple[Pools, dict[str, Array]]:
    """Runs ``evict`` for the requests whose tokens so far are a multiple of their rule's interval.

    Args:
        pools, packed, shape: those of the step.
        groups: layer groups; a part of a group has the rule that ``LayerGroup.rules`` says.

    Returns:
        the pools; and ``evictions``, Int[Array, "B tables S 3"], see ``StepShape.outputs``.
    """

    def read(packed: Array) -> tuple[Array, Array, Array]:
        x = shape.inputs.unpack(packed)
        lengths = x["starts"][1:] - x["starts"][:-1]
        active = (lengths > 0) & (x["slots"] < shape.slots)
        return x["tables"], x["fresh"][:, :, 1], jnp.where(active, x["kv_lens"] - lengths, 0)

    heads = sharding.axis_names("attn_kv_heads")

    def run(pool: Slots, table: Array, columns: Array, starts: Array, rule: ScoreRule) -> tuple[Slots, Array]:
        def local(table: Array, columns: Array, starts: Array, *arrays: Array) -> tuple[Array, ...]:
            held = jax.tree.unflatten(jax.tree.structure(pool), arrays)
            made, found = evict(held, table[0], columns[0], starts[0], rule)
            if heads:
                most, counts = jax.lax.pmax(found[:, :1], heads), jax.lax.psum(found[:, 1:], heads)
                found = jnp.concatenate([most, counts], axis=1)
            return found[None], *jax.tree.leaves(made)

        arrays = jax.tree.leaves(pool)
        axes = tuple(POOL_AXES for _ in arrays)
        mapped = sharding.shard_map(
            local, (TABLES, PER_REQUEST, PER_REQUEST, *axes), (TABLES, *axes), check=False
        )  # fmt: skip
        found, *made = mapped(table, columns, starts, *arrays)
        return jax.tree.unflatten(jax.tree.structure(pool), made), found

    tables, columns, starts = sharding.per_shard(read, "batch")(packed)
    changed, evictions, number = list(pools), [], 0
    for index, group in enumerate(groups):
        for rule in group.rules:
            if (scored := by_scores(rule)) is not None:
                at = shape.retained.index(number)
                changed[index], found = run(changed[index], tables[:, number], columns[:, at], starts, scored)
                evictions.append(found)
            number += 1
    return tuple(changed), {"evictions": jnp.stack(evictions, axis=1)}


def heads_of(config: DecoderConfig, groups: tuple[LayerGroup, ...], devices: int) -> dict[str, RetainingHeads]:
    """Retaining heads that the layer groups' rule names, as programs take them beside the weights; empty without.

    Args:
        config: the model.
        groups: its layer groups.
        devices: number of devices that serve it.

    Raises:
        ValueError: they cannot be read, or do not go with the model or the devices.
    """
    paths = {group.rule.heads for group in groups if isinstance(group.rule, Locret)}
    if not paths:
        return {}
    if devices > 1:
        raise ConfigError(
            f"engine: locret reads all heads of a token, and {devices} devices have parts of them: serve it on one "
            "device, or use corm or pyramid."
        )
    return {RETAINING_HEADS: load_heads(Path(paths.pop()), config)}


def check_scores(config: EngineConfig, groups: tuple[LayerGroup, ...], shards: int) -> None:
    """Checks what goes with a retention rule that chooses by scores.

    Args:
        config: configuration of an engine.
        groups: its layer groups.
        shards: number of shards of the kv heads.

    Raises:
        ValueError: names what does not go with it, and what to do.
    """
    scored = [group for group in groups if by_scores(group.rule) is not None]
    if scored and (config.verify_tokens or config.speculate):
        raise ConfigError(
            f"engine: retention = {config.retention!r} chooses by attention scores, to which tokens that are refused "
            "later would add: leave speculate and verify_tokens out, or use window+sinks."
        )
    if any(group.kv_spec.kv_heads % shards for group in scored):
        raise ConfigError(
            f"engine: retention = {config.retention!r} chooses entries by kv head, and the mesh has {shards} shards "
            f"for {scored[0].kv_spec.kv_heads} of them: use a tensor axis that divides them, or data."
        )
