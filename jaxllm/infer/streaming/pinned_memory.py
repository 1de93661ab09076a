"""Pinned memory: host memory whose pages stay where they are, so that an accelerator copies from it by itself.

Copies from other host memory go through a pinned buffer first, and keep a processor at work meanwhile.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax

PINNED, ON_DEVICE = "pinned_host", "device"


def can_pin(device: jax.Device) -> bool:
    """Whether a device has pinned memory besides its own; a CPU's arrays are in host memory anyway."""
    return device.platform != "cpu" and has_kinds(device)


def has_kinds(device: jax.Device) -> bool:
    """Whether a device has both kinds of memory."""
    return {PINNED, ON_DEVICE} <= {memory.kind for memory in device.addressable_memories()}


def pinned(tree: Any, device: jax.Device) -> Any:
    """A tree's arrays in pinned memory of a device, when they are there.

    Where that is used up they stay where they are, with a warning: copies from there take longer.
    """
    place = jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED)
    try:
        return jax.block_until_ready(jax.device_put(tree, place))
    except jax.errors.JaxRuntimeError as error:  # RESOURCE_EXHAUSTED
        warnings.warn(
            f"pinned host memory is used up ({error}); other layers or experts are copied from ordinary memory, which "
            "takes longer. XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, set before the start, is its limit in GiB; so is "
            "`ulimit -l`.",
            stacklevel=2,
        )
        return tree


def on_device(tree: Any, device: jax.Device) -> Any:
    """A tree's arrays in the memory of a device, copied from its pinned memory."""
    return jax.device_put(tree, jax.sharding.SingleDeviceSharding(device, memory_kind=ON_DEVICE))
