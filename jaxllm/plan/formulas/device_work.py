"""Work of one device in a step, by formula: its weights, token counts and matmul shapes.

Legend: B batch, S sequence, D embed, T tokens of a micro-batch on a device, L layers.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxllm.models import BlockConfig, DecoderConfig, Functional, MoeConfig, functional
from jaxllm.models.packed_weight import is_packed
from jaxllm.models.param_subset import trainable_mask
from jaxllm.models.params import allows_unreduced_grad
from jaxllm.models.remat import offloaded_share
from jaxllm.optim.matrix_params import STREAM_AXES
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.parallel.pipeline.stage_split import Remat
from jaxllm.peft.adapted_model import adapted_model
from jaxllm.peft.adapter_method import AdapterConfig
from jaxllm.peft.method_table import ADAPTER_METHODS
from jaxllm.train import RunConfig
from jaxllm.train.model_flops import causal_mean
from pallas_kernels.flash_attention.xla import KV_BLOCK, MIN_BAND, QUERY_BANDS
from sharding import LogicalAxes, MeshSpec, Rules
from sharding.layer_layouts import AXIS
from sharding.layer_layouts import rules_of as rules_in_layers
from sharding.rules import mesh_axes_of

NO_ADAPTER = AdapterConfig()
KERNEL_DTYPES = ("bfloat16", "float32")
KERNEL_HEAD_DIM = 256
"""Compute dtypes and largest head dim of the flash attention kernels (``pallas_kernels.flash_attention.blockwise``)."""


@dataclass(frozen=True)
class DeviceWeight:
    """One parameter on one device, stacked over layers; element counts are per layer.

    Attributes:
        name: path of the parameter.
        layers: number of layers on the device.
        shape: shard shape between steps, all layers.
        stored: elements of the shard between steps.
        in_step, summed: elements of the shard during a step, and of that of its gradient that micro-batches add up:
            more than ``stored`` with 3-level ZeRO.
        used: elements during use, after the all-gather.
        sides: a matrix's dimensions during use: width on the residual stream's side, and on the other.
        share: rows of one matmul with it by the device's tokens: 1, or for one expert top_k / experts of the tokens of
            all devices that exchange rows.
        matmuls: with weights of these sides on the device: its experts, or 1.
        matrix: whether it is used in matmuls.
        expert: whether it belongs to an expert.
        exchanged: whether to one whose rows devices exchange, see ``is_exchanged``.
        bytes: of an element as it is stored, where it is packed; 0: those of the parameters' dtype.
    """

    name: str
    layers: int
    shape: tuple[int, ...]
    stored: int
    in_step: int
    summed: int
    used: int
    sides: tuple[int, int]
    share: float
    matmuls: int
    matrix: bool
    expert: bool
    exchanged: bool
    bytes: float = 0.0


class RingShare(NamedTuple):
    """Share of the transfers around all of ``context`` that take place, from 0 to 1: less than 1 with context by need.

    Attributes:
        steps: of those of a ring's steps.
        rounds: of those that a micro-step has once.
    """

    steps: float = 1.0
    rounds: float = 1.0


WHOLE = RingShare()


@dataclass(frozen=True)
class DeviceWork:
    """A run on a mesh as one device sees it.

    Attributes:
        run: the run.
        mesh: the mesh, all sizes known.
        weights: parameters of the device (of its pipeline stage).
        tokens: tokens of a micro-batch.
        residual_tokens: tokens of the residual stream on the device, where that is split further (sequence
            parallelism).
        row: sequence length.
        tensor: tensor parallelism: number of shards of heads and widths.
        features: 2D tensor parallelism: number of shards of the residual stream's features; a factor of ``tensor``.
        expert_tokens: tokens of a micro-batch that the device sends to experts: as ``tokens``, but for a folding.
        expert_tensor: number of shards of the experts' width.
        stages: pipeline stages; 1 without a pipeline.
        micro_batches: micro-batches of a step.
        pairs: keys of a query on the busiest device, on average, where the documents of a batch are known
            (``jaxllm.plan.document_batch``); 0: those of whole rows.
        rings: share of the transfers around ``context`` that take place.
        features: number of shards of the residual stream's features (2D tensor parallelism).
        layout: of the layers (``sharding.layer_layouts``).
        repeats: repeats of each segment's group of blocks that the work has; None: all.
        parts: works of layers that are alike, and of what is outside layers, where layers differ in their layout or
            remat policy (``layer_parts``); empty where they do not.
    """

    run: RunConfig
    mesh: MeshSpec
    weights: tuple[DeviceWeight, ...]
    tokens: int
    residual_tokens: int
    row: int
    tensor: int
    expert_tokens: int
    expert_tensor: int
    stages: int
    micro_batches: int
    pairs: float = 0.0
    rings: RingShare = WHOLE
    features: int = 1
    layout: str = AXIS
    repeats: tuple[int, ...] | None = None
    parts: tuple[DeviceWork, ...] = ()

    @classmethod
    def of(cls, run: RunConfig, mesh: MeshSpec) -> DeviceWork:
        """Work of a run whose mesh is legal."""
        check_remat(run.model)
        if run.parallel.layouts():
            raise NotImplementedError(
                f'parallel.layers = "{run.parallel.layers}": here the cost model supports tensor, for all layers; '
                "jaxllm plan --as-is predicts layouts by layer of a run in device memory."
            )
        sizes = dict(mesh.axes)
        stages = sizes.get("stage", 1)
        rules = rules_of(run.parallel).on(mesh.abstract())
        weights = device_weights(architecture(run.model), rules, mesh, run.adapter)
        shape = (run.data.batch_size // run.accumulate, run.data.seq_len)
        count = lambda *axes: local_size(rules, mesh, axes, shape)  # noqa: E731
        return cls(
            run,
            mesh,
            weights,
            count("batch", "seq"),
            count("batch", "residual_seq"),
            run.data.seq_len,
            sizes.get("tensor", 1) * sizes.get("features", 1),
            count("expert_batch", "expert_seq"),
            ways_over(mesh.abstract(), rules.mesh_axes("expert_mlp")),
            stages,
            run.accumulate,
            features=sizes.get("features", 1),
        )

    @property
    def width(self) -> int:
        """Bytes of an element in compute dtype."""
        return jnp.dtype(self.run.model.dtype).itemsize

    @property
    def blocks(self) -> dict[BlockConfig, float]:
        """Block kinds, with the number of blocks of each on a device."""
        if self.repeats is None:
            return {block: count / self.stages for block, count in _kinds(self.run.model)}
        found = Counter[BlockConfig]()
        for group, repeats in self.groups:
            for block in group:
                found[block] += repeats  # type: ignore[assignment]
        return {block: count for block, count in found.items() if count}

    @property
    def groups(self) -> tuple[tuple[tuple[BlockConfig, ...], float], ...]:
        """Groups of blocks that repeat together, with the number of repeats of each on a device."""
        segments = self.run.model.segments
        if self.repeats is None:
            return tuple((group, repeats / self.stages) for group, repeats in segments)
        return tuple((group, own) for (group, _), own in zip(segments, self.repeats, strict=True))

    @property
    def alike(self) -> tuple[DeviceWork, ...]:
        """Works of layers that are alike: the parts, or this one."""
        return self.parts or (self,)

    @property
    def layouts(self) -> tuple[DeviceWork, ...]:
        """Works of the layers of each layout, whatever their remat policy; this one where there are no parts."""
        found: dict[str, DeviceWork] = {}
        for part in self.parts:
            if part.repeats is not None and any(part.repeats):
                before = found.get(part.layout)
                found[part.layout] = part if before is None else before.beside(part)
        return tuple(found.values()) or (self,)

    def beside(self, other: DeviceWork) -> DeviceWork:
        """Work of the layers of two parts of one layout."""
        assert self.repeats is not None
        assert other.repeats is not None
        weights = {weight.name: weight for weight in self.weights}
        for weight in other.weights:
            layers = weight.layers + weights[weight.name].layers if weight.name in weights else weight.layers
            weights[weight.name] = replace(weight, layers=layers)
        repeats = tuple(a + b for a, b in zip(self.repeats, other.repeats, strict=True))
        return replace(self, weights=tuple(weights.values()), repeats=repeats)

    @property
    def segments(self) -> int:
        """Number of segments that the work has layers of."""
        return len(self.run.model.segments) if self.repeats is None else sum(n > 0 for n in self.repeats)

    @property
    def trained(self) -> tuple[DeviceWeight, ...]:
        """Parameters that the run trains: those with gradients and optimizer state."""
        if not self.run.trainable and not self.run.adapter:
            return self.weights
        names = trained_names(architecture(self.run.model), self.run.trainable, self.run.adapter)
        return self.weights if names is None else tuple(w for w in self.weights if w.name in names)

    def exchanges_rows(self, moe: MoeConfig) -> bool:
        """Whether devices exchange rows of a mixture, see ``is_exchanged``."""
        return is_exchanged(moe, self.expert_shards)

    @property
    def exchanging(self) -> bool:
        """Whether devices exchange rows in any layer of the run."""
        mixtures = (block.mlp.mixture for block, _ in _kinds(self.run.model))
        return any(moe is not None and self.exchanges_rows(moe) for moe in mixtures)

    @property
    def expert_shards(self) -> int:
        """Number of shards that the experts are split into."""
        mesh = self.mesh.abstract()
        return ways_over(mesh, rules_of(self.run.parallel).on(mesh).mesh_axes("experts"))

    def stream_bytes(self) -> int:
        """Bytes of the residual stream of a micro-batch."""
        return self.residual_tokens * self.run.model.embed_dim * self.width // self.features

    def inner_widths(self, block: BlockConfig) -> dict[str, float]:
        """Widths of a block's inner activations, per token on one device; heads and MLP are split over tensor."""
        attention = block.attention
        heads, kv_heads = attention.heads, max(attention.kv_heads, self.tensor)
        widths = {
            "q": heads * attention.key_dim,
            "k": kv_heads * attention.key_dim,
            "v": kv_heads * attention.value_dim,
            "out": heads * attention.value_dim,
        } | block.mlp.inner_widths(self.run.model.embed_dim)
        rows = self.expert_tokens / self.tokens
        split = {"sent": 1 / rows, "expert": self.expert_tensor / rows}
        return {name: width / split.get(name, self.tensor) for name, width in widths.items()}

    def has_flash_kernel(self, block: BlockConfig, platform: str) -> bool:
        """Whether a kernel computes a block's attention, and its scores stay on chip; if not, plain JAX does.

        Ring attention has a kernel for TPUs alone.
        """
        dims = max(block.attention.key_dim, block.attention.value_dim)
        ring = ways_over(self.mesh.abstract(), rules_of(self.run.parallel).mesh_axes("attn_kv_seq")) > 1
        taken = self.run.model.dtype in KERNEL_DTYPES and dims <= KERNEL_HEAD_DIM
        return taken and not (ring and platform == "gpu")

    def score_block(self, block: BlockConfig) -> float:
        """Scores that attention in plain JAX holds at a time: a band of queries by a block of keys, in all heads."""
        length = min(self.tokens, self.row)
        band = min(length, max(MIN_BAND, length // QUERY_BANDS))
        return self.tokens / length * block.attention.heads / self.tensor * band * min(KV_BLOCK, length)

    def scores(self, block: BlockConfig) -> float:
        """Attention scores of a token, in all heads of one device."""
        return block.attention.heads * self._keys(block) / self.tensor

    def attended(self, block: BlockConfig) -> float:
        """Multiply-accumulates of a token's scores (or values) with the tokens it attends to, on one device."""
        return block.attention.attention_macs * self._keys(block) / self.tensor

    def _keys(self, block: BlockConfig) -> float:
        """Keys that a query attends to, on average."""
        row = causal_mean(self.row, block.attention.window)
        return min(row, self.pairs) if self.pairs else row


def is_exchanged(moe: MoeConfig, shards: int) -> bool:
    """Whether rows go to their experts in rounds, whose backward pass runs the experts again (``expert_exchange``).

    With a capacity they go in buffers of a fixed size, which are kept like other activations.
    """
    return moe.capacity is None and shards > 1


class ParameterLeaf(NamedTuple):
    """Declaration of a parameter: path, shape, logical axes, whether it is a matrix, and bytes of a packed element."""

    name: str
    shape: tuple[int, ...]
    axes: LogicalAxes
    matrix: bool
    bytes: float = 0.0


@functools.lru_cache(maxsize=64)
def cached_model(config: DecoderConfig, rules: Rules) -> Functional:
    """Model for a config and sharding rules, cached."""
    return functional(config, rules)


@functools.lru_cache(maxsize=256)
def rules_of(parallel: ParallelConfig) -> Rules:
    """Sharding rules of a parallel config, cached."""
    return parallel.rules()


@functools.lru_cache(maxsize=64)
def trained_names(
    config: DecoderConfig, trainable: tuple[str, ...], adapter: AdapterConfig = NO_ADAPTER
) -> frozenset[str] | None:
    """Paths of the parameters that ``RunConfig.trainable`` and the adapter choose; None for all."""
    own = ADAPTER_METHODS[adapter.kind].trained if adapter else ()
    mask = trainable_mask(adapted_model(functional(config), adapter), (*own, *trainable))
    if mask is None:
        return None
    found = jax.tree_util.tree_leaves_with_path(mask)
    return frozenset(jax.tree_util.keystr(path, simple=True, separator="/") for path, chosen in found if chosen)


@functools.lru_cache(maxsize=64)
def leaves_of(config: DecoderConfig, adapter: AdapterConfig = NO_ADAPTER) -> tuple[ParameterLeaf, ...]:
    """All parameters of a model and its adapter; a packed weight is one, of its dense shape."""

    def leaf(path: tuple, node: Any) -> ParameterLeaf:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        arrays = [node.values, node.scales] if is_packed(node) else [node]
        shapes = [(*one.stack, *one.param.get_value().shape) for one in arrays]
        first = arrays[0]
        axes = ("layers",) * len(first.stack) + first.param.get_metadata()["logical_axes"]
        if not is_packed(node):
            return ParameterLeaf(name, shapes[0], axes, allows_unreduced_grad(first.param))
        dense = node.format.shape(shapes[0])
        return ParameterLeaf(name, dense, axes, True, sum(map(math.prod, shapes)) / math.prod(dense))

    declared = adapted_model(functional(config), adapter).declared()
    found = jax.tree_util.tree_leaves_with_path(declared, is_leaf=is_packed)
    return tuple(leaf(path, node) for path, node in found)


def architecture(config: DecoderConfig) -> DecoderConfig:
    """Config without settings that only concern execution: the cache key of what depends on the architecture alone."""
    return with_remat(config, "full")


@functools.lru_cache(maxsize=1024)
def with_remat(config: DecoderConfig, remat: str) -> DecoderConfig:
    """Config with a remat policy, and layers that are not unrolled; cached."""
    return replace(config, remat=remat, unroll=1)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def device_weights(
    config: DecoderConfig, rules: Rules, mesh: MeshSpec, adapter: AdapterConfig, layout: str = AXIS
) -> tuple[DeviceWeight, ...]:
    """Parameters of a device, as layers of a layout use them.

    Args:
        config: model.
        rules: sharding rules by which parameters are stored.
        mesh: of the run.
        adapter: of the run.
        layout: one of ``sharding.layer_layouts``.
    """
    stages, use = dict(mesh.axes).get("stage", 1), rules_in_layers(rules, layout)
    return tuple(_weight(config, rules, use, mesh.abstract(), stages, *leaf) for leaf in leaves_of(config, adapter))


def _weight(
    config: DecoderConfig,
    stored_by: Rules,
    rules: Rules,
    mesh: AbstractMesh,
    stages: int,
    name: str,
    shape: tuple[int, ...],
    axes: LogicalAxes,
    matrix: bool,
    packed: float,
) -> DeviceWeight:
    spec = stored_by.spec(axes, mesh, shape)
    stored = shard_shape(shape, spec, mesh)
    outer = [axis for axis in rules.between_steps if axis in mesh_axes_of(spec)]
    wider = [math.prod(mesh.shape[axis] for axis in some) for some in (outer, outer[-1:])]
    used = shard_shape(shape, rules.spec(axes, mesh, shape, gathered=True), mesh)
    of_layers = axes[0] == "layers"
    layers = -(-shape[0] // stages) if of_layers else 1
    in_place = rules.mesh_axes("layers") == ("stage",)
    first = used[0] if of_layers else 1
    one, whole = used[1:] if of_layers else used, math.prod(stored)
    rest = axes[1:] if of_layers else axes
    stream = next((i for i, axis in enumerate(rest) if axis in STREAM_AXES), 0)
    expert = "experts" in rest
    experts = rest.index("experts") if expert else None
    others = [n for i, n in enumerate(one) if i not in (stream, experts)]
    share, exchanged = 1.0, False
    if expert and "segments" in name:
        _, segment, place, *_ = name.split("/")
        moe = config.segments[int(segment)][0][int(place)].mlp.mixture
        shards = ways_over(mesh, rules.mesh_axes("experts"))
        rows = ways_over(mesh, rules.mesh_axes("batch") + rules.mesh_axes("seq"))
        rows /= ways_over(mesh, rules.mesh_axes("expert_batch") + rules.mesh_axes("expert_seq"))
        share, exchanged = moe.top_k * shards / moe.experts * rows, is_exchanged(moe, shards)
    per_layer = whole // first if of_layers and in_place else whole // max(1, layers)
    return DeviceWeight(
        name,
        layers,
        stored,
        per_layer,
        per_layer * wider[0],
        per_layer * wider[1],
        math.prod(one),
        (one[stream] if one else 1, math.prod(others)),
        share,
        1 if experts is None else one[experts],
        matrix,
        expert,
        exchanged,
        packed,
    )


def shard_shape(shape: tuple[int, ...], spec: Any, mesh: AbstractMesh) -> tuple[int, ...]:
    """Shard shape of a device."""
    out = []
    for size, split in zip(shape, spec, strict=True):
        names = () if split is None else (split,) if isinstance(split, str) else split
        out.append(-(-size // math.prod(mesh.shape[name] for name in names)))
    return tuple(out)


def ways_over(mesh: AbstractMesh, names: tuple[str, ...]) -> int:
    """Number of devices along mesh axes, of those that the mesh has."""
    return math.prod(mesh.shape.get(name, 1) for name in names)


@functools.lru_cache(maxsize=4096)
def local_size(rules: Rules, mesh: MeshSpec, axes: tuple[str, ...], shape: tuple[int, ...]) -> int:
    """Elements of a device's shard of an array with these logical axes."""
    abstract = mesh.abstract()
    return math.prod(shard_shape(shape, rules.spec(axes, abstract, shape), abstract))


@functools.lru_cache(maxsize=256)
def _kinds(config: DecoderConfig) -> tuple[tuple[BlockConfig, int], ...]:
    return tuple(Counter(config.blocks).items())


def without_stages(run: RunConfig, mesh: MeshSpec) -> tuple[RunConfig, MeshSpec]:
    """One pipeline stage as a run of its own, with that many layers, on the rest of the mesh."""
    stages = dict(mesh.axes).get("stage", 1)
    if stages == 1:
        return run, mesh
    layers = max(len(run.model.prefix) + 1, -(-run.model.layers // stages))
    rest = tuple((name, size) for name, size in mesh.axes if name != "stage") or (("data", 1),)
    return replace(run, model=_with_layers(run.model, layers)), MeshSpec(rest)


@functools.lru_cache(maxsize=1024)
def _with_layers(config: DecoderConfig, layers: int) -> DecoderConfig:
    return replace(config, layers=layers)


def check_remat(config: DecoderConfig) -> None:
    """Raises for remat policies, residual streams and layers without a formula.

    Raises:
        NotImplementedError: names what is supported.
    """
    if config.residual != "plain":
        raise NotImplementedError(f'model.residual = "{config.residual}": the cost model supports plain.')
    if config.remat not in get_args(Remat) and offloaded_share(config.remat) is None:
        legal = ", ".join((*get_args(Remat), "offload"))
        raise NotImplementedError(f'model.remat = "{config.remat}": the cost model supports {legal}, for all layers.')
    if not all(block.attention.has_keys for block in (*config.prefix, *config.pattern)):
        raise NotImplementedError(
            "a model with recurrent layers: the cost model supports attention; jaxllm compile has the memory and FLOPs."
        )
