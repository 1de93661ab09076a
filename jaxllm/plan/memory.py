"""Memory of a device by formula, by what uses it.

State is exact: the bytes of the sharding table (``jaxllm.parallel.table``), of which a compiled program's arguments are
made. What a step needs besides is that of its fullest moment: in the loss, where the vocabulary's matrix is gathered
and its gradient begun; in the backward pass of a layer, which holds what the layer computes again; or in the backward
pass of the embedding. All of them hold the activations that wait for the backward pass.

Legend: T tokens of a micro-batch on a device, D embed, F mlp, V vocab, L layers, P parameters of a device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from jaxllm.models import BlockConfig, MoeConfig
from jaxllm.parallel.pipeline.schedule import Schedule
from jaxllm.parallel.pipeline.table import tabulate
from jaxllm.plan.work import Work, gated
from jaxllm.train import RunConfig
from jaxllm.train.pipelined import planned
from pallas_kernels.cross_entropy.config import tokens_of_a_chunk, vocab_of_a_band
from sharding import MeshSpec

STEPS = 8
"""Bytes of AdamW's two counters, beside its two moments of each parameter."""


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
        host: activations that wait in the host's memory; not of the device.
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


def predict(run: RunConfig, mesh: MeshSpec) -> Memory:
    """Of a run whose mesh is legal."""
    work = Work.of(run, mesh)
    wide = jnp.dtype(run.model.param_dtype).itemsize
    parameters = sum(w.layers * w.stored for w in work.weights) * wide
    kept, host = _activations(work)
    return Memory(
        parameters,
        2 * parameters + STEPS,
        4 * 4 * work.tokens * work.micro_batches,
        _gradients(work),
        _gathered(work),
        kept,
        round(max(_loss(work), _backward(work))),
        host,
    )


def saved_bytes(work: Work, block: BlockConfig) -> int:
    """What one micro-batch's forward pass of a block leaves for its backward pass, beside its input."""
    remat = work.run.model.remat
    if remat == "full":
        return 0
    inner = work.inner_widths(block)
    names = ["q", "k", "v", "out", "up", *(["gate"] if gated(block) else [])]
    stored = sum(inner[name] for name in names) * work.tokens * work.width + work.stream_bytes()
    stored += 4 * work.tokens * block.attention.heads / work.tensor  # the softmax's sums
    if remat == "none":
        # Normed inputs of both halves, the activated gate and its product, rotated queries and keys.
        stored += 2 * work.stream_bytes() + (2 * inner["up"] + inner["q"] + inner["k"]) * work.tokens * work.width
        if isinstance(block.mlp, MoeConfig):
            stored += (3 * inner["expert"] + 2 * inner["sent"]) * work.tokens * work.width
    return round(stored)


def _activations(work: Work) -> tuple[int, int]:
    """(bytes on the device, in the host's memory) of what waits for the backward pass."""
    per_input = work.stream_bytes()
    of_layers = 0.0
    for group, repeats in work.run.model.segments:
        of_layers += repeats / work.stages * (per_input + sum(saved_bytes(work, block) for block in group))
    if work.stages == 1:
        return round(of_layers + 2 * per_input), 0  # and the last layer's result, normed and not
    schedule, depths = planned(work.run, work.stages)
    slots = pools(schedule)
    away = sum(depths.offloaded(work.run.parallel.offload)) / sum(depths.rooms)
    a_slot = of_layers / schedule.chunks
    held = slots.saves * (1 - away) + (3 * away if away else 0)
    pending = slots.pendings * a_slot * (1 - away)
    return round(held * a_slot + pending), round((slots.hosted + 1) * away * a_slot) if away else 0


class Pools(NamedTuple):
    """Slots of a pipeline's pools, see ``jaxllm.parallel.pipeline.table``."""

    saves: int
    pendings: int
    hosted: int


@functools.lru_cache(maxsize=1024)
def pools(schedule: Schedule) -> Pools:
    """Of a schedule; the table itself is large."""
    made = tabulate(schedule)
    return Pools(made.saves, made.pendings, made.hosted)


def _gradients(work: Work) -> int:
    """As parameters are stored; of ZeRO-1 with several micro-batches as they are used."""
    wide = jnp.dtype(work.run.model.param_dtype).itemsize
    late = work.run.parallel.zero == 1 and work.micro_batches > 1
    return sum(w.layers * (w.used if late else w.stored) for w in work.weights) * wide


def _gathered(work: Work) -> int:
    """Weights that are whole for longer than a layer's work: all of them but in ZeRO-3."""
    if work.run.parallel.zero == 3:
        return 0
    return sum(w.layers * w.used for w in work.weights if w.matrix) * work.width


def _loss(work: Work) -> float:
    """The vocabulary's matrix and its gradient, the stream's gradient in float32, a band of logits and its gradient."""
    chunk = tokens_of_a_chunk(work.tokens)
    vocab = work.run.model.vocab_size // work.tensor
    head = vocab * work.run.model.embed_dim * work.width
    return 2 * head + 4 * work.tokens * work.run.model.embed_dim + 2 * 4 * chunk * vocab_of_a_band(chunk, vocab)


def _backward(work: Work) -> float:
    """Two layers' weights and one's gradients; what the layer computes again, and its gradients."""
    of_layers = [w for w in work.weights if w.name.startswith("segments/")]
    weights = sum(w.used for w in of_layers if w.matrix) / len(work.run.model.segments) * work.width
    inner = max(sum(work.inner_widths(block).values()) for block in work.run.model.blocks)
    head = work.run.model.vocab_size // work.tensor * work.run.model.embed_dim * work.width
    values = (3 * inner * work.width + 4 * work.run.model.embed_dim * work.width) * work.tokens
    return head + 3 * weights * (work.run.parallel.zero == 3) + values
