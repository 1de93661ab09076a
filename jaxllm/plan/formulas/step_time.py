"""Step time of a layout by formula, split by cause.

A matmul takes the longer of its FLOPs, at the rate that whole tiles attain, and its bytes through HBM (roofline,
LLM-Viewer, arXiv:2402.16363); elementwise operations take their bytes. Passes: forward once, backward twice (one
matmul for the input's gradient, one for the weight's), plus what ``remat`` recomputes. Collectives that can overlap
with compute count only where they exceed it (exposed communication; vTrain, arXiv:2312.12391); all others count in
full. A pipeline divides by the fraction of time that its schedule is busy (``jaxllm.parallel.pipeline``).

Legend: T tokens of a micro-batch on a device, D embed, V vocab, P parameters of a device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax.numpy as jnp

from jaxllm.models import BlockConfig, DecoderConfig
from jaxllm.models.low_precision_matmul import MatmulPrecision, QuantisationScheme
from jaxllm.models.remat import offloaded_share
from jaxllm.parallel.collective_traffic import ONCE, expected_collectives
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.parallel.pipeline.schedule import OpCosts
from jaxllm.parallel.pipeline.schedule_generators import default_chunks, make
from jaxllm.parallel.sharding_table import ExpectedCollective
from jaxllm.plan.formulas import memory_estimate as memory
from jaxllm.plan.formulas import offload_time
from jaxllm.plan.formulas.calibration import DEFAULT, Calibration
from jaxllm.plan.formulas.collective_time import Network
from jaxllm.plan.formulas.device_work import (
    DeviceWeight,
    DeviceWork,
    architecture,
    cached_model,
    rules_of,
    with_remat,
    without_stages,
)
from jaxllm.plan.formulas.layer_parts import full_or_none, layered_work
from jaxllm.plan.formulas.optimizer_memory import average_bytes, state_bytes
from jaxllm.plan.hardware import Cluster, Hardware
from jaxllm.train import RunConfig
from jaxllm.train.model_flops import train_flops_per_token
from jaxllm.train.outer.compressed_gradients import AXIS, compressed_bytes
from jaxllm.train.outer.outer_step import sent_bytes
from jaxllm.train.outer.replicas import REPLICA
from sharding import MeshSpec, abstract_params

ATTENTION_BACKWARD = 3.5
"""Attention matmuls of the backward pass relative to the two of the forward pass: both kernels, dq and dk/dv,
recompute the scores and their gradient.
"""
SCORE_PASSES = {"forward": 6, "backward": 11, "again": 6}
"""Memory passes over float32 scores where attention is plain JAX: of the 8B step compiled for 64 H100s."""
UPDATE_PASSES = 5
"""Memory passes of an optimizer update over arrays of the parameters' size: the gradient is written and read twice
(first for its norm), the parameter read and written. The optimizer state is read and written in addition.
"""
UPDATE_BYTES = 4 * UPDATE_PASSES + 2 * 8
"""Bytes that the update moves per float32 parameter with two moments."""
STREAM_PASSES, INNER_PASSES = 10, 3
"""Memory passes of a block's forward pass, outside matmuls, over the residual stream and over inner activations."""
EXCHANGE_PASSES = {"forward": 6, "backward": 8, "again": 0}
"""Memory passes over the rows that a device receives for its experts, outside matmuls and transfers: they are sorted by
expert, their outputs scaled and sorted back; in the backward pass, whatever the remat policy, with gradients beside."""
EXPERT_WEIGHT_PASSES = 11
"""Memory passes over a layer's expert weights in the backward pass of an exchange, which sums their gradients over its
rounds. These passes were counted in two compiled programs (docs/train/plan.md)."""
WEIGHTS = ("weights", "gradients", "sums of gradients", *ONCE)
BESIDE = "outer step, beside the steps"
"""Purpose of collectives that no operation of the step waits for (CO2)."""
RING = ("keys and values, forward", "keys and values, backward")
RING_ENDS = ("their gradients, one step behind", "their gradients, home")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by cause.

    Attributes:
        compute: FLOP-bound time.
        memory: time waiting for HBM.
        near: exposed collectives inside a slice or node, by mesh axes.
        far: exposed collectives over the network between slices or nodes.
        bubble: pipeline bubble.
        host: exposed host transfers (offload).
        flops: model FLOPs of the step, without recomputation.
        devices: number of devices.
        hidden: overlapped collectives, by mesh axes.
        disk: exposed reads and writes of files, and passes that are made again for a streamed step.
    """

    compute: float
    memory: float
    near: dict[str, float]
    far: dict[str, float]
    bubble: float
    host: float
    flops: float
    devices: int
    hidden: dict[str, float] = field(default_factory=dict)
    disk: float = 0.0

    @property
    def seconds(self) -> float:
        """Total seconds of a step."""
        sent = (*self.near.values(), *self.far.values())
        return sum((self.compute, self.memory, *sent, self.bubble, self.host, self.disk))

    def mfu(self, peak: float) -> float:
        """Model FLOPs utilisation at ``peak`` FLOP/s per device."""
        return self.flops / self.seconds / self.devices / peak


@dataclass(frozen=True)
class DeviceRates:
    """Attained rates of a device: turns FLOPs and bytes into seconds."""

    hardware: Hardware
    platform: str
    calibration: Calibration
    width: int
    matmul_precision: MatmulPrecision

    @property
    def flops(self) -> float:
        """Peak FLOP/s in compute dtype."""
        return self.hardware.flops if self.width == 2 else self.hardware.flops_float32

    @property
    def flops_of_blocks(self) -> float:
        """Peak FLOP/s of matmuls with a block's weights, whose operands may be 8-bit
        (``jaxllm.models.low_precision_matmul``).
        """
        if not QuantisationScheme(self.matmul_precision).multiplies_8bit:
            return self.flops
        return self.hardware.flops_int8 if self.matmul_precision == "int8" else self.hardware.flops_fp8

    def product(self, rows: float, inner: int, outer: int, block: bool) -> tuple[float, float]:
        """(compute, waiting for HBM) seconds of a matmul [rows, inner] x [inner, outer], with a ``block``'s weight or
        the head.
        """
        tile, c = self.hardware.tile, self.calibration
        filled = inner * outer / (_up(inner, tile) * _up(outer, tile)) * rows / _up(rows, 8)
        peak = self.flops_of_blocks if block else self.flops
        work = 2 * rows * inner * outer / (peak * c.matmul * filled)
        moved = self.stream((rows * inner + inner * outer + rows * outer) * self.width)
        return work, max(0.0, moved - work)

    def attention(self, products: float) -> float:
        """Seconds of so many multiply-accumulates of attention."""
        return 2 * products / (self.flops * self.calibration.attention)

    def stream(self, size: float) -> float:
        """Seconds of so many bytes through HBM."""
        return size / (self.hardware.bandwidth * self.calibration.memory)


def predict(run: RunConfig, cluster: Cluster, mesh: MeshSpec, calibration: Calibration = DEFAULT) -> StepTime:
    """Step time of a run whose mesh is legal on the cluster."""
    return predict_work(layered_work(run, mesh), cluster, calibration)


def predict_work(work: DeviceWork, cluster: Cluster, calibration: Calibration = DEFAULT) -> StepTime:
    """Step time of a device's work, see ``predict``."""
    run, platform = work.run, cluster.topology.platform
    rates = DeviceRates(cluster.hardware, platform, calibration, work.width, run.model.matmul_precision)
    layers = [layer_seconds(part, rates) for part in work.alike]
    micro = work.micro_batches
    compute, waiting, around, forward = (sum(column) for column in zip(*layers, strict=True))
    # Saved activations are stacked over layers: written there, and read back.
    kept = 2 * micro * rates.stream(memory.kept_bytes(work)) + rates.stream(_handled(work))
    width = jnp.dtype(run.model.param_dtype).itemsize
    parameters, averaged = (sum(w.stored * w.layers for w in ws) * width for ws in (work.trained, work.weights))
    kept_arrays = state_bytes(work, parameters) + average_bytes(run, averaged)
    update = rates.stream(UPDATE_PASSES * parameters + 2 * kept_arrays)
    near, far, hidden = _exposed(work, cluster, calibration, compute, around)
    state = offload_time.layer_share(work) * state_bytes(work, parameters)
    host = _host(work, cluster.hardware, calibration, compute, state)
    busy = compute + waiting + kept + sum(near.values()) + sum(far.values()) + host
    return StepTime(
        compute,
        waiting + kept + update,
        near,
        far,
        _bubble(work, busy, forward),
        host,
        _model_flops(architecture(run.model), work.row) * run.data.batch_size * work.row,
        cluster.devices,
        hidden,
    )


class LayerSeconds(NamedTuple):
    """Seconds of a step's passes through a work's layers, of all micro-batches.

    Attributes:
        compute: FLOP-bound time.
        memory: time waiting for HBM.
        attention: FLOP-bound time of attention, which ``compute`` has too.
        forward: FLOP-bound time of the forward pass of one micro-batch.
    """

    compute: float
    memory: float
    attention: float
    forward: float


def layer_seconds(work: DeviceWork, rates: DeviceRates) -> LayerSeconds:
    """Seconds of a step's passes through a work's layers, which are of one layout and remat policy."""
    passes = [_Pass(work, rates, kind) for kind in ("forward", "backward", "again")]
    micro = work.micro_batches
    compute, waiting, around = (
        micro * sum(getattr(one, name) for one in passes) for name in ("compute", "memory", "attention")
    )
    return LayerSeconds(compute, waiting, around, passes[0].compute)


@functools.lru_cache(maxsize=256)
def _model_flops(config: DecoderConfig, row: int) -> float:
    return train_flops_per_token(config, row)


class _Pass:
    """Seconds of one micro-batch's forward pass, backward pass, or recomputation ("again")."""

    def __init__(self, work: DeviceWork, rates: DeviceRates, kind: str):
        self.work, self.rates, self.kind = work, rates, kind
        self.compute = self.memory = self.attention = 0.0
        for weight in work.weights:
            # A tied embedding is also the head; the embedding lookup is free.
            if weight.matrix and (weight.name == "embedding/table") <= work.run.model.tied:
                self._products(weight)
            if weight.exchanged and kind == "backward":
                self.memory += rates.stream(EXPERT_WEIGHT_PASSES * weight.used * weight.layers * work.width)
        for block, count in work.blocks.items():
            times = {"forward": 1.0, "backward": ATTENTION_BACKWARD, "again": float(work.run.model.remat == "full")}[
                kind
            ]
            arithmetic = rates.attention(times * count * work.tokens * work.attended(block))
            self.attention += arithmetic
            if times and not work.has_flash_kernel(block, rates.platform):
                scores = 4 * SCORE_PASSES[kind] * count * work.tokens * work.scores(block)
                self.memory += max(0.0, rates.stream(scores) - arithmetic)
            inner = sum(work.inner_widths(block).values()) * work.tokens * work.width
            moved = STREAM_PASSES * work.stream_bytes() + INNER_PASSES * inner
            self.memory += rates.stream(moved * count * self._elementwise() + count * self._exchanged(block))
        self.compute += self.attention

    def _exchanged(self, block: BlockConfig) -> float:
        """Bytes of rows that the exchange of a layer moves in memory, outside matmuls and transfers."""
        work, moe = self.work, block.mlp.mixture
        if moe is None or not work.exchanges_rows(moe):
            return 0.0
        rows = memory.expert_rows(moe, work.expert_tokens, work.expert_shards)
        return EXCHANGE_PASSES[self.kind] * rows * work.run.model.embed_dim * work.width

    def _products(self, weight: DeviceWeight) -> None:
        times = self._times(weight) * weight.layers * weight.matmuls
        rows = self.work.tokens * weight.share
        compute, memory = self.rates.product(rows, *weight.sides, block=weight.name.startswith("segments/"))
        self.compute += times * compute
        self.memory += times * memory

    def _times(self, weight: DeviceWeight) -> float:
        """Number of matmuls with a weight in this pass."""
        head = weight.name in ("head/weight", "embedding/table")
        if self.kind != "again":
            return 1.0 if self.kind == "forward" else 2.0
        if head:
            return 1.0  # recomputes the logits
        remat = self.work.run.model.remat
        if (share := offloaded_share(remat)) is not None and not weight.expert:
            return 0.0 if weight.name.endswith(("mlp/down", "attention/o")) else 1.0 - share
        if (remat == "none" and not weight.exchanged) or (remat == "elementwise" and not weight.expert):
            return 0.0
        # The last matmul's output is not needed.
        return 0.0 if weight.name.endswith(("mlp/down", "experts/down")) else 1.0

    def _elementwise(self) -> float:
        return {"forward": 1.0, "backward": 2.0, "again": float(self.work.run.model.remat != "none")}[self.kind]


def _exposed(
    work: DeviceWork, cluster: Cluster, calibration: Calibration, compute: float, attention: float
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Seconds of collectives by mesh axes: (exposed near, exposed far, overlapped)."""
    near: dict[str, float] = {}
    far: dict[str, float] = {}
    hidden: dict[str, float] = {}
    found = sent_seconds(collectives(work.run, work.mesh), work, cluster, calibration)
    classes: dict[str, float] = {}
    for (key, _), seconds in found.items():
        room = key.split("/")[0]
        classes[room] = classes.get(room, 0.0) + seconds
    rooms = {"weights": calibration.weight_overlap * compute, "ring": calibration.ring_overlap * attention, "none": 0.0}
    rooms["steps"] = compute
    for (key, slow), seconds in found.items():
        room, axes = key.split("/")
        share = max(0.0, 1 - rooms[room] / classes[room]) if classes[room] else 1.0
        into = far if slow else near
        into[axes] = into.get(axes, 0.0) + seconds * share
        hidden[axes] = hidden.get(axes, 0.0) + seconds * (1 - share)
    return near, far, hidden


def sent_seconds(
    sent: Iterable[ExpectedCollective], work: DeviceWork, cluster: Cluster, calibration: Calibration
) -> dict[tuple[str, bool], float]:
    """Seconds of collectives, by what they overlap with, mesh axes ("weights/fsdp"), and whether they are far.

    Collectives of weights overlap with all compute, keys and values of a ring ("ring") with attention, others ("none")
    with nothing. GPU compilers move nothing across the loop over the rounds of an exchange of experts' rows: weights
    overlap with nothing where there is one.
    """
    network = _network(cluster, work.mesh)
    beside = "none" if cluster.topology.platform == "gpu" and work.exchanging else "weights"
    found: dict[tuple[str, bool], float] = {}
    for one in sent:
        time = network.time(_carried_out(one, network), one.axes, one.bytes)
        slow, axes = time.far > time.near, "+".join(one.axes)
        share = work.rings.steps if one.why in RING else work.rings.rounds if one.why in RING_ENDS else 1.0
        seconds = time.seconds * one.count * share / calibration.link
        # Compilers leave the sums of a layer's gradients at the end of the loop's body, where nothing is beside them.
        room = beside if one.why == "weights" else "ring" if one.why in RING else "none"
        room = "steps" if one.why == BESIDE else room
        found[f"{room}/{axes}", slow] = found.get((f"{room}/{axes}", slow), 0.0) + seconds
    return found


@functools.lru_cache(maxsize=256)
def _network(cluster: Cluster, mesh: MeshSpec) -> Network:
    return Network(cluster, mesh)


def _handled(work: DeviceWork) -> float:
    """HBM bytes of weights and gradients in a step, outside matmuls and the update.

    A stored weight is cast (read, written in compute dtype), and its gradient buffer is zeroed and written, for each
    micro-batch. With ZeRO-1 and -2, weights that stay gathered are sliced per layer, and their gradients written back,
    in compute dtype: zeroed, written, and read and written twice.
    """
    wide, micro = jnp.dtype(work.run.model.param_dtype).itemsize, work.micro_batches
    stored = sum(w.stored * w.layers for w in work.weights)
    cast, summed = wide + work.width, 2 * wide
    if work.run.parallel.zero == 3 or work.stages > 1:
        return micro * stored * (cast + summed)
    if work.run.parallel.zero == "3level":
        kept = sum(w.in_step * w.layers for w in work.weights) * work.width
        return stored * cast + kept * (1 + micro) + micro * sum(w.summed * w.layers for w in work.weights) * 2 * wide
    used = sum(w.used * w.layers for w in work.weights if w.matrix)
    return stored * (cast + micro * summed) + micro * used * 6 * work.width


def _host(work: DeviceWork, hardware: Hardware, calibration: Calibration, compute: float, state: float) -> float:
    """Exposed seconds of host transfers: activations go out during the forward pass and come back during the backward
    pass.

    Optimizer state (``state`` bytes) travels when nothing else runs.
    """
    parallel = work.run.parallel
    share = parallel.offload
    if parallel.offload_chunks == "longest":  # operations of other chunks copy as many layers, which nobody needs
        share = min(1.0, share * (parallel.chunks or default_chunks(parallel.schedule)))
    sent = share * memory.kept_bytes(work) * work.micro_batches / hardware.host
    beside = 2 * max(
        0.0, sent - calibration.weight_overlap * compute / 3
    )  # a third of the arithmetic is the forward pass
    beside += max(0.0, offload_time.copy_seconds(work, hardware) - calibration.weight_overlap * compute)
    return beside + offload_time.state_transfer_seconds(work, hardware, state)


def _carried_out(one: ExpectedCollective, network: Network) -> str:
    """Executed kind of a collective: TPU compilers turn a reduce-scatter over two dimensions into an all-reduce."""
    if one.kind == "reduce-scatter" and network.torus and network.spread(one.axes) > 1:
        return "all-reduce"
    return one.kind


def collectives(run: RunConfig, mesh: MeshSpec) -> tuple[ExpectedCollective, ...]:
    """Collectives of a step on a device; an estimate for layouts that the formulas were not proven for."""
    one, rest = without_stages(run, mesh)
    parallel, micro = one.parallel, run.accumulate
    plain, model = _without_pipeline(parallel), with_remat(one.model, full_or_none(run.model.remat))
    apart = exchanged_axis(run)
    if apart:
        plain = replace(plain, reduce="flat")  # what is left of the sums
    sent = [
        in_micro_batches(found, micro, parallel.zero)
        for found in _of_one(model, plain, rest, run.data.batch_size, run.data.seq_len)
    ]
    if apart:
        over = [replace(found, axes=tuple(axis for axis in found.axes if axis != apart)) for found in sent]
        sent = [*(found for found in over if found.axes), exchange(run, mesh)]
    if dict(mesh.axes).get("stage", 1) > 1:
        times = 2 * micro * (parallel.chunks or default_chunks(parallel.schedule))
        sent.append(
            ExpectedCollective(
                "collective-permute", ("stage",), times, DeviceWork.of(run, mesh).stream_bytes(), "between stages"
            )
        )
    return tuple(sent)


def exchanged_axis(run: RunConfig) -> str:
    """Mesh axis over which messages are exchanged in place of sums of gradients; "" where there is none."""
    return REPLICA if run.outer.kind != "none" else AXIS if run.grads.compress else ""


def exchange(run: RunConfig, mesh: MeshSpec) -> ExpectedCollective:
    """Messages of outer steps or of compressed gradients, as an all-reduce in which a device sends as many bytes.

    Args:
        run: with outer steps, of which a step has a part, or with compressed gradients.
        mesh: of the run.
    """
    model, abstract = cached_model(architecture(run.model), rules_of(run.parallel)), mesh.abstract()
    params = abstract_params(model.abstract(), model.logical_axes(), abstract, model.rules)
    axis = exchanged_axis(run)
    devices = abstract.shape[axis]
    if run.grads.compress:
        sent, why = compressed_bytes(run.grads.exchange, params, devices), "compressed gradients"
    else:
        sent = sent_bytes(run.outer, params, devices) / run.outer.every
        why = BESIDE if run.outer.kind == "co2" else "outer step"
    return ExpectedCollective("all-reduce", (axis,), 1, round(sent * devices / (2 * (devices - 1))), why)


@functools.lru_cache(maxsize=1024)
def _without_pipeline(parallel: ParallelConfig) -> ParallelConfig:
    return replace(parallel, chunks=0, depths=(), offload=0.0, offload_chunks="all", schedule="1f1b")


@functools.lru_cache(maxsize=4096)
def _of_one(
    model: DecoderConfig, parallel: ParallelConfig, mesh: MeshSpec, rows: int, seq_len: int
) -> tuple[ExpectedCollective, ...]:
    """Collectives of the whole batch as one micro-batch."""
    functional = cached_model(model, rules_of(parallel))
    return expected_collectives(functional, mesh.abstract(), parallel, rows=rows, seq_len=seq_len, proven=False)


def in_micro_batches(one: ExpectedCollective, micro: int, zero: int | str) -> ExpectedCollective:
    """Collectives split into micro-batches.

    Activations are sent in as many parts; weights again for each micro-batch with ZeRO-3, gradients except with ZeRO-1.
    """
    if one.why not in WEIGHTS:
        return replace(one, count=one.count * micro, bytes=one.bytes // micro)
    again = zero == 3 or (zero == 2 and one.why != "weights") or (zero == "3level" and one.why not in ONCE)
    return replace(one, count=one.count * micro) if again else one


def _bubble(work: DeviceWork, busy: float, forward: float) -> float:
    """Pipeline bubble: seconds that the busiest stage waits, with passes as long as predicted.

    Args:
        work: of the stage.
        busy: seconds that it is busy in a step.
        forward: FLOP-bound seconds of a micro-batch's forward pass.
    """
    if work.stages == 1:
        return 0.0
    plan, micro = work.run.parallel, work.micro_batches
    chunks = plan.chunks or default_chunks(plan.schedule)
    whole = plan.schedule == "gis" and micro % work.stages == 0
    if whole or plan.schedule in ("gpipe", "1f1b", "interleaved"):  # independent of the passes' lengths (pipeline.md)
        idle = (work.stages - 1) / (chunks * micro + work.stages - 1)
    else:
        rest = (busy / micro - forward) / 2
        if plan.schedule == "zb_h1" and micro >= work.stages:
            return (work.stages - 1) * max(forward, rest)
        idle = _idle(plan.schedule, work.stages, micro, plan.chunks, round(rest / forward, 1))
    return busy * idle / (1 - idle)


@functools.lru_cache(maxsize=4096)
def _idle(name: str, stages: int, micro: int, chunks: int, rest: float) -> float:
    return make(name, stages, micro, chunks).bubble(OpCosts(1.0, rest, rest))


def _up(number: float, to: int) -> float:
    return -(-number // to) * to


def is_mixture(run: RunConfig) -> bool:
    """True if some layers are mixtures of experts."""
    return bool(run.model.mixtures)
