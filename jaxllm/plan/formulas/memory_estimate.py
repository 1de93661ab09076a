"""HBM estimate of a device by formula, split by use.

Parameters, optimizer state, gradients and saved activations are counted element by element. The peak working memory of
a layer's backward pass is counted in copies of its arrays (``BufferCopies``).
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from jaxllm.models import BlockConfig, MoeConfig
from jaxllm.models.moe.expert_dispatch import room_of_expert
from jaxllm.models.moe.expert_exchange import receive_rows
from jaxllm.models.remat import offloaded_share
from jaxllm.parallel.pipeline.offload_bands import offload_bands
from jaxllm.parallel.pipeline.schedule_generators import default_chunks, make
from jaxllm.parallel.pipeline.schedule_table import tabulate
from jaxllm.plan.formulas import offload_time
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.formulas.engine_memory import engine_bytes
from jaxllm.plan.formulas.layer_parts import layered_work
from jaxllm.plan.formulas.optimizer_memory import average_bytes, check_optimizer, state_bytes
from jaxllm.train import RunConfig
from jaxllm.train.unequal.unequal_gradients import uneven_axes
from sharding import MeshSpec
from sharding.topology import Topology


@dataclass(frozen=True)
class BufferCopies:
    """Copies of each array that a compiled program holds at its memory peak, in the backward pass of a layer.

    These are the only fitted values of the estimate, fitted to the 24 programs of the proofs ``pods`` and a few more,
    those of experts also to mixtures with layouts by layer (docs/train/plan.md). They reflect XLA's schedules, which
    differ between platforms: no formula gives them.

    Attributes:
        heads: gathered output heads (or embeddings) and their gradients; without tensor parallelism.
        heads_split: likewise with tensor parallelism.
        weights: one layer's gathered weights and their gradients (ZeRO-3, pipelines).
        expert_weights: likewise, of its experts.
        expert_stacks: stored weights of the experts of all layers, which compilers cast or transpose before the loop
            over layers, and of their gradients; GPU compilers where weights are all-gathered (ZeRO-3, pipelines).
        inner: a layer's inner activations: heads and MLP width.
        streams: residual streams over the whole sequence; without tensor parallelism.
        streams_split: likewise with tensor parallelism, where shards of the sequence are all-gathered.
        scores: a block of float32 scores, where attention is plain JAX (``DeviceWork.score_block``).
        expert_inner: inner activations of all rows of a device's receive buffer.
        expert_rows: those rows.
        exchange_inner: further inner activations where experts are split over devices.
        exchange_rows: likewise, rows.
        beside: pipeline slots beside the pool: the one that the forward pass fills, the one that the backward pass
            reads.
        inputs: whether layers' inputs are among these.
        sums: gradients, where they are also reduced over ``data``.
        turns: micro-batches whose activations are live at once: the GPU compiler unrolls loops with collectives by two.
    """

    heads: float
    heads_split: float
    weights: float
    expert_weights: float
    expert_stacks: float
    inner: float
    streams: float
    streams_split: float
    scores: float
    expert_inner: float
    expert_rows: float
    exchange_inner: float
    exchange_rows: float
    beside: float
    inputs: bool
    sums: float
    turns: int


COPIES = {
    "tpu": BufferCopies(0.0, 0.0, 3.0, 5.5, 1.9, 2.0, 2.0, 13.5, 0.0, 3.8, 0.8, 3.8, 0.8, 2.0, False, 2.0, 1),
    "tpu7x": BufferCopies(1.0, 3.0, 3.0, 5.5, 1.9, 3.5, 4.0, 10.0, 0.0, 3.8, 0.8, 3.8, 0.8, 2.0, False, 2.0, 1),
    "gpu": BufferCopies(2.4, 3.0, 0.8, 2.5, 1.3, 2.0, 0.0, 0.0, 10.0, 0.0, 5.7, 2.5, 0.3, 2.0, True, 1.0, 2),
}
"""Buffer copies by platform; those of a TPU7x differ, where the bounds of fusions are left out
(``jaxllm.models.tpu_layout``)."""


def copies_on(topology: Topology) -> BufferCopies:
    """Buffer copies of the programs for a topology."""
    return COPIES.get(topology.generation, COPIES[topology.platform])


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one device, by use.

    Attributes:
        parameters: parameters as stored.
        optimizer: optimizer state, and the average of the parameters where the run has one; with uneven shares of the
            state, of the device that holds most.
        batch: token ids and the arrays that go with them.
        gradients: gradients as stored, or accumulated over micro-batches.
        weights: gathered weights, and stacks of experts' weights (``BufferCopies.expert_stacks``).
        activations: activations saved for the backward pass.
        working: peak working memory of a layer, or of the loss.
        host: bytes offloaded to host memory: activations, optimizer state, parameters; not part of the device's total.
        engine: arrays of the engine that the run has beside its step (``engine_memory``).
        disk: bytes in files; not part of the device's total.
    """

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    weights: int
    activations: int
    working: int
    host: int = 0
    engine: int = 0
    disk: int = 0

    @property
    def arguments(self) -> int:
        """Bytes of the step's arguments: parameters, optimizer state and batch."""
        return self.parameters + self.optimizer + self.batch

    @property
    def total(self) -> int:
        """Total bytes on the device."""
        return self.arguments + self.gradients + self.weights + self.activations + self.working + self.engine

    def parts(self) -> dict[str, int]:
        """Bytes by use, for tables."""
        names = ("parameters", "optimizer", "batch", "gradients", "weights", "activations", "working")
        found = {name: getattr(self, name) for name in names}
        return found | ({"engine": self.engine} if self.engine else {})


def predict(run: RunConfig, mesh: MeshSpec, topology: Topology) -> MemoryEstimate:
    """Memory estimate of a run whose mesh is legal, on TPUs or GPUs."""
    return predict_work(layered_work(run, mesh), topology)


def predict_work(work: DeviceWork, topology: Topology) -> MemoryEstimate:
    """Memory estimate of a device's work, see ``predict``."""
    run, mesh = work.run, work.mesh
    check_optimizer(run)
    wide = jnp.dtype(run.model.param_dtype).itemsize
    laid = tiled if topology.platform == "tpu" else math.prod
    parameters = round(sum(laid(w.shape) * (w.bytes or wide) for w in work.weights))
    copies = copies_on(topology)
    kept, host = _activations(work, copies)
    state = round(
        state_bytes(work, sum(laid(w.shape) for w in work.trained) * wide, laid) * largest_state_share(run, mesh)
    )
    of_layers = offload_time.layer_share(work)
    moved = offload_time.streamed_share(work)
    away = [round(size * of_layers * share) for size, share in ((parameters, run.host.params), (state, moved))]
    rows = min(1.0, offload_time.ROWS / run.model.layers)  # fraction of the offloaded state on the device at a time
    sums = copies.sums if dict(mesh.axes).get("data", 1) > 1 else 1.0
    at_once = live_micro_batches(work, topology)
    beside = run.engine_beside
    engine = 0 if beside is None else engine_bytes(run.model, beside, mesh, topology.platform).total
    return MemoryEstimate(
        parameters - away[0],
        state - away[1] + average_bytes(run, parameters),
        4 * 4 * work.tokens * work.micro_batches,
        round(sums * _gradients(work)) + _ends(work),
        _gathered(work) + round(sum(stack_bytes(part, topology) for part in work.alike)),
        kept * at_once,
        round(_working(work, topology) + rows * sum(away)),
        host + sum(away),
        engine,
    )


def largest_state_share(run: RunConfig, mesh: MeshSpec) -> float:
    """Optimizer state of the device that holds most of it (``parallel.state_shares``), over that of an even shard."""
    shares, sizes = run.parallel.state_shares, dict(mesh.axes)
    over = uneven_axes(shares, run.parallel.zero, sizes)
    if not over:
        return 1.0
    split = math.prod(sizes[axis] for axis in over if axis != "data")  # ZeRO-1 shards it over fsdp anyway
    return split * max(shares) / sum(shares)


def live_micro_batches(work: DeviceWork, topology: Topology) -> int:
    """Micro-batches whose saved activations are on the device at once, outside pipelines."""
    devices = math.prod(dict(work.mesh.axes).values())
    several = work.stages == 1 and work.micro_batches > 1 and devices > 1
    return copies_on(topology).turns if several else 1


@functools.lru_cache(maxsize=4096)
def tiled(shape: tuple[int, ...]) -> int:
    """Elements that an array takes in TPU memory: padded to 8 x 128 tiles over the two dimensions that waste least."""
    if len(shape) < 2:
        return math.prod(shape)
    whole = math.prod(shape)
    waste = (
        _up(shape[lane], 128) / shape[lane] * _up(shape[row], min(8, _power_of_two(shape[row]))) / shape[row]
        for lane, row in itertools.permutations(range(len(shape)), 2)
    )
    return round(whole * min(waste))


def _up(number: int, to: int) -> int:
    return -(-number // to) * to


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def saved_bytes(work: DeviceWork, block: BlockConfig) -> int:
    """Bytes that one micro-batch's forward pass of a block saves for its backward pass, beside the block's input."""
    remat = work.run.model.remat
    if remat == "full" or offloaded_share(remat) is not None:
        return 0
    inner = work.inner_widths(block)
    names = ("q", "k", "v", "out", "up", "gate")
    stored = sum(inner[name] for name in names) * work.tokens * work.width + work.stream_bytes()
    stored += 4 * work.tokens * block.attention.heads / work.tensor  # logsumexp
    if remat == "none":
        # Two normed streams, each with two float32 intermediates; the gate activation, its derivative, their products.
        more = 4 * inner["up"] + inner["q"] + inner["k"]
        stored += 10 * work.stream_bytes() + more * work.tokens * work.width
        if block.mlp.mixture is not None:
            # Exchanged rows keep what went in alone.
            copies = (
                inner["sent"] if work.exchanges_rows(block.mlp.mixture) else 3 * inner["expert"] + 2 * inner["sent"]
            )
            stored += copies * work.tokens * work.width
    return round(stored)


def kept_bytes(work: DeviceWork) -> float:
    """Bytes that one micro-batch's forward pass of a device's layers saves for the backward pass."""
    return sum(_kept_alike(part) for part in work.alike)


def _kept_alike(work: DeviceWork) -> float:
    """``kept_bytes`` of layers of one layout and remat policy."""
    own = 0 if offloaded_share(work.run.model.remat) is not None else work.stream_bytes()
    of_group = lambda group: own + sum(saved_bytes(work, block) for block in group)  # noqa: E731
    return sum(repeats * of_group(group) for group, repeats in work.groups)


def _activations(work: DeviceWork, copies: BufferCopies) -> tuple[int, int]:
    """Saved activations: (bytes on the device, bytes offloaded to host memory)."""
    of_layers = kept_bytes(work)
    sent, largest = offload_time.offloaded_bytes(work)
    if work.stages == 1 and sent:  # double buffering: one layer's values arrive while the previous ones are used
        return round(2 * largest + 2 * work.stream_bytes()), round(sent)
    if work.stages == 1:
        return round(of_layers + 2 * work.stream_bytes()), 0  # and the last layer's output, normed and not
    plan = work.run.parallel
    chunks = plan.chunks or default_chunks(plan.schedule)
    slots = pipeline_slots(plan.schedule, work.stages, work.micro_batches, plan.chunks)
    away, a_slot = plan.offload, of_layers / chunks
    held = slots.saves * (1 - away) + (3 * away if away else 0)
    hosted = (slots.hosted + 1) * away if away else 0.0
    pending = slots.pendings * a_slot * (1 - away)
    groups = sum(repeats for _, repeats in work.run.model.segments) / work.stages
    if plan.offload_chunks == "longest":
        held, hosted = _band_slots(
            plan.schedule, work.stages, work.micro_batches, plan.chunks, max(1, round(groups / chunks)), away
        )
    inputs = 0.0 if copies.inputs else work.stream_bytes() * groups / chunks
    beside = copies.beside * (a_slot - inputs) * (1 - away)
    return round(held * a_slot + pending + beside), round(hosted * a_slot)


@functools.lru_cache(maxsize=1024)
def _band_slots(name: str, stages: int, micro: int, chunks: int, layers: int, share: float) -> tuple[float, float]:
    """Slots of all of a chunk's layers on the device and on the host, where the longest-lived chunks are offloaded."""
    schedule, held, hosted = make(name, stages, micro, chunks), 0.0, 0.0
    for band in offload_bands(schedule, (layers,), share, "longest")[0]:
        part, table = (band.end - band.first) / layers, tabulate(schedule, band.away)
        held += part * ((table.saves if len(band.away) < schedule.chunks else 0) + (3 if band.away else 0))
        hosted += part * (table.hosted + 1) if band.away else 0.0
    return held, hosted


class PipelineSlots(NamedTuple):
    """Slots of a pipeline's activation pools, see ``jaxllm.parallel.pipeline.schedule_table``."""

    saves: float
    pendings: int
    hosted: int


@functools.lru_cache(maxsize=1024)
def pipeline_slots(name: str, stages: int, micro: int, chunks: int) -> PipelineSlots:
    """Pool slots of a schedule; by formula where there is one (docs/train/pipeline.md), because tables are large."""
    if name == "gpipe":
        return PipelineSlots(micro, 0, micro)
    held = min(stages, micro)
    if name in ("1f1b", "zb_h1"):
        return PipelineSlots(held, held if name == "zb_h1" else 0, held)
    if name == "interleaved":
        chunks = chunks or default_chunks(name)
        most, warm = micro * chunks, 2 * (stages - 1) + (chunks - 1) * stages
        return PipelineSlots(min(most, warm + 1), 0, min(most, warm))
    if name == "gis" and micro % stages == 0:
        most = stages * (chunks or default_chunks(name))
        return PipelineSlots(most, 0, most)
    made = tabulate(make(name, stages, micro, chunks))
    return PipelineSlots(made.saves, made.pendings, made.hosted)


def _gradients(work: DeviceWork) -> int:
    """Bytes of gradients: as parameters are stored; for ZeRO-1 with several micro-batches, as they are used.

    Beside these sums, one micro-batch's own gradients: for ZeRO-3 of the same size, otherwise of whole weights.
    """
    wide = jnp.dtype(work.run.model.param_dtype).itemsize
    if work.run.optim.spec.layerwise:  # one layer's gradients at a time, and those outside layers
        layers = [w for w in work.trained if w.name.startswith("segments/")]
        return sum(w.stored * (1 if w in layers else w.layers) for w in work.trained) * wide
    zero, several = work.run.parallel.zero, work.stages == 1 and work.micro_batches > 1
    if zero == "3level":  # those that are added up, and one micro-batch's own
        return sum(w.layers * (w.summed * wide * (2 if several else 1)) for w in work.trained)
    late = zero == 1 and several
    sums = sum(w.layers * (w.used if late else w.stored) for w in work.trained) * wide
    if zero == 3 or work.stages > 1:
        return sums * (2 if several and zero == 3 else 1)
    return sums + sum(w.layers * w.used for w in work.trained if w.matrix) * work.width


def _gathered(work: DeviceWork) -> int:
    """Bytes of weights that stay gathered for longer than a layer: all matrices, except with ZeRO-3.

    With 3-level ZeRO they are gathered over the outer axes alone.
    """
    if work.run.parallel.zero == 3:
        return 0
    if work.run.parallel.zero == "3level":
        return sum(w.layers * w.in_step for w in work.weights if w.matrix) * work.width
    return sum(w.layers * w.used for w in work.weights if w.matrix) * work.width


def _gathers_layers(work: DeviceWork) -> bool:
    """Whether weights are all-gathered layer by layer."""
    return work.run.parallel.zero in (3, "3level") or work.stages > 1


def stack_bytes(work: DeviceWork, topology: Topology) -> float:
    """Bytes of stacks of experts' weights that compilers cast or transpose before the loop over layers."""
    if not _gathers_layers(work):
        return 0.0
    own = [w for w in work.weights if w.expert and not w.bytes and w.name.startswith("segments/")]
    if topology.platform == "gpu":  # the dimension that is all-gathered comes first, before that of several experts
        own = [w for w in own if w.used > w.stored and w.matmuls > 1]
    laid = tiled if topology.platform == "tpu" else math.prod
    elements = sum(laid(w.shape) * w.layers / w.shape[0] for w in own)
    return copies_on(topology).expert_stacks * elements * jnp.dtype(work.run.model.param_dtype).itemsize


def _working(work: DeviceWork, topology: Topology) -> float:
    """Peak working memory of a layer's backward pass, beside the saved activations."""
    config, copies = work.run.model, copies_on(topology)
    vocabulary = config.vocab_size // work.tensor * config.embed_dim * work.width
    heads = copies.heads_split if work.tensor > 1 else copies.heads
    if work.stages == 1 and work.run.parallel.zero in (1, 2):
        heads = max(0.0, heads - 2)  # the matrix and its gradient are counted with the others
    return heads * vocabulary + max(layer_working(own, topology) for own in work.layouts)


def layer_working(work: DeviceWork, topology: Topology) -> float:
    """Peak working memory of the backward pass of a layer, of layers of one layout: that of the segment with most."""
    segments = [segment for segment, (_, repeats) in enumerate(work.groups) if repeats]
    return max(_segment_working(work, segment, topology) for segment in segments)


def _segment_working(work: DeviceWork, segment: int, topology: Topology) -> float:
    """``layer_working`` of the layers of one segment."""
    config, copies, (blocks, _) = work.run.model, copies_on(topology), work.groups[segment]
    own = [w for w in work.weights if w.matrix and w.name.startswith(f"segments/{segment}/")]
    weights = copies.weights * sum(w.used for w in own if not w.expert)
    weights += copies.expert_weights * sum(w.used for w in own if w.expert)
    of_experts = ("expert", "sent")
    inner = max(sum(n for name, n in work.inner_widths(b).items() if name not in of_experts) for b in blocks)
    plain = [b for b in blocks if not work.has_flash_kernel(b, topology.platform)]
    streams = copies.streams_split if work.tensor > 1 else copies.streams
    return (
        weights * work.width * _gathers_layers(work)
        + copies.inner * inner * work.tokens * work.width
        + streams * work.tokens * config.embed_dim // work.features * work.width
        + copies.scores * max((work.score_block(b) for b in plain), default=0.0) * 4
        + max(_experts(work, b, copies) for b in blocks)
    )


def _experts(work: DeviceWork, block: BlockConfig, copies: BufferCopies) -> float:
    """Working memory of experts: inner activations and rows of their buffer."""
    moe = block.mlp.mixture
    if moe is None:
        return 0.0
    is_exchanged = work.exchanges_rows(moe)
    inner = copies.expert_inner + copies.exchange_inner * is_exchanged
    rows = copies.expert_rows + copies.exchange_rows * is_exchanged
    widths = inner * moe.hidden / work.expert_tensor + rows * work.run.model.embed_dim
    return expert_rows(moe, work.expert_tokens, work.expert_shards) * widths * work.width


def expert_rows(moe: MoeConfig, tokens: int, shards: int) -> int:
    """Rows of a device's expert buffer, for the tokens of one of so many expert shards (``expert_dispatch``).

    With a capacity, each expert has a buffer of fixed size.
    """
    if moe.capacity is None:
        return receive_rows(tokens * moe.top_k, shards)
    return moe.experts * room_of_expert(moe.capacity, tokens, moe.top_k, moe.experts)


def _ends(work: DeviceWork) -> int:
    """Accumulated gradients that pipeline stages hold whole during a step: those of the embedding and the head."""
    if work.stages == 1:
        return 0
    wide = jnp.dtype(work.run.model.param_dtype).itemsize
    return sum(w.used for w in work.trained if w.matrix and not w.name.startswith("segments/")) * wide
