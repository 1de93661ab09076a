"""Memory of a device by formula, by what uses it.

State, gradients and the activations that wait for the backward pass are counted, number by number. What a layer's
backward pass needs besides at the fullest moment is counted in copies of its arrays (``Copies``).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from jaxllm.models import BlockConfig, MoeConfig
from jaxllm.models.remat import offloaded_share
from jaxllm.parallel.pipeline.schedule_generators import default_chunks, make
from jaxllm.parallel.pipeline.schedule_table import tabulate
from jaxllm.plan.formulas import offload_time
from jaxllm.plan.formulas.device_work import Work, gated
from jaxllm.plan.formulas.optimizer_memory import check, state_bytes
from jaxllm.train import RunConfig
from sharding import MeshSpec

BLOCK = 1024
"""Queries, and keys, of a block of attention on a GPU."""


@dataclass(frozen=True)
class Copies:
    """How many of each array a compiled program has at its fullest moment, in the backward pass of a layer.

    The only numbers here that are fitted, to the 24 programs of the proofs ``pods`` and a few more (docs/train/plan.md). They
    are of XLA's schedules, which differ between platforms: no formula gives them.

    Attributes:
        heads: of the vocabulary's matrix, gathered, and its gradient; where it is not split over tensor.
        heads_split: likewise where it is.
        weights: of one layer's weights, gathered, and their gradients (ZeRO-3, pipelines).
        inner: of a layer's inner values: heads and feed-forward width.
        streams: of the residual stream, its sequence whole.
        scores: of a block of attention's scores in float32, all heads of it.
        expert_inner: of the inner values of all rows that a mixture's device may get.
        expert_rows: of those rows.
        beside: of a pipeline's slot, beside its pool, what the forward pass fills and what the backward pass reads.
        inputs: whether layers' inputs are among these.
        sums: of gradients, where they are summed over ``data`` as well.
        turns: micro-batches of which activations are held at once: the GPU compiler takes a loop's turns in pairs.
    """

    heads: float
    heads_split: float
    weights: float
    inner: float
    streams: float
    scores: float
    expert_inner: float
    expert_rows: float
    beside: float
    inputs: bool
    sums: float
    turns: int


COPIES = {
    "tpu": Copies(1.0, 5.0, 3.0, 3.0, 4.0, 0.0, 4.4, 7.4, 2.0, False, 2.0, 1),
    "gpu": Copies(3.0, 3.0, 2.0, 1.3, 0.0, 10.0, 5.0, 9.0, 2.0, True, 1.0, 2),
}


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, by what uses them.

    Attributes:
        parameters: as they are stored.
        optimizer: its state.
        batch: token ids and what belongs to them.
        gradients: as they are stored, or summed over micro-batches.
        weights: gathered ones.
        activations: what waits for the backward pass.
        working: what a layer, or the loss, needs for itself at the fullest moment.
        host: what waits in the host's memory: activations, optimizer state, parameters; not of the device.
    """

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    weights: int
    activations: int
    working: int
    host: int = 0

    @property
    def arguments(self) -> int:
        """What the step takes: state and batch."""
        return self.parameters + self.optimizer + self.batch

    @property
    def total(self) -> int:
        """Of the device."""
        return self.arguments + self.gradients + self.weights + self.activations + self.working

    def parts(self) -> dict[str, int]:
        """By name, for tables."""
        names = ("parameters", "optimizer", "batch", "gradients", "weights", "activations", "working")
        return {name: getattr(self, name) for name in names}


def predict(run: RunConfig, mesh: MeshSpec, platform: str) -> Memory:
    """Of a run whose mesh is legal, on ``"tpu"`` or ``"gpu"``."""
    check(run)
    work = Work.of(run, mesh)
    wide = jnp.dtype(run.model.param_dtype).itemsize
    laid = tiled if platform == "tpu" else math.prod
    parameters = sum(laid(w.shape) for w in work.weights) * wide
    copies = COPIES[platform]
    kept, host = _activations(work, copies)
    state = state_bytes(work, parameters, laid)
    of_layers = offload_time.of_layers(work)
    away = [round(size * of_layers * on) for size, on in ((parameters, run.host.params), (state, run.host.optimizer))]
    rows = min(1.0, offload_time.ROWS / run.model.layers)  # of what is away, so much is here at a time
    sums = copies.sums if dict(mesh.axes).get("data", 1) > 1 else 1.0
    at_once = copies.turns if work.stages == 1 and work.micro_batches > 1 else 1
    return Memory(
        parameters - away[0],
        state - away[1],
        4 * 4 * work.tokens * work.micro_batches,
        round(sums * _gradients(work)) + _ends(work),
        _gathered(work),
        kept * at_once,
        round(_working(work, copies) + rows * sum(away)),
        host + sum(away),
    )


def tiled(shape: Sequence[int]) -> int:
    """Numbers that an array takes in a TPU's memory: in tiles of 8 x 128 over those two dimensions that waste least."""
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


def saved_bytes(work: Work, block: BlockConfig) -> int:
    """What one micro-batch's forward pass of a block leaves for its backward pass, beside its input."""
    remat = work.run.model.remat
    if remat == "full" or offloaded_share(remat) is not None:
        return 0
    inner = work.inner_widths(block)
    names = ["q", "k", "v", "out", "up", *(["gate"] if gated(block) else [])]
    stored = sum(inner[name] for name in names) * work.tokens * work.width + work.stream_bytes()
    stored += 4 * work.tokens * block.attention.heads / work.tensor  # the softmax's sums
    if remat == "none":
        # Two streams normed, each with two in float32 on the way; the gate's function, its slope and their products.
        more = 4 * inner["up"] + inner["q"] + inner["k"]
        stored += 10 * work.stream_bytes() + more * work.tokens * work.width
        if isinstance(block.mlp, MoeConfig):
            stored += (3 * inner["expert"] + 2 * inner["sent"]) * work.tokens * work.width
    return round(stored)


def kept_bytes(work: Work) -> float:
    """What one micro-batch's forward pass of a device's layers leaves for the backward pass."""
    groups = work.run.model.segments
    own = 0 if offloaded_share(work.run.model.remat) is not None else work.stream_bytes()
    of_group = lambda group: own + sum(saved_bytes(work, block) for block in group)  # noqa: E731
    return sum(repeats / work.stages * of_group(group) for group, repeats in groups)


def _activations(work: Work, copies: Copies) -> tuple[int, int]:
    """(bytes on the device, in the host's memory) of what waits for the backward pass."""
    of_layers = kept_bytes(work)
    sent, largest = offload_time.sent_bytes(work)
    if work.stages == 1 and sent:  # a layer's values come while those of the layer before are used
        return round(2 * largest + 2 * work.stream_bytes()), round(sent)
    if work.stages == 1:
        return round(of_layers + 2 * work.stream_bytes()), 0  # and the last layer's result, normed and not
    plan = work.run.parallel
    chunks = plan.chunks or default_chunks(plan.schedule)
    slots = pools(plan.schedule, work.stages, work.micro_batches, plan.chunks, plan.offload > 0)
    away, a_slot = plan.offload, of_layers / chunks
    held = slots.saves * (1 - away) + (3 * away if away else 0)
    pending = slots.pendings * a_slot * (1 - away)
    groups = sum(repeats for _, repeats in work.run.model.segments) / work.stages
    inputs = 0.0 if copies.inputs else work.stream_bytes() * groups / chunks
    beside = copies.beside * (a_slot - inputs) * (1 - away)
    return round(held * a_slot + pending + beside), round((slots.hosted + 1) * away * a_slot) if away else 0


class Pools(NamedTuple):
    """Slots of a pipeline's pools, see ``jaxllm.parallel.pipeline.schedule_table``."""

    saves: float
    pendings: int
    hosted: int


@functools.lru_cache(maxsize=1024)
def pools(name: str, stages: int, micro: int, chunks: int, offloaded: bool) -> Pools:
    """Of a schedule; by formula where there is one (docs/train/pipeline.md), for tables are large."""
    if not offloaded and name in ("gpipe", "1f1b"):
        return Pools(micro if name == "gpipe" else min(stages, micro), 0, 0)
    made = tabulate(make(name, stages, micro, chunks))
    return Pools(made.saves, made.pendings, made.hosted)


def _gradients(work: Work) -> int:
    """As parameters are stored; of ZeRO-1 with several micro-batches as they are used.

    Beside these sums, a micro-batch's own: in ZeRO-3 of the same size, else of weights that are whole.
    """
    wide = jnp.dtype(work.run.model.param_dtype).itemsize
    if work.run.optim.kind in ("lomo", "adalomo"):  # a layer's at a time, and the ends'
        layers = [w for w in work.weights if w.name.startswith("segments/")]
        return sum(w.stored * (1 if w in layers else w.layers) for w in work.weights) * wide
    zero, several = work.run.parallel.zero, work.stages == 1 and work.micro_batches > 1
    late = zero == 1 and several
    sums = sum(w.layers * (w.used if late else w.stored) for w in work.weights) * wide
    if zero == 3 or work.stages > 1:
        return sums * (2 if several and zero == 3 else 1)
    return sums + sum(w.layers * w.used for w in work.weights if w.matrix) * work.width


def _gathered(work: Work) -> int:
    """Weights that are whole for longer than a layer's work: all of them but in ZeRO-3."""
    if work.run.parallel.zero == 3:
        return 0
    return sum(w.layers * w.used for w in work.weights if w.matrix) * work.width


def _working(work: Work, copies: Copies) -> float:
    """In the backward pass of a layer, beside what waits for it."""
    config = work.run.model
    of_layers = sum(w.used for w in work.weights if w.matrix and w.name.startswith("segments/"))
    weights = of_layers / len(config.segments) * work.width
    vocabulary = config.vocab_size // work.tensor * config.embed_dim * work.width
    heads = copies.heads_split if work.tensor > 1 else copies.heads
    if work.stages == 1 and work.run.parallel.zero < 3:
        heads = max(0.0, heads - 2)  # the matrix and its gradient are with all others
    elif work.stages == 1 and work.micro_batches > 1:
        heads += 2 * (copies.turns - 1)
    inner = max(sum(work.inner_widths(b).values()) for b in config.blocks)
    query_heads = max(b.attention.heads for b in config.blocks) / work.tensor
    return (
        heads * vocabulary
        + copies.weights * weights * (work.run.parallel.zero == 3 or work.stages > 1)
        + copies.inner * inner * work.tokens * work.width
        + copies.streams * work.tokens * config.embed_dim * work.width
        + copies.scores * query_heads * min(BLOCK, work.row) ** 2 * 4
        + max(_experts(work, b, copies) for b in config.blocks)
    )


def _experts(work: Work, block: BlockConfig, copies: Copies) -> float:
    """Rows that a device may get: as many as if all tokens of its neighbours chose its experts."""
    if not isinstance(block.mlp, MoeConfig):
        return 0.0
    shards = dict(work.mesh.axes).get("expert", 1)
    rows = work.tokens * block.mlp.top_k * shards
    if block.mlp.capacity is not None:
        rows = min(rows, math.ceil(work.tokens * block.mlp.top_k * block.mlp.capacity))
    widths = copies.expert_inner * block.mlp.hidden / work.tensor + copies.expert_rows * work.run.model.embed_dim
    return rows * widths * work.width


def _ends(work: Work) -> int:
    """Sums of gradients that a pipeline's stages hold whole during a step: of the embedding and the head."""
    if work.stages == 1:
        return 0
    wide = jnp.dtype(work.run.model.param_dtype).itemsize
    return sum(w.used for w in work.weights if w.matrix and not w.name.startswith("segments/")) * wide
