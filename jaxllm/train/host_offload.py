"""Optimizer offload and parameter offload: which parts of the train state wait in host memory between uses.

Activation offload is configured elsewhere: ``model.remat = "offload"``, and ``parallel.offload`` in a pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class HostConfig:
    """Optimizer and parameter offload: state of layers in host memory; embeddings and heads stay on the device.

    Attributes:
        optimizer: optimizer offload: the optimizer state, streamed layer by layer for the update
            (``jaxllm.optim.streamed_state``).
        device_every: one of so many layers is updated on the device, the others by the host's CPU at the same time; 1:
            all on the device. ``jaxllm.plan.interleave.fastest_interleave`` says which is fastest.
        params: parameter offload: the parameters, streamed layer by layer for each pass; for optimizers that update
            layer by layer (optim.kind = "lomo", "adalomo", "mezo").
    """

    optimizer: bool = False
    device_every: int = 1
    params: bool = False

    def __post_init__(self) -> None:
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
            in_host_memory(opt_state) if self.optimizer else opt_state,
        )


def in_host_memory(tree: Any) -> Any:
    """Abstract arrays, those of layers with shardings in host memory (``pinned_host``)."""

    def there(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not (leaf.ndim and any(getattr(key, "key", None) == "segments" for key in path)):
            return leaf
        sharding = leaf.sharding.with_memory_kind("pinned_host")  # type: ignore[union-attr]
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map_with_path(there, tree)


def host_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays in host memory, summed over all devices."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind == "pinned_host"]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
