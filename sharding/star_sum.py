"""Star sum: an all-reduce through one device, in two messages one after the other where a ring takes 2 (n - 1).

A ring sends n-ths of an array around n devices twice. Where a message takes long whatever its size, as between small
machines in a network, the number of messages one after the other counts: every device sends its whole array to the
first one, which adds them and sends the sum back (TPI-LLM, arXiv:2410.00531, section 3.2).

Legend: n devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def star_sum(x: Array, axis: str) -> Array:
    """Sum over a mesh axis of arrays that differ between its devices, in a manual computation (``jax.shard_map``).

    The devices' arrays are added in their order, so all of them get the same bits.

    Args:
        x: the device's array.
        axis: name of the mesh axis.
    """
    others = range(1, jax.lax.axis_size(axis))
    is_first = jax.lax.axis_index(axis) == 0
    total = x
    for other in others:
        total = total + jax.lax.ppermute(x, axis, [(other, 0)])
    # A device that nobody sends to gets zeros.
    found = jnp.where(is_first, total, jnp.zeros_like(x))
    for other in others:
        found = found + jax.lax.ppermute(total, axis, [(0, other)])
    return found


def star_seconds(size: float, devices: int, *, hop: float, link: float) -> float:
    """Seconds of a star sum: two messages one after the other; all of them share the first device's link.

    Args:
        size: bytes of the array.
        devices: n.
        hop: seconds of a message of no size.
        link: bytes/s of a device each way.
    """
    return 2 * (hop + (devices - 1) * size / link) if devices > 1 else 0.0


def ring_seconds(size: float, devices: int, *, hop: float, link: float) -> float:
    """Seconds of a ring's sum: reduce-scatter and all-gather, n - 1 messages of an n-th of the array each."""
    return 2 * (devices - 1) * (hop + size / devices / link)


def star_limit(devices: int, *, hop: float, link: float) -> int:
    """Most bytes whose star sum is no slower than a ring's: where latency rules (TPI-LLM, section 3.2).

    2 (hop + (n - 1) b / link) <= 2 (n - 1) (hop + b / n / link) up to b = (n - 2) n hop link / (n - 1)^2.
    """
    return int((devices - 2) * devices * hop * link / (devices - 1) ** 2) if devices > 2 else 0
