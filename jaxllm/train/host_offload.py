"""Optimizer offload and parameter offload: which parts of the train state wait in host memory between uses.

Part of the optimizer state may be persistent, which is ProTrain's word (arXiv:2406.08334, section 3.1) for chunks that
stay on the device: PatrickStar (arXiv:2108.05818) packs tensors into chunks of equal size and moves those that are
needed latest. An update needs all layers in turn, so a fixed part that stays moves as few bytes as any choice, but for
a layer's (``make proof offload ONLY=persistent_state_moves_least``). The arrays here are those of the state, stacked
over layers, and not packed: XLA plans the memory of the step, so that arrays of different sizes leave no gaps.

Activation offload is configured elsewhere: ``model.remat = "offload"``, and ``parallel.offload`` in a pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class HostConfig:
    """Optimizer and parameter offload: state of layers in host memory; embeddings and heads stay on the device.

    Attributes:
        optimizer: optimizer offload: the optimizer state, streamed layer by layer for the update
            (``jaxllm.optim.streamed_state``).
        persistent: share of a device's optimizer state of layers that is persistent, at least 0 and below 1: whole
            arrays, the largest first, as far as the share has room for them.
        device_every: one of so many layers is updated on the device, the others by the host's CPU at the same time; 1:
            all on the device. ``jaxllm.plan.interleave.fastest_interleave`` says which is fastest.
        params: parameter offload: the parameters, streamed layer by layer for each pass; for optimizers that update
            layer by layer (optim.kind = "lomo", "adalomo", "mezo").
    """

    optimizer: bool = False
    persistent: float = 0.0
    device_every: int = 1
    params: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.persistent < 1:
            raise ValueError(f"host: persistent = {self.persistent}; give a share, at least 0 and below 1.")
        if self.persistent and not self.optimizer:
            raise ValueError(
                f"host: persistent = {self.persistent} is of a state in host memory: set host.optimizer to true."
            )
        if self.persistent and self.device_every > 1:
            raise ValueError(
                f"host: persistent = {self.persistent} with device_every = {self.device_every}: the host's CPU updates "
                "a layer's state where it is, all of it; give persistent = 0 or device_every = 1."
            )
        if self.device_every < 1:
            raise ValueError(f"host: device_every = {self.device_every}; give 1 (all on the device) or more.")
        if self.device_every > 1 and not self.optimizer:
            raise ValueError(
                f"host: device_every = {self.device_every} requires optimizer offload: set host.optimizer to true."
            )

    def place(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        """Abstract parameters and optimizer state, with offloaded layers in host memory."""
        return (
            in_host_memory(params) if self.params else params,
            in_host_memory(opt_state, self.persistent) if self.optimizer else opt_state,
        )


def in_host_memory(tree: Any, persistent: float = 0.0) -> Any:
    """Abstract arrays, those of layers with shardings in host memory (``pinned_host``).

    Args:
        tree: abstract arrays with shardings.
        persistent: share of a device's bytes of layers that stays in device memory, see ``persistent_arrays``.
    """
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in found]
    layers = [
        number
        for number, (path, leaf) in enumerate(found)
        if leaf.ndim and any(getattr(key, "key", None) == "segments" for key in path)
    ]
    sizes = [math.prod(leaves[n].sharding.shard_shape(leaves[n].shape)) * leaves[n].dtype.itemsize for n in layers]
    stay = persistent_arrays(sizes, persistent)
    for number in (n for place, n in enumerate(layers) if place not in stay):
        leaf = leaves[number]
        there = leaf.sharding.with_memory_kind("pinned_host")
        leaves[number] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there)
    return structure.unflatten(leaves)


def persistent_arrays(sizes: Sequence[float], share: float) -> set[int]:
    """Numbers of the arrays that stay on the device: the largest first, each that still fits into the share of all.

    Args:
        sizes: bytes of the arrays.
        share: of their sum.
    """
    room, found = share * sum(sizes), set[int]()
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        if sizes[number] <= room:
            room -= sizes[number]
            found.add(number)
    return found


def host_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays in host memory, summed over all devices."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind == "pinned_host"]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
