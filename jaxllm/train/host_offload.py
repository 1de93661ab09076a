"""What of a run's state waits in the host's memory while a device has no use for it.

Activations have their own place: ``model.remat = "offload"``, and ``parallel.offload`` in a pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

STREAMABLE = ("adamw", "lion", "adafactor", "sgd")
"""Rules whose state of a layer depends on that layer's gradients alone, and whose arrays are stacked as layers are."""


@dataclass(frozen=True)
class HostConfig:
    """What of layers is in the host's memory between uses; embeddings and heads stay on the device.

    Attributes:
        optimizer: the optimizer's state, brought layer by layer for the update (``jaxllm.optim.streamed_state``).
        device_every: of so many layers one is updated on the device and the others by the host's processor, at the same
            time; 1: all on the device. ``jaxllm.plan.interleave`` says which is fastest.
        params: parameters, brought layer by layer for each pass; of rules that move a layer where it is used
            (optim.kind = "lomo", "adalomo", "mezo").
    """

    optimizer: bool = False
    device_every: int = 1
    params: bool = False

    def __post_init__(self) -> None:
        if self.device_every < 1:
            raise ValueError(f"host: device_every = {self.device_every}; give 1 (all on the device) or more.")
        if self.device_every > 1 and not self.optimizer:
            raise ValueError(
                f"host: device_every = {self.device_every} is of an optimizer whose state is on the host: "
                "set host.optimizer to true."
            )

    def place(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        """Abstract parameters and optimizer state, those of layers in the host's memory."""
        return (
            in_host_memory(params) if self.params else params,
            in_host_memory(opt_state) if self.optimizer else opt_state,
        )


def in_host_memory(tree: Any) -> Any:
    """Abstract arrays, those of layers with shardings in the host's memory."""

    def there(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not (leaf.ndim and any(getattr(key, "key", None) == "segments" for key in path)):
            return leaf
        sharding = leaf.sharding.with_memory_kind("pinned_host")  # type: ignore[union-attr]
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map_with_path(there, tree)


def host_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays in the host's memory, of all devices together."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.sharding.memory_kind == "pinned_host"]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
