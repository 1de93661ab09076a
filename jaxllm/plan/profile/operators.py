"""Operators of a training step: parts of the model at a device's shapes, and collectives by kind, bytes and devices.

The unit is a group of layers, as vTrain profiles it (arXiv:2312.12391, section III-B): its forward pass, its backward
pass with what remat recomputes, the embedding, the loss with both its passes, the sum of gradients of micro-batches,
the update. Tensor parallelism leaves a device a model with fewer heads, a narrower feed-forward layer and a part of the
vocabulary; its collectives are operators of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxllm.config import to_dict
from jaxllm.models import BlockConfig, DecoderConfig
from jaxllm.optim import OptimConfig
from sharding import MeshSpec

Pass = Literal["forward", "backward", "input gradients", "embedding", "embedding gradients", "loss"]
REPEATS = 4
"""Groups of layers that are measured in one scan, as a step runs them."""
Group = tuple[tuple[int, int], ...]
"""Devices of a collective, as (size, stride) from the outermost to the innermost: ((4, 2),) is devices 0, 2, 4, 6."""


@dataclass(frozen=True)
class ModelPass:
    """Pass over one group of layers, the embedding or the loss, on one device.

    Attributes:
        kind: which pass.
        model: the device's model, with the measured layers alone (``REPEATS`` groups).
        rows: rows of a micro-batch on the device.
        seq_len: tokens of a row.
        z_loss: weight of the z-loss.
    """

    kind: Pass
    model: DecoderConfig
    rows: int
    seq_len: int
    z_loss: float = 0.0

    @property
    def of_layers(self) -> bool:
        """Whether the pass is over layers."""
        return self.kind in ("forward", "backward", "input gradients")

    @functools.cached_property
    def key(self) -> str:
        """Name in a profile."""
        model = self.model
        if self.of_layers:
            said = "; ".join(_of_block(block) for block in model.pattern) + f"; remat {model.remat}"
        else:
            said = f"vocabulary {model.vocab_size}"
        whole = json.dumps([to_dict(model), self.z_loss], sort_keys=True)
        return (
            f"{self.kind}: {self.rows} x {self.seq_len} tokens, width {model.embed_dim}, {said}, {model.dtype} "
            f"#{_digest(whole)}"
        )


@dataclass(frozen=True)
class PipelineTick:
    """Tick of a pipeline's executor on one device, on average over its operations, with saved activations in slots.

    Attributes:
        model: the device's model, with the layers of one virtual stage.
        rows: rows of a micro-batch on the device.
        seq_len: tokens of a row.
        split: whether weight gradients are operations of their own.
    """

    model: DecoderConfig
    rows: int
    seq_len: int
    split: bool

    @functools.cached_property
    def key(self) -> str:
        """Name in a profile."""
        model, kinds = self.model, "F, B, W" if self.split else "F, B"
        whole = json.dumps(to_dict(model), sort_keys=True)
        said = "; ".join(map(_of_block, model.pattern))
        return (
            f"tick ({kinds}): {self.rows} x {self.seq_len} tokens, width {model.embed_dim}, {model.layers} layers of "
            f"{said}; remat {model.remat}, vocabulary {model.vocab_size}, {model.dtype} #{_digest(whole)}"
        )


@dataclass(frozen=True)
class GradientSum:
    """Sum of the gradients of two micro-batches.

    Attributes:
        elements: of a device.
        dtype: of the gradients.
    """

    elements: int
    dtype: str

    @property
    def key(self) -> str:
        """Name in a profile."""
        return f"sum of gradients: {self.elements} {self.dtype}"


@dataclass(frozen=True)
class ParameterUpdate:
    """Update of a device's parameters by the optimizer, with the norms that a step reports.

    Attributes:
        model: architecture, whose parameters they are.
        optim: the optimizer.
        steps: of the run, for its schedule.
        shapes: of the device's part of each parameter, in the order of the tree.
    """

    model: DecoderConfig
    optim: OptimConfig
    steps: int
    shapes: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def key(self) -> str:
        """Name in a profile."""
        whole = json.dumps([to_dict(self.optim), self.shapes], sort_keys=True)
        elements = sum(map(math.prod, self.shapes))
        return f"update: {self.optim.kind} of {elements} {self.model.param_dtype} #{_digest(whole)}"


@dataclass(frozen=True)
class CollectiveOperator:
    """Collective over devices.

    Attributes:
        kind: XLA's name, such as ``all-gather``.
        group: devices that take part.
        bytes: of the full (gathered or summed) array.
        dtype: of its elements.
    """

    kind: str
    group: Group
    bytes: int
    dtype: str

    @property
    def series(self) -> str:
        """Name in a profile without the bytes, between which times are interpolated."""
        over = " x ".join(f"{size} by {stride}" for size, stride in self.group)
        return f"{self.kind} over {over} devices, {self.dtype}"

    @property
    def key(self) -> str:
        """Name in a profile."""
        return f"{self.series}: {self.bytes}"

    @property
    def devices(self) -> int:
        """Number of consecutive devices that one group lies in."""
        return math.prod(self.group[0])


Operator = ModelPass | PipelineTick | GradientSum | ParameterUpdate | CollectiveOperator


def group_of(mesh: MeshSpec, axes: Sequence[str]) -> Group:
    """Devices of a collective over mesh axes: axes that are neighbours in the mesh are one."""
    stride, found = 1, []
    for name, size in reversed(mesh.axes):
        if name in axes and size > 1:
            if found and found[-1][0] * found[-1][1] == stride:
                found[-1] = found[-1][0] * size, found[-1][1]
            else:
                found.append((size, stride))
        stride *= size
    return tuple(reversed(found))


def device_model(config: DecoderConfig, tensor: int) -> DecoderConfig:
    """Model of a device whose heads, width of feed-forward layers and vocabulary are split over ``tensor`` devices.

    Raises:
        NotImplementedError: a layer has no such part of the same kind.
    """
    if tensor == 1:
        return config
    split = functools.partial(_split_block, tensor=tensor)
    return dataclasses.replace(
        config,
        prefix=tuple(map(split, config.prefix)),
        pattern=tuple(map(split, config.pattern)),
        vocab_size=-(-config.vocab_size // tensor),
    )


def layers_alone(config: DecoderConfig, group: tuple[BlockConfig, ...]) -> DecoderConfig:
    """Model of ``REPEATS`` times a group of layers, with as small a vocabulary as there is."""
    return dataclasses.replace(config, prefix=(), pattern=group, layers=REPEATS * len(group), vocab_size=1, tied=True)


def ends_alone(config: DecoderConfig) -> DecoderConfig:
    """Model of the embedding and the head, with one layer that is not measured."""
    return dataclasses.replace(config, prefix=(), pattern=(BlockConfig(),), layers=1, remat="none")


def _split_block(block: BlockConfig, tensor: int) -> BlockConfig:
    attention, mlp = block.attention, block.mlp
    if attention.kv_spec.latent or mlp.mixture is not None or block.norms != "pre":
        raise NotImplementedError(
            "profile: latent attention, experts and norms after a layer have no operators split over tensor yet: "
            "choose meshes without it."
        )
    return dataclasses.replace(
        block,
        attention=dataclasses.replace(
            attention, heads=attention.heads // tensor, kv_heads=max(1, attention.kv_heads // tensor)
        ),
        mlp=dataclasses.replace(mlp, hidden=mlp.hidden // tensor),
    )


def _of_block(block: BlockConfig) -> str:
    attention, mlp = block.attention, block.mlp
    inner = f"mlp {mlp.hidden}" if mlp.mixture is None else f"{mlp.mixture.experts} experts"
    return f"heads {attention.heads}/{attention.kv_heads}, {inner}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
