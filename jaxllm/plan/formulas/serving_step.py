"""Time of one serving step by formula: prefill chunks and decode tokens in one batch, on a device of a serving mesh.

    model = ServingStepModel(config, Cluster.parse("h200:1x8"), MeshSpec.parse("tensor=8"), weights="int8")
    model.step([BatchWork.of([0, 700], [512, 1])], rows=513, samples=2).seconds

The formulas are those of ``jaxllm.plan.formulas``: a matmul takes the longer of its FLOPs, at the rate that whole tiles
attain, and its bytes (roofline, arXiv:2402.16363); attention takes the longer of its FLOPs and the KV cache that it
reads; elementwise operations take their bytes; collectives are not overlapped with compute. Each operation takes a
launch in addition. The shard of every weight is that of the serving mesh (``serving_mesh.serving_rules``), so a mesh
that cannot serve the model is refused with the engine's own message.

Legend: T rows of the flat batch, D embed, V vocab, E experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import closest
from jaxllm.infer.runner.paged_cache import layer_groups
from jaxllm.infer.runner.serving_mesh import SERVED, serving_model
from jaxllm.models import BlockConfig, DecoderConfig, functional
from jaxllm.models.functional import VOCABULARY
from jaxllm.plan.formulas.calibration import DEFAULT, Calibration
from jaxllm.plan.formulas.collective_time import Network
from jaxllm.plan.formulas.device_work import leaves_of, shard_shape
from jaxllm.plan.formulas.engine_memory import slot_bytes
from jaxllm.plan.formulas.step_time import INNER_PASSES, STREAM_PASSES
from jaxllm.plan.hardware import Cluster
from jaxllm.quant.formats.format_table import VOCABULARY_FORMAT, WEIGHT_FORMATS
from sharding import MeshSpec, ShardingError

PLAIN, FOREIGN = "bfloat16", "fp8"
"""Weights as they are; and weights and matmuls in 8 bits as other engines have them, to compare with their figures."""
LAUNCH = {"gpu": 2e-6, "tpu": 1e-6}
"""Seconds that an operation takes beside its work, by platform."""
OPERATIONS = 4
"""Operations of a block beside its matmuls: two norms, rotary embedding, attention."""
SAMPLER_PASSES = 3
"""Memory passes of the sampler over float32 logits."""


def weight_bytes(name: str) -> float:
    """Bytes of one value of a matrix in a weight format, scales included.

    Raises:
        ValueError: there is no such format; lists the legal ones.
    """
    if name in (PLAIN, FOREIGN):
        return 2.0 if name == PLAIN else 1.0
    if name not in WEIGHT_FORMATS:
        legal = (PLAIN, *WEIGHT_FORMATS, FOREIGN)
        raise ValueError(f"weights = {name!r}: no such format.{closest(name, legal)} Legal: {', '.join(legal)}.")
    return _packed_bytes(name)


@functools.cache
def _packed_bytes(name: str) -> float:
    side = 1024
    packed = jax.eval_shape(WEIGHT_FORMATS[name](-2).pack, jax.ShapeDtypeStruct((side, side), jnp.float32))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in packed) / side**2


def vocabulary_bytes(name: str, width: int, embed_dim: int) -> float:
    """Bytes of one value of the embedding and the head, in a model whose matrices have a weight format.

    Args:
        width: bytes of the compute dtype.
    """
    if name not in WEIGHT_FORMATS:
        return float(width)
    return VOCABULARY_FORMAT.nbytes((1, embed_dim)) / embed_dim


@dataclass(frozen=True)
class BatchWork:
    """Chunks of one replica's batch.

    Attributes:
        starts: position of each chunk's first token.
        counts: tokens of each chunk.
    """

    starts: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, starts: Sequence[int], counts: Sequence[int]) -> BatchWork:
        """Batch of chunks given as lists."""
        return cls(np.asarray(starts, np.int64), np.asarray(counts, np.int64))

    def pairs(self, window: int | None) -> np.ndarray:
        """Pairs of a query and a token that it attends to, of each chunk."""
        ends = self.starts + self.counts
        if window is None:
            return self.counts * (2 * self.starts + self.counts + 1) / 2
        short = np.clip(np.minimum(ends, window) - self.starts, 0, None)
        return short * (2 * self.starts + short + 1) / 2 + (self.counts - short) * window

    def read(self, window: int | None) -> float:
        """Tokens whose keys and values are read."""
        ends = self.starts + self.counts
        return float((ends if window is None else ends - np.clip(self.starts + 1 - window, 0, None)).sum())


@dataclass(frozen=True)
class StepCost:
    """Cost of a serving step on one device; the times add up to the step's.

    Attributes:
        compute: seconds of FLOPs.
        memory: seconds of waiting for HBM.
        network: seconds of collectives.
        launch: seconds of launches.
        flops: FLOPs of matmuls and attention.
        bytes: bytes through HBM.
    """

    compute: float = 0.0
    memory: float = 0.0
    network: float = 0.0
    launch: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Total seconds."""
        return self.compute + self.memory + self.network + self.launch

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(*(a + b for a, b in zip(_fields(self), _fields(other), strict=True)))

    def __mul__(self, times: float) -> StepCost:
        return StepCost(*(times * a for a in _fields(self)))


def _fields(cost: StepCost) -> tuple[float, ...]:
    return cost.compute, cost.memory, cost.network, cost.launch, cost.flops, cost.bytes


@dataclass(frozen=True)
class _Matmuls:
    """Matmuls with weights of one device, one element each: sides of a shard, layers, stored bytes of a value.

    Attributes:
        experts: experts on the device; 0 for a dense weight.
        chosen: share of a token's rows that one expert gets, top_k / experts; 1 for a dense weight.
    """

    inner: np.ndarray
    outer: np.ndarray
    layers: np.ndarray
    width: np.ndarray
    experts: np.ndarray
    chosen: np.ndarray


@dataclass(frozen=True)
class _Attention:
    """Attention of one kind of block on one device.

    Attributes:
        layers: number of such blocks.
        expanded, absorbed: multiply-adds of a pair, of all heads; of keys and values, and of latents.
        slot: bytes of a token's KV cache.
        window: sliding window.
        inner: width of the feed-forward layer's inner activations.
        mixture: top_k of a mixture of experts; 0 for a dense layer.
    """

    layers: int
    expanded: int
    absorbed: int
    slot: float
    window: int | None
    inner: float
    mixture: int


class ServingStepModel:
    """Step-time model of a model on a serving mesh.

    Args:
        config: architecture; its dtype is the compute dtype.
        cluster: devices of the mesh, exactly as many as it has.
        mesh: serving mesh.
        weights: format of the blocks' matrices: ``bfloat16`` (as they are), a row of ``WEIGHT_FORMATS``, or ``fp8``
            with 8-bit matmuls, as other engines have.
        kv_dtype: format of the KV cache, as in ``EngineConfig``.
        calibration: attained shares of the data sheet's rates.
        launch: seconds of an operation beside its work; None: ``LAUNCH`` of the platform.

    Attributes:
        replicas: data-parallel replicas, each with a batch of its own.
        device_weight_bytes: bytes of weights on a device.
        span: devices that the pages of a replica are spread over; 1: each has all of its heads' pages.

    Raises:
        ShardingError: the mesh cannot serve the model, or has another number of devices.
        ValueError: there is no such format.
    """

    span = 1

    def __init__(
        self,
        config: DecoderConfig,
        cluster: Cluster,
        mesh: MeshSpec,
        *,
        weights: str = PLAIN,
        kv_dtype: str = "auto",
        calibration: Calibration = DEFAULT,
        launch: float | None = None,
    ):
        self.config = replace(config, param_dtype=config.dtype, remat="none", matmul_precision="plain")
        self.cluster, self.mesh, self.weights, self.calibration = cluster, mesh, weights, calibration
        self.hardware, self.platform = cluster.hardware, cluster.topology.platform
        self.width = jnp.dtype(config.dtype).itemsize
        sizes = {name: size for name, size in mesh.axes if size > 1}
        if strange := [name for name in sizes if name not in SERVED]:
            raise ShardingError(f"an engine does not serve over {strange[0]}; the axes are {', '.join(SERVED)}.")
        if math.prod(sizes.values()) != cluster.devices:
            raise ShardingError(f"the mesh {mesh} is not of the {cluster.devices} devices of {cluster.name}.")
        self.sizes = sizes
        self.tensor, self.context, self.expert = (sizes.get(name, 1) for name in ("tensor", "context", "expert"))
        self.fsdp = sizes.get("fsdp", 1)
        self.replicas = sizes.get("data", 1) * self.fsdp * self.expert
        self._launch = LAUNCH[self.platform] if launch is None else launch
        self._network = Network(cluster, mesh) if cluster.devices > 1 else None
        self._collectives: dict[tuple[str, str, int], float] = {}
        self._rules = serving_model(functional(self.config)).rules
        self._abstract = mesh.abstract()
        self._eight_bit = weights == FOREIGN
        self._vocabulary_width = vocabulary_bytes(weights, self.width, self.config.embed_dim)
        self._matmuls, self.device_weight_bytes, self._gathered_bytes = self._weights(weight_bytes(weights))
        self.groups = layer_groups(self.config, kv_dtype)
        self._blocks = self._attention_of_blocks(kv_dtype)

    # What is on a device

    def _shard(self, shape: tuple[int, ...], axes: Any, gathered: bool = False) -> tuple[int, ...]:
        rules, mesh = self._rules, self._abstract
        return shard_shape(shape, rules.spec(axes, mesh, shape, gathered=gathered, what="parameter"), mesh)

    def _weights(self, packed: float) -> tuple[_Matmuls, float, float]:
        """Matmuls of a device, bytes of its weights, and bytes that are all-gathered over fsdp."""
        rows, stored, gathered = [], 0.0, 0.0
        self._operations = 0
        for leaf in leaves_of(self.config):
            own, used = self._shard(leaf.shape, leaf.axes), self._shard(leaf.shape, leaf.axes, gathered=True)
            in_block = leaf.name.startswith("segments")
            size = packed if leaf.matrix and in_block else float(self.width)
            size = self._vocabulary_width if leaf.name in VOCABULARY else size
            stored += math.prod(own) * size
            gathered += (math.prod(used) - math.prod(own)) * size
            if not (leaf.matrix and in_block):
                continue
            layers, *shape = used
            axes = leaf.axes[1:]
            experts, chosen = 0, 1.0
            if "experts" in axes:
                moe = self._block(leaf.name).mlp.mixture
                experts, chosen = shape[axes.index("experts")], moe.top_k / moe.experts
                shape = [n for n, axis in zip(shape, axes, strict=True) if axis != "experts"]
            # A matrix to or from the residual stream; between them any split gives the same FLOPs.
            axes = [axis for axis in axes if axis != "experts"]
            inner = math.prod(shape[:-1]) if axes[-1] in ("embed", "expert_embed") else shape[0]
            rows.append((inner, math.prod(shape) // max(inner, 1), layers, size, experts, chosen))
            self._operations += layers
        # The head reads the table that it shares with the embedding, or one of the same shape.
        self._vocab, _ = self._shard((self.config.vocab_size, self.config.embed_dim), ("vocab", "vocab_embed"))
        self._operations += OPERATIONS * self.config.layers
        return _Matmuls(*(np.asarray(column, float) for column in zip(*rows, strict=True))), stored, gathered

    def _block(self, name: str) -> BlockConfig:
        _, segment, place, *_ = name.split("/")
        return self.config.segments[int(segment)][0][int(place)]

    @property
    def token_bytes(self) -> float:
        """Bytes of KV cache per token on one device, in all layers."""
        return sum(one.layers * one.slot for one in self._blocks)

    def group_token_bytes(self, group: int) -> float:
        """Bytes of KV cache per token on one device, in all layers of a layer group (``groups``)."""
        one = self.groups[group]
        return len(one.layers) * slot_bytes(one.kv_spec, one.dtype, self.tensor, self.platform)

    def _attention_of_blocks(self, kv_dtype: str) -> list[_Attention]:
        dtype = self.config.dtype if kv_dtype == "auto" else kv_dtype
        found: dict[BlockConfig, int] = {}
        for block in self.config.blocks:
            found[block] = found.get(block, 0) + 1
        out = []
        for block, layers in found.items():
            attention, spec = block.attention, block.attention.kv_spec
            (heads,) = self._shard((attention.heads,), ("heads",))
            expanded = attention.attention_macs * heads // attention.heads
            absorbed = heads * (spec.key_dim + spec.value_dim) if spec.latent else expanded
            widths = block.mlp.inner_widths(self.config.embed_dim)
            inner = (widths.get("up", 0) + widths.get("expert", 0)) / self.tensor
            mixture = 0 if block.mlp.mixture is None else block.mlp.mixture.top_k
            slot = slot_bytes(spec, dtype, self.tensor, self.platform)
            out.append(_Attention(layers, expanded, absorbed, slot, attention.window, inner, mixture))
        return out

    # Memory

    def temporary_bytes(self, rows: int, samples: int) -> float:
        """Bytes of a step's temporaries: residual stream, inner activations, whole float32 logits."""
        inner = max(one.inner for one in self._blocks)
        stream = rows / self.context * (4 * self.config.embed_dim + 3 * inner) * self.width
        return stream + 2 * 4 * samples * self.config.vocab_size + self._gathered_bytes / max(1, self.config.layers)

    # Time

    def step(self, batches: Sequence[BatchWork], rows: int, samples: int) -> StepCost:
        """Cost of one pass over the batches of all replicas, which run in lockstep.

        Args:
            batches: batch of each replica.
            rows: rows of a replica's flat batch, padding included.
            samples: rows of a replica whose logits are computed.
        """
        prefill = any((one.counts > 1).any() for one in batches)
        split = self.context if prefill else 1
        own = rows / split
        slowest, seconds = StepCost(), -1.0
        for one in batches:
            cost = self._attention(one, split)
            if cost.seconds > seconds:
                slowest, seconds = cost, cost.seconds
        return self.beside_attention(own, rows, samples, prefill=prefill) + slowest

    def beside_attention(self, own: float, rows: int, samples: int, *, prefill: bool) -> StepCost:
        """Cost of a pass beside the work of attention, whose launches are in it.

        Args:
            own: rows of a device.
            rows, samples: see ``step``.
            prefill: some request has more than one row.
        """
        total = self._products(own) + self._head(samples)
        stream = sum(
            one.layers * own * (STREAM_PASSES * self.config.embed_dim + INNER_PASSES * one.inner)
            for one in self._blocks
        )
        stream = (stream + 2 * own * self.config.embed_dim) * self.width
        total += StepCost(memory=self._seconds_of(stream), bytes=stream)
        total += StepCost(network=self._exchanged(own, rows, samples, prefill), launch=self._operations * self._launch)
        return total

    def _seconds_of(self, size: Any) -> Any:
        return size / (self.hardware.bandwidth * self.calibration.memory)

    def _rate(self, blocks: bool) -> float:
        if blocks and self._eight_bit:
            return self.hardware.flops_fp8
        return self.hardware.flops if self.width == 2 else self.hardware.flops_float32

    def _products(self, rows: float) -> StepCost:
        """Matmuls with the weights of all blocks."""
        m, tile, together = self._matmuls, self.hardware.tile, rows * self.expert
        is_expert = m.experts > 0
        copies = np.where(is_expert, m.experts, 1.0)
        share = np.where(is_expert, 1 - (1 - m.chosen) ** together, 1.0)  # expected share of experts that are chosen
        each = np.where(is_expert, together * m.chosen / share, rows)  # rows of a chosen expert
        filled = m.inner * m.outer / (_up(m.inner, tile) * _up(m.outer, tile)) * each / _up(each, 8)
        count = m.layers * copies * share
        flops = count * 2 * each * m.inner * m.outer
        moved = count * (m.inner * m.outer * m.width + each * (m.inner + m.outer) * self.width)
        work = flops / (self._rate(True) * self.calibration.matmul * filled)
        wait = np.maximum(0.0, self._seconds_of(moved) - work)
        return StepCost(float(work.sum()), float(wait.sum()), 0.0, 0.0, float(flops.sum()), float(moved.sum()))

    def _head(self, samples: float) -> StepCost:
        d, v = self.config.embed_dim, self._vocab
        flops = 2.0 * samples * d * v
        sampled = 4 * SAMPLER_PASSES * samples * self.config.vocab_size  # of whole rows, on every device
        moved = v * d * self._vocabulary_width + samples * d * self.width + sampled
        work = flops / (self._rate(False) * self.calibration.matmul) * float(_up(samples, 8)) / max(samples, 1)
        return StepCost(work, max(0.0, self._seconds_of(moved) - work), flops=flops, bytes=moved)

    def _attention(self, batch: BatchWork, split: int, blocks: Sequence[_Attention] | None = None) -> StepCost:
        total = StepCost()
        whole = (batch.starts == 0) & (batch.counts > 1)
        for one in self._blocks if blocks is None else blocks:
            pairs = batch.pairs(one.window)
            macs = one.expanded * pairs[whole].sum() + one.absorbed * pairs[~whole].sum()
            flops = 2.0 * one.layers * float(macs) / split
            moved = one.layers * batch.read(one.window) * one.slot
            work = flops / (self._rate(False) * self.calibration.attention)
            total += StepCost(work, max(0.0, self._seconds_of(moved) - work), flops=flops, bytes=moved)
        return total

    def _exchanged(self, own: float, rows: int, samples: int, prefill: bool) -> float:
        """Seconds of the collectives of a pass."""
        if self._network is None:
            return 0.0
        width, layers, seconds = self.width, self.config.layers, 0.0
        stream = own * self.config.embed_dim * width
        if self.tensor > 1:
            seconds += (2 * layers + 1) * self._collective("all-reduce", "tensor", stream)
            seconds += self._collective("all-gather", "tensor", samples * self._vocab * self.tensor * width)
        if self.expert > 1:
            for one in self._blocks:
                seconds += (
                    2
                    * one.layers
                    * bool(one.mixture)
                    * self._collective("all-to-all", "expert", stream * one.mixture / self.tensor)
                )
        if self.fsdp > 1:
            whole = self._gathered_bytes * self.fsdp / (self.fsdp - 1) / layers
            seconds += layers * self._collective("all-gather", "fsdp", whole)
        if self.context > 1 and prefill:
            for one in self._blocks:
                seconds += one.layers * self._collective("all-gather", "context", rows * one.slot)
        return seconds

    def _collective(self, kind: str, axis: str, size: float) -> float:
        key = kind, axis, int(size)
        if key not in self._collectives:
            assert self._network is not None
            found = self._network.time(kind, (axis,), int(size))
            self._collectives[key] = found.seconds / self.calibration.link
        return self._collectives[key]


def _up(size: Any, multiple: int) -> Any:
    return np.ceil(np.asarray(size) / multiple) * multiple
