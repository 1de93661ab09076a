"""Batches of a run with context parallelism by need: the slots of its devices, and documents placed in them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxllm.data.context_by_need import ContextSlots, SlottedBatch
from jaxllm.train.config import RunConfig
from jaxllm.train.model_flops import forward_flops_per_token
from sharding import Rules


def context_slots(config: RunConfig, mesh: Mesh | AbstractMesh, rules: Rules) -> ContextSlots | None:
    """Slots of a run's devices; None: its rows are split alike.

    Args:
        config: the run.
        mesh: of the run.
        rules: its sharding rules.

    Raises:
        ShardingError: rows are longer than all devices hold, or slots do not divide over the mesh.
    """
    if config.parallel.context != "by_need" or (devices := mesh.shape.get("context", 1)) == 1:
        return None
    data, rows = config.data, math.prod(mesh.shape.get(axis, 1) for axis in rules.mesh_axes("batch"))
    slot = config.parallel.slot or data.batch_size * data.seq_len // (config.accumulate * rows * devices)
    slots = ContextSlots(
        rows, devices, slot, data.seq_len, data.batch_size * data.seq_len, config.parallel.layout, token_pairs(config)
    )
    rules.spec(("batch", "residual_seq"), mesh, slots.shape[1:], what="slots of all devices (parallel.slot x context)")
    return slots


def token_pairs(config: RunConfig) -> float:
    """Pairs of a query and a key whose FLOPs are those of all else that a token of a run takes."""
    tokens, whole = (forward_flops_per_token(config.model, lambda _, n=n: n) for n in (0.0, 1.0))
    return tokens / (whole - tokens)


def slotted_shardings(rows: NamedSharding) -> SlottedBatch:
    """Shardings of a slotted batch, those of its arrays as ``rows`` of a plain one [B S]."""
    whole = NamedSharding(rows.mesh, jax.P())
    return SlottedBatch(NamedSharding(rows.mesh, jax.P(None, *rows.spec)), whole, whole)


def put_slotted(batch: Any, slots: ContextSlots, rows: NamedSharding) -> SlottedBatch:
    """A batch in slots, on the devices of all processes.

    Args:
        batch: host arrays of the whole batch, in each process.
        slots: of the run.
        rows: sharding of a plain batch.
    """
    slotted, where = slots.arrange(batch), slotted_shardings(rows)

    def place(x: Any, there: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(x.shape, there, lambda index: x[index])

    arrays = jax.tree.map(lambda x: place(x, where.rows), slotted.rows)
    return SlottedBatch(arrays, place(slotted.rings, where.rings), place(slotted.count, where.count))


def abstract_slotted(batch: Any, slots: ContextSlots) -> SlottedBatch:
    """Shapes, dtypes and shardings of a slotted batch, from those of a plain one."""
    where = slotted_shardings(batch.tokens.sharding)
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(slots.shape, x.dtype, sharding=where.rows), batch)
    rings = jax.ShapeDtypeStruct(slots.shape[:1], jnp.int32, sharding=where.rings)
    return SlottedBatch(rows, rings, jax.ShapeDtypeStruct((), jnp.int32, sharding=where.count))
