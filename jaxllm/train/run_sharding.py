"""Sharding table of a run: how its arrays are split over devices that need not be present."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxllm.models import Functional
from jaxllm.parallel.collective_traffic import expected_collectives
from jaxllm.parallel.pipeline.offload_bands import offload_bands
from jaxllm.parallel.pipeline.schedule_table import tabulate
from jaxllm.parallel.pipeline.schedule_view import facts
from jaxllm.parallel.sharding_table import ShardingTable, state_sharding_table
from jaxllm.parallel.sharding_table_view import size
from jaxllm.train.config import RunConfig
from jaxllm.train.outer.compressed_gradients import AXIS, compressed_bytes
from jaxllm.train.outer.compression import PlainMean
from jaxllm.train.outer.outer_step import sent_bytes
from jaxllm.train.outer.replicas import REPLICA, slow_links
from jaxllm.train.run import fitting_mesh, two_level_mesh
from jaxllm.train.run_model import run_model
from jaxllm.train.run_slots import context_slots
from jaxllm.train.step.pipelined_loss import pipeline_plan
from jaxllm.train.step.step_builder import build_optimizer, run_state
from jaxllm.train.unequal.unequal_rows import unequal_rows
from jaxllm.train.unequal.uneven_state import described_state
from sharding import MeshSpec
from sharding.topology import Topology


def described_mesh(config: RunConfig, num_devices: int, topology: Topology | None = None) -> MeshSpec:
    """Mesh of a run over devices that need not be present.

    Args:
        config: the run.
        num_devices: number of devices.
        topology: of the devices; None: all in one slice or node.

    Raises:
        ShardingError, ConfigError: the run does not fit its mesh; lists the nearest meshes that it does.
    """
    mesh = fitting_mesh(config, run_model(config), num_devices)
    if topology is None:
        return two_level_mesh(config, mesh, 1, "")
    islands = {"tpu": topology.slices, "gpu": topology.shape[0]}.get(topology.platform, 1)
    return two_level_mesh(config, mesh, islands, topology.platform)


def sharding_table(config: RunConfig, num_devices: int, topology: Topology | None = None) -> ShardingTable:
    """Sharding of a run's train state over ``num_devices`` devices; nothing is compiled.

    Args:
        config: the run.
        num_devices: number of devices.
        topology: of the devices, where it is known.

    Raises:
        ShardingError: the run does not fit its mesh; lists the nearest meshes that it does.
    """
    model = run_model(config)
    mesh = described_mesh(config, num_devices, topology).abstract()
    transform = build_optimizer(config, model)
    state = run_state(config, model, transform, mesh)
    found = state_sharding_table(state.params, state.opt_state, model.logical_axes(), mesh.shape)
    links = state_sharding_table(state.params, state.extras, model.logical_axes(), mesh.shape)
    found = replace(found, optimizer=found.optimizer + links.optimizer)
    rows, length = config.data.batch_size, config.data.seq_len
    outer = "" if config.outer.kind == "none" else outer_remark(config, state.params, mesh.shape[REPLICA])
    if mesh.shape.get("stage", 1) > 1:
        return replace(found, remark="\n".join(filter(None, (outer, pipeline_remark(config, model, mesh)))))
    if config.grads.compress:
        return replace(found, remark=compressed_remark(config, state.params, mesh))
    slots = context_slots(config, mesh, model.rules)
    uneven = unequal_rows(config, mesh)
    said = [one.describe() for one in (slots, uneven) if one is not None]
    said.append(described_state(config, mesh.shape, state.opt_state))
    remark = "\n".join(filter(None, (outer, *said)))
    if outer:
        rows //= mesh.shape[REPLICA]
        mesh = mesh.update(axis_sizes=tuple(1 if name == REPLICA else n for name, n in mesh.shape.items()))
    try:
        sent = expected_collectives(
            model, mesh, config.parallel, rows=rows, seq_len=length, accumulate=config.accumulate
        )
    except NotImplementedError as unknown:
        return replace(found, remark="\n".join(filter(None, (remark, str(unknown)))))
    return replace(found, collectives=sent, remark=remark)


def outer_remark(config: RunConfig, params: Any, replicas: int) -> str:
    """Description of an outer step: bytes that a device sends over ``replica``."""
    sent = sent_bytes(config.outer, params, replicas)
    return (
        f"outer step of {replicas} replicas every {config.outer.every} steps: a device sends {size(sent)} over "
        f"{REPLICA}, {size(sent / config.outer.every)} a step; data parallelism over as many would send "
        f"{size(whole_bytes(config, params, replicas))} a step"
    )


def whole_bytes(config: RunConfig, params: Any, devices: int) -> int:
    """Bytes that a device sends in a step's all-reduce of gradients, in compute dtype, over so many devices."""
    dtype = jnp.dtype(config.model.dtype)
    shards = [math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(params)]
    return sum(PlainMean().sent(shard, dtype, devices) for shard in shards)


def compressed_remark(config: RunConfig, params: Any, mesh: AbstractMesh) -> str:
    """Description of compressed gradients: bytes that a device sends over ``data`` in a step."""
    devices = mesh.shape[AXIS]
    sent = compressed_bytes(config.grads.exchange, params, devices)
    whole = whole_bytes(config, params, devices)
    return (
        f'gradients over {AXIS} with grads.compress = "{config.grads.compress}": a device sends {size(sent)} a step '
        f"instead of {size(whole)}\nOther collectives with compressed gradients: no formula yet."
    )


def pipeline_remark(config: RunConfig, model: Functional, mesh: AbstractMesh) -> str:
    """Description of a pipeline: bubble, memory, messages between stages, and the cost of embedding and head."""
    schedule, depths = pipeline_plan(config, mesh.shape["stage"])
    table = tabulate(schedule)
    width = jnp.dtype(config.model.dtype).itemsize
    shape = (config.data.batch_size // config.accumulate, config.data.seq_len, config.model.embed_dim)
    split = [part for part in model.rules.spec(("batch", "residual_seq", "act_embed"), mesh) if part is not None]
    axes = [axis for part in split for axis in ((part,) if isinstance(part, str) else part)]
    message = math.prod(shape) * width // math.prod(mesh.shape[axis] for axis in axes)
    parallel = config.parallel
    bands = offload_bands(schedule, depths.rooms, parallel.offload, parallel.offload_chunks)
    pools = [(one, one.end - one.first, tabulate(schedule, one.away)) for of in bands for one in of]
    away = sum(layers for band, layers, _ in pools if band.away)  # of an operation, those that are copied
    slots = sum(layers * own.saves for band, layers, own in pools if len(band.away) < schedule.chunks) + 2 * away
    hosted = sum(layers * (own.hosted + 1) for band, layers, own in pools if band.away)
    more = "" if config.model.remat == "full" else f', and what remat = "{config.model.remat}" saves of each'
    vocabulary = config.model.vocab_size * config.model.embed_dim // mesh.shape.get("tensor", 1)
    matrices = 1 if config.model.tied else 2
    sums = jnp.dtype(config.model.param_dtype).itemsize

    def sent(each: float) -> str:
        return f"{table.sends} x {size(each)} = {size(table.sends * each)}"

    links = slow_links(config.outer, mesh.shape.get(REPLICA, 1), config.model.embed_dim)
    narrow = message * links.rank / config.model.embed_dim if links else 0.0
    return "\n".join(
        [
            facts(schedule),
            f"layers (or groups) of the virtual stages: {', '.join(map(str, depths.counts.sum(1)))}",
            f"saved layer inputs on a device: {slots} x {size(message)} = {size(slots * message)}{more}",
            *(_offloaded(away, hosted, message, more) if away else []),
            f"point-to-point messages sent by a device in a step: {sent(message)}",
            *([f"in the slow replicas {', '.join(map(str, links.slow))}: {sent(narrow)}"] if links else []),
            f"embedding and head, gathered on every stage during a step: {size(matrices * vocabulary * width)}, and "
            f"{size(matrices * vocabulary * sums)} of gradients",
            "Collectives of other mesh axes in a pipeline: no formula yet.",
        ]
    )


def _offloaded(layers: int, hosted: int, message: int, more: str) -> list[str]:
    """Lines about activations offloaded to the host: layers that an operation copies, and places for all of them."""
    return [
        f"offloaded to its host: {hosted} x {size(message)} = {size(hosted * message)}{more}",
        f"copied to and from the host by every operation: {layers} x {size(message)} = {size(layers * message)}{more}",
    ]
