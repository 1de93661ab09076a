"""Step time of a plan by formula, split into what it is spent on.

A product takes the longer of its arithmetic, at the rate that whole tiles reach, and of its bytes through memory
(roofline, LLM-Viewer, arXiv:2402.16363); what is elementwise takes its bytes. Passes: forward once, backward twice (one
product for the input's gradient, one for the weight's), and again what ``remat`` recomputes. Of a collective that other
work can hide, the part that is longer than that work counts (vTrain, arXiv:2312.12391); all others count whole. A
pipeline divides by the share of time that its schedule is busy (``jaxllm.parallel.pipeline``).

Legend: T tokens of a micro-batch on a device, D embed, V vocab, P parameters of a device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import jax.numpy as jnp

from jaxllm.models import DecoderConfig, MoeConfig
from jaxllm.models.low_precision_matmul import MatmulPrecision, QuantisationScheme
from jaxllm.models.remat import offloaded_share
from jaxllm.parallel.collective_traffic import expected
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.parallel.pipeline.schedule import Costs
from jaxllm.parallel.pipeline.schedule_generators import default_chunks, make
from jaxllm.parallel.sharding_table import Expected
from jaxllm.plan.formulas import memory_estimate as memory
from jaxllm.plan.formulas import offload_time
from jaxllm.plan.formulas.calibration import DEFAULT, Calibration
from jaxllm.plan.formulas.collective_time import Network
from jaxllm.plan.formulas.device_work import Weight, Work, cached_model, rules_of, without_stages
from jaxllm.plan.formulas.optimizer_memory import state_bytes
from jaxllm.plan.hardware import Cluster, Hardware
from jaxllm.train import RunConfig
from jaxllm.train.model_flops import train_flops_per_token
from sharding import MeshSpec

ATTENTION_BACKWARD = 3.5
"""Products of attention's backward pass over the two of its forward one: its two kernels, of queries and of keys and
values, each make the scores and their gradient again."""
UPDATE_PASSES = 5
"""Times that an update moves numbers of the parameters' kind: the gradient written and read twice (its norm first), the
parameter read and written. The optimizer's state is read and written."""
UPDATE_BYTES = 4 * UPDATE_PASSES + 2 * 8
"""Of a float32 parameter with two moments."""
STREAM_PASSES, INNER_PASSES = 10, 3
"""Times that a block's forward pass moves a residual stream, and its inner values, through memory outside products."""
WEIGHTS = ("weights", "gradients")
RING = ("keys and values, forward", "keys and values, backward")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        compute: arithmetic.
        memory: what waits for the device's memory.
        near: collectives inside a slice or node that nothing hides, by mesh axes.
        far: likewise over the network between slices or nodes.
        bubble: waiting for other stages of a pipeline.
        host: of activations on their way to the host's memory and back, what nothing hides.
        flops: of the model, in all (recomputation does not count).
        devices: that take part.
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

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum((self.compute, self.memory, *self.near.values(), *self.far.values(), self.bubble, self.host))

    def mfu(self, peak: float) -> float:
        """Model FLOPs over what the devices could do at ``peak`` FLOP/s each."""
        return self.flops / self.seconds / self.devices / peak


@dataclass(frozen=True)
class _Rates:
    """Seconds on a device."""

    hardware: Hardware
    calibration: Calibration
    width: int
    products: MatmulPrecision

    @property
    def flops(self) -> float:
        return self.hardware.flops if self.width == 2 else self.hardware.flops_float32

    @property
    def flops_of_blocks(self) -> float:
        """Of products with a block's weights, whose factors may be rounded (``jaxllm.models.low_precision_matmul``)."""
        if not QuantisationScheme(self.products).bits8:
            return self.flops
        return self.hardware.flops_int8 if self.products == "int8" else self.hardware.flops_fp8

    def product(self, rows: float, inner: int, outer: int, block: bool) -> tuple[float, float]:
        """(arithmetic, waiting for memory) of [rows, inner] x [inner, outer], with a ``block``'s weight or the head."""
        tile, c = self.hardware.tile, self.calibration
        filled = inner * outer / (_up(inner, tile) * _up(outer, tile)) * rows / _up(rows, 8)
        peak = self.flops_of_blocks if block else self.flops
        work = 2 * rows * inner * outer / (peak * c.products * filled)
        moved = self.stream((rows * inner + inner * outer + rows * outer) * self.width)
        return work, max(0.0, moved - work)

    def attention(self, products: float) -> float:
        return 2 * products / (self.flops * self.calibration.attention)

    def stream(self, size: float) -> float:
        return size / (self.hardware.bandwidth * self.calibration.memory)


def predict(run: RunConfig, cluster: Cluster, mesh: MeshSpec, calibration: Calibration = DEFAULT) -> StepTime:
    """Of a run whose mesh is legal on the cluster."""
    work = Work.of(run, mesh)
    rates = _Rates(cluster.hardware, calibration, work.width, run.model.products)
    forward, backward, again = (_Pass(work, rates, kind) for kind in ("forward", "backward", "again"))
    micro = work.micro_batches
    compute = micro * (forward.compute + backward.compute + again.compute)
    waiting = micro * (forward.memory + backward.memory + again.memory)
    # What is kept waits in arrays of all layers: written there, and read.
    kept = 2 * micro * rates.stream(memory.kept_bytes(work)) + rates.stream(_handled(work))
    parameters = sum(w.stored * w.layers for w in work.weights) * jnp.dtype(run.model.param_dtype).itemsize
    update = rates.stream(UPDATE_PASSES * parameters + 2 * state_bytes(work, parameters))
    around = micro * (forward.attention + backward.attention + again.attention)
    near, far, hidden = _exposed(run, cluster, mesh, calibration, compute, around)
    state = offload_time.of_layers(work) * state_bytes(work, parameters)
    host = _host(work, cluster.hardware, calibration, compute, state)
    busy = compute + waiting + kept + sum(near.values()) + sum(far.values()) + host
    return StepTime(
        compute,
        waiting + kept + update,
        near,
        far,
        _bubble(work, busy, forward),
        host,
        train_flops_per_token(run.model, work.row) * run.data.batch_size * work.row,
        cluster.devices,
        hidden,
    )


class _Pass:
    """Seconds of one micro-batch's forward pass, its backward pass, or what that computes again."""

    def __init__(self, work: Work, rates: _Rates, kind: str):
        self.work, self.rates, self.kind = work, rates, kind
        self.compute = self.memory = self.attention = 0.0
        for weight in work.weights:
            # A tied embedding is the head as well; looking rows up is free.
            if weight.matrix and (weight.name == "embedding/table") <= work.run.model.tied:
                self._products(weight)
        for block, count in work.blocks.items():
            times = {"forward": 1.0, "backward": ATTENTION_BACKWARD, "again": float(work.run.model.remat == "full")}[
                kind
            ]
            self.attention += rates.attention(times * count * work.tokens * work.attended(block))
            inner = sum(work.inner_widths(block).values()) * work.tokens * work.width
            moved = STREAM_PASSES * work.stream_bytes() + INNER_PASSES * inner
            self.memory += rates.stream(moved * count * self._elementwise())
        self.compute += self.attention

    def _products(self, weight: Weight) -> None:
        times = self._times(weight)
        rows = self.work.tokens * weight.share
        compute, memory = self.rates.product(rows, *weight.sides, block=weight.name.startswith("segments/"))
        self.compute += times * weight.layers * compute
        self.memory += times * weight.layers * memory

    def _times(self, weight: Weight) -> float:
        """Products with a weight in this pass."""
        head = weight.name in ("head/weight", "embedding/table")
        if self.kind != "again":
            return 1.0 if self.kind == "forward" else 2.0
        if head:
            return 1.0  # the logits
        remat = self.work.run.model.remat
        if (share := offloaded_share(remat)) is not None and not weight.expert:
            return 0.0 if weight.name.endswith(("mlp/down", "attention/o")) else 1.0 - share
        if remat == "none" or (remat == "elementwise" and not weight.expert):
            return 0.0
        return 0.0 if weight.name.endswith("mlp/down") else 1.0  # nothing needs the last product again

    def _elementwise(self) -> float:
        return {"forward": 1.0, "backward": 2.0, "again": float(self.work.run.model.remat != "none")}[self.kind]


def _exposed(
    run: RunConfig, cluster: Cluster, mesh: MeshSpec, calibration: Calibration, compute: float, attention: float
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Seconds of collectives by axes that nothing hides: (near, far), and of those that something does."""
    network = Network(cluster, mesh)
    near: dict[str, float] = {}
    far: dict[str, float] = {}
    hidden: dict[str, float] = {}
    found: dict[tuple[str, bool], float] = {}
    classes: dict[str, float] = {}
    for one in collectives(run, mesh):
        time = network.time(_carried_out(one, network), one.axes, one.bytes)
        slow, axes = time.far > time.near, "+".join(one.axes)
        seconds = time.seconds * one.count / calibration.links
        room = "weights" if one.why in WEIGHTS else "ring" if one.why in RING else "none"
        found[f"{room}/{axes}", slow] = found.get((f"{room}/{axes}", slow), 0.0) + seconds
        classes[room] = classes.get(room, 0.0) + seconds
    rooms = {"weights": calibration.hidden * compute, "ring": calibration.beside * attention, "none": 0.0}
    for (key, slow), seconds in found.items():
        room, axes = key.split("/")
        share = max(0.0, 1 - rooms[room] / classes[room])
        into = far if slow else near
        into[axes] = into.get(axes, 0.0) + seconds * share
        hidden[axes] = hidden.get(axes, 0.0) + seconds * (1 - share)
    return near, far, hidden


def _handled(work: Work) -> float:
    """Bytes that weights and gradients move in a step, outside products and the update.

    A stored weight is cast (read, written narrow), and its gradient's place filled with zeros and written, for each
    micro-batch. Weights that stay gathered, of ZeRO-1 and -2, are cut out of the whole for a layer's use, and so are
    their gradients put back, narrow all of them: filled, written, and twice read and written.
    """
    wide, micro = jnp.dtype(work.run.model.param_dtype).itemsize, work.micro_batches
    stored = sum(w.stored * w.layers for w in work.weights)
    cast, summed = wide + work.width, 2 * wide
    if work.run.parallel.zero == 3 or work.stages > 1:
        return micro * stored * (cast + summed)
    used = sum(w.used * w.layers for w in work.weights if w.matrix)
    return stored * (cast + micro * summed) + micro * used * 6 * work.width


def _host(work: Work, hardware: Hardware, calibration: Calibration, compute: float, state: float) -> float:
    """Exposed seconds of copies to the host: activations go while layers run forward, and come while they run backward.

    Optimizer state, so many bytes of it, travels when nothing else is done.
    """
    sent = work.run.parallel.offload * memory.kept_bytes(work) * work.micro_batches / hardware.host
    beside = 2 * max(0.0, sent - calibration.hidden * compute / 3)  # a third of the arithmetic is the forward pass
    beside += max(0.0, offload_time.passes_of(work, hardware) - calibration.hidden * compute)
    return beside + offload_time.update_of(work, hardware, state)


def _carried_out(one: Expected, network: Network) -> str:
    """What it is carried out as: TPU compilers write a reduce-scatter over two dimensions as an all-reduce."""
    if one.kind == "reduce-scatter" and network.torus and network.spread(one.axes) > 1:
        return "all-reduce"
    return one.kind


def collectives(run: RunConfig, mesh: MeshSpec) -> tuple[Expected, ...]:
    """What a device sends in a step; of plans that the formulas were not proven for, an estimate."""
    one, rest = without_stages(run, mesh)
    parallel, micro = one.parallel, run.accumulate
    plain = replace(parallel, chunks=0, depths=(), offload=0.0, schedule="1f1b")
    remat = "full" if run.model.remat == "full" else "none"
    model = replace(one.model, remat=remat, unroll=1)
    sent = [
        _in_micro_batches(found, micro, parallel.zero)
        for found in _of_one(model, plain, rest, run.data.batch_size, run.data.seq_len)
    ]
    if dict(mesh.axes).get("stage", 1) > 1:
        times = 2 * micro * (parallel.chunks or default_chunks(parallel.schedule))
        sent.append(
            Expected("collective-permute", ("stage",), times, Work.of(run, mesh).stream_bytes(), "between stages")
        )
    return tuple(sent)


@functools.lru_cache(maxsize=4096)
def _of_one(
    model: DecoderConfig, parallel: ParallelConfig, mesh: MeshSpec, rows: int, seq_len: int
) -> tuple[Expected, ...]:
    """Of the whole batch at once."""
    functional = cached_model(model, rules_of(parallel))
    return expected(functional, mesh.abstract(), parallel, rows=rows, seq_len=seq_len, proven=False)


def _in_micro_batches(one: Expected, micro: int, zero: int) -> Expected:
    """Activations are sent in as many parts; weights again for each in ZeRO-3, their gradients unless it is ZeRO-1."""
    if one.why not in WEIGHTS:
        return replace(one, count=one.count * micro, bytes=one.bytes // micro)
    again = zero == 3 or (zero == 2 and one.why == "gradients")
    return replace(one, count=one.count * micro) if again else one


def _bubble(work: Work, busy: float, forward: _Pass) -> float:
    """Seconds that the busiest stage waits, its passes as long as predicted."""
    if work.stages == 1:
        return 0.0
    plan, micro = work.run.parallel, work.micro_batches
    chunks = plan.chunks or default_chunks(plan.schedule)
    if plan.schedule in ("gpipe", "1f1b", "interleaved"):  # whatever the passes' lengths are (docs/train/pipeline.md)
        idle = (work.stages - 1) / (chunks * micro + work.stages - 1)
    else:
        rest = (busy / micro - forward.compute) / 2
        idle = _idle(plan.schedule, work.stages, micro, round(rest / forward.compute, 1))
    return busy * idle / (1 - idle)


@functools.lru_cache(maxsize=4096)
def _idle(name: str, stages: int, micro: int, rest: float) -> float:
    return make(name, stages, micro).bubble(Costs(1.0, rest, rest))


def _up(number: float, to: int) -> float:
    return -(-number // to) * to


def is_mixture(run: RunConfig) -> bool:
    """Whether some layers have experts."""
    return any(isinstance(block.mlp, MoeConfig) for block in run.model.blocks)
