"""What a device has and does in a step, by formula: weights, products, bytes through memory.

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

from jaxllm.models import BlockConfig, DecoderConfig, Functional, MlpConfig, MoeConfig, functional
from jaxllm.models.remat import offloaded_share
from jaxllm.optim.matrix_params import STREAM_AXES
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.parallel.pipeline.stage_split import Remat
from jaxllm.train import RunConfig
from jaxllm.train.model_flops import causal_mean
from sharding import LogicalAxes, MeshSpec, Rules


@dataclass(frozen=True)
class Weight:
    """One parameter, all layers of it stacked; numbers are those of one layer on one device.

    Attributes:
        name: its path.
        layers: how many of them a device has.
        shape: of all of them, as they lie on a device between steps.
        stored: numbers as it lies between steps.
        used: numbers while it is used, gathered.
        sides: of a matrix as it is used: width on the residual stream's side, and on the other.
        share: of a device's tokens that meet it: top_k / experts of an expert, summed over the device's experts.
        matrix: whether products use it.
        expert: whether it is an expert's.
    """

    name: str
    layers: int
    shape: tuple[int, ...]
    stored: int
    used: int
    sides: tuple[int, int]
    share: float
    matrix: bool
    expert: bool


@dataclass(frozen=True)
class Work:
    """A run on a mesh, as one device sees it.

    Attributes:
        run: the run.
        mesh: its sizes, none open.
        weights: of a device; of a pipeline's stage.
        tokens: of a micro-batch.
        residual_tokens: of them, those of the residual stream that a device has, where that is split further.
        row: length of a row.
        tensor: parts of heads and widths.
        stages: of the pipeline; 1 without.
        micro_batches: of a step.
    """

    run: RunConfig
    mesh: MeshSpec
    weights: tuple[Weight, ...]
    tokens: int
    residual_tokens: int
    row: int
    tensor: int
    stages: int
    micro_batches: int

    @classmethod
    def of(cls, run: RunConfig, mesh: MeshSpec) -> Work:
        """Of a run whose mesh is legal."""
        check_remat(run.model)
        sizes = dict(mesh.axes)
        stages = sizes.get("stage", 1)
        rules = rules_of(run.parallel)
        weights = _weights(architecture(run.model), rules, mesh)
        shape = (run.data.batch_size // run.accumulate, run.data.seq_len)
        count = lambda *axes: _local(rules, mesh, axes, shape)  # noqa: E731
        return cls(
            run,
            mesh,
            weights,
            count("batch", "seq"),
            count("batch", "residual_seq"),
            run.data.seq_len,
            sizes.get("tensor", 1),
            stages,
            run.accumulate,
        )

    @property
    def width(self) -> int:
        """Bytes of a number in compute dtype."""
        return jnp.dtype(self.run.model.dtype).itemsize

    @property
    def blocks(self) -> dict[BlockConfig, float]:
        """The kinds of block, and how many of each a device has."""
        return {block: count / self.stages for block, count in _kinds(self.run.model)}

    def stream_bytes(self) -> int:
        """The residual stream of a micro-batch."""
        return self.residual_tokens * self.run.model.embed_dim * self.width

    def inner_widths(self, block: BlockConfig) -> dict[str, float]:
        """Widths of a block's inner values, of a token on one device: heads and feed-forward are split over tensor."""
        attention = block.attention
        heads = attention.heads
        keys = getattr(attention, "head_dim", None) or attention.nope_dim + attention.rope_dim  # type: ignore[union-attr]
        values = getattr(attention, "head_dim", None) or attention.value_dim  # type: ignore[union-attr]
        kv_heads = max(getattr(attention, "kv_heads", heads), self.tensor)
        widths = {"q": heads * keys, "k": kv_heads * keys, "v": kv_heads * values, "out": heads * values}
        if isinstance(block.mlp, MoeConfig):
            widths |= {"expert": block.mlp.top_k * block.mlp.hidden, "sent": block.mlp.top_k * self.run.model.embed_dim}
            widths |= {"up": block.mlp.shared, "gate": block.mlp.shared}
        else:
            widths |= {"up": block.mlp.hidden, "gate": block.mlp.hidden if block.mlp.gated else 0}
        return {name: width if name == "sent" else width / self.tensor for name, width in widths.items()}

    def attended(self, block: BlockConfig) -> float:
        """Products of a token with those it attends to, on one device."""
        return block.attention.attention_macs * causal_mean(self.row, block.attention.window) / self.tensor


class Leaf(NamedTuple):
    """A parameter as it is declared."""

    name: str
    shape: tuple[int, ...]
    axes: LogicalAxes
    matrix: bool


@functools.lru_cache(maxsize=64)
def cached_model(config: DecoderConfig, rules: Rules) -> Functional:
    """The model of a plan's rules."""
    return functional(config, rules)


@functools.lru_cache(maxsize=256)
def rules_of(parallel: ParallelConfig) -> Rules:
    """The sharding table of a plan."""
    return parallel.rules()


@functools.lru_cache(maxsize=64)
def leaves_of(config: DecoderConfig) -> tuple[Leaf, ...]:
    """All parameters of a model."""
    model = functional(config)
    logical = jax.tree.leaves(model.logical_axes(), is_leaf=lambda leaf: isinstance(leaf, tuple))
    matrices = jax.tree.leaves(model.matrices())
    found = jax.tree_util.tree_leaves_with_path(model.abstract())
    return tuple(
        Leaf(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape, axes, matrix)
        for (path, leaf), axes, matrix in zip(found, logical, matrices, strict=True)
    )


def architecture(config: DecoderConfig) -> DecoderConfig:
    """The model without what is only about how it runs: the key of what is computed once."""
    return replace(config, remat="full", unroll=1)


@functools.lru_cache(maxsize=4096)
def _weights(config: DecoderConfig, rules: Rules, mesh: MeshSpec) -> tuple[Weight, ...]:
    stages, abstract = dict(mesh.axes).get("stage", 1), mesh.abstract()
    return tuple(_weight(config, rules, abstract, stages, *leaf) for leaf in leaves_of(config))


def _weight(
    config: DecoderConfig,
    rules: Rules,
    mesh: AbstractMesh,
    stages: int,
    name: str,
    shape: tuple[int, ...],
    axes: LogicalAxes,
    matrix: bool,
) -> Weight:
    stored = _part(shape, rules.spec(axes, mesh, shape), mesh)
    used = _part(shape, rules.spec(axes, mesh, shape, gathered=True), mesh)
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
    share = 1.0
    if expert and "segments" in name:
        _, segment, place, *_ = name.split("/")
        mlp = config.segments[int(segment)][0][int(place)].mlp
        assert isinstance(mlp, MoeConfig)
        share = mlp.top_k * _ways(mesh, rules.mesh_axes("experts")) / mlp.experts
    per_layer = whole // first if of_layers and in_place else whole // max(1, layers)
    return Weight(
        name,
        layers,
        stored,
        per_layer,
        math.prod(one),
        (one[stream] if one else 1, math.prod(others)),
        share,
        matrix,
        expert,
    )


def _part(shape: tuple[int, ...], spec: Any, mesh: AbstractMesh) -> tuple[int, ...]:
    """Shape of a device's part."""
    out = []
    for size, split in zip(shape, spec, strict=True):
        names = () if split is None else (split,) if isinstance(split, str) else split
        out.append(-(-size // math.prod(mesh.shape[name] for name in names)))
    return tuple(out)


def _ways(mesh: AbstractMesh, names: tuple[str, ...]) -> int:
    return math.prod(mesh.shape.get(name, 1) for name in names)


def _local(rules: Rules, mesh: MeshSpec, axes: tuple[str, ...], shape: tuple[int, ...]) -> int:
    abstract = mesh.abstract()
    return math.prod(_part(shape, rules.spec(axes, abstract, shape), abstract))


@functools.lru_cache(maxsize=256)
def _kinds(config: DecoderConfig) -> tuple[tuple[BlockConfig, int], ...]:
    return tuple(Counter(config.blocks).items())


def without_stages(run: RunConfig, mesh: MeshSpec) -> tuple[RunConfig, MeshSpec]:
    """One stage of a pipeline as a run of its own, of as many layers, on the rest of the mesh."""
    stages = dict(mesh.axes).get("stage", 1)
    if stages == 1:
        return run, mesh
    layers = max(len(run.model.prefix) + 1, -(-run.model.layers // stages))
    rest = tuple((name, size) for name, size in mesh.axes if name != "stage") or (("data", 1),)
    return replace(run, model=replace(run.model, layers=layers)), MeshSpec(rest)


def check_remat(config: DecoderConfig) -> None:
    """Refuses what no formula is of.

    Raises:
        NotImplementedError: says what there is.
    """
    if config.remat not in get_args(Remat) and offloaded_share(config.remat) is None:
        legal = ", ".join((*get_args(Remat), "offload"))
        raise NotImplementedError(f'model.remat = "{config.remat}": plans have formulas for {legal}, of all layers.')


def gated(block: BlockConfig) -> bool:
    """Whether a feed-forward layer has a gate."""
    return not isinstance(block.mlp, MlpConfig) or block.mlp.gated
