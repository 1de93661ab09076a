"""Pool devices: the devices of one part of an engine, and arrays of heads that go from one part's to the other's.

A program of the sending part cuts an array into what each receiving device needs (``cut_heads``), and ``carried``
copies each piece to its device, directly and asynchronously, so that nothing waits on the host. With equally many
shards of heads on both sides a piece is a shard, and devices send in pairs; otherwise each sender has all pieces, and
receivers take them from all senders in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array

import sharding


class PoolDevices:
    """Devices of one part of an engine.

    Args:
        devices: the devices.
        axis: mesh axis that they are along: "tensor" splits heads; "context" spreads pages, and each has all heads.
        rules: sharding rules of the part's programs.

    Attributes:
        devices, rules: as given.
        mesh: mesh of the devices; None for one.
        parts: shards of heads.
    """

    def __init__(self, devices: Sequence[Any], axis: str, rules: sharding.Rules):
        self.devices, self.rules = tuple(devices), rules
        several = len(self.devices) > 1
        self.mesh: Mesh | None = sharding.MeshSpec.parse(f"{axis}={len(devices)}").build(devices) if several else None
        self.parts = len(self.devices) if axis == "tensor" else 1
        self._shardings: dict[tuple[str | None, ...], jax.sharding.Sharding] = {}

    def on(self) -> Any:
        """Context manager: runs the body on the mesh."""
        return sharding.use_mesh(self.mesh)

    def sharding(self, *logical: str | None) -> jax.sharding.Sharding:
        """Sharding of an array with these logical axes on the devices."""
        if logical not in self._shardings:
            found: jax.sharding.Sharding = jax.sharding.SingleDeviceSharding(self.devices[0])
            if self.mesh is not None:
                with self.on(), sharding.use_rules(self.rules):
                    found = jax.NamedSharding(self.mesh, sharding.spec(*logical))
            self._shardings[logical] = found
        return self._shardings[logical]

    def source(self, number: int, receivers: int, pieces: int) -> tuple[int, int]:
        """(piece, sending device) that receiver ``number`` of so many takes, of an array that was cut into pieces.

        Args:
            pieces: shards of heads of the receivers.
        """
        part = number % pieces
        if pieces == self.parts and pieces > 1:
            return 0, part
        return part, number * len(self.devices) // receivers


def cut_heads(x: Array, sender: PoolDevices, receiver: PoolDevices, *logical: str | None) -> tuple[Array, ...]:
    """Pieces of an array for the devices of a receiver, on those of the sender, whose program this is called in.

    Args:
        x: array; its dimension of heads is split as they are, or is whole. Heads that are fewer than the receiver's
            shards are repeated.
        logical: logical axes of ``x``, all None but that of the heads.

    Returns:
        one array that is split as the receiver's is; or one for each shard of the receiver.
    """
    (axis,) = (i for i, name in enumerate(logical) if name is not None)
    pieces, heads = receiver.parts, x.shape[axis]
    if heads < pieces:
        x = sharding.constrain(x, *(None,) * x.ndim)
        shape = (*x.shape[: axis + 1], pieces // heads, *x.shape[axis + 1 :])
        x = jax.lax.broadcast_in_dim(x, shape, [i for i in range(x.ndim + 1) if i != axis + 1])
        x = x.reshape(*shape[:axis], pieces, *shape[axis + 2 :])
    if pieces == sender.parts:
        return (sharding.constrain(x, *logical),)
    x, size = sharding.constrain(x, *(None,) * x.ndim), x.shape[axis] // pieces
    return tuple(jax.lax.slice_in_dim(x, first, first + size, axis=axis) for first in range(0, pieces * size, size))


def carried(
    pieces: tuple[Any, ...], sender: PoolDevices, receiver: PoolDevices, *logical: str | None
) -> tuple[Array, int]:
    """The array whose pieces ``cut_heads`` has made, on the receiver's devices, and the bytes that travel.

    Args:
        logical: logical axes of the array.
    """
    (axis,) = (i for i, name in enumerate(logical) if name is not None)
    held = [{shard.device: shard.data for shard in piece.addressable_shards} for piece in pieces]
    many, sent = len(receiver.devices), []
    for number in range(many):
        piece, device = sender.source(number, many, receiver.parts)
        sent.append(held[piece][sender.devices[device]])
    shape = list(sent[0].shape)
    shape[axis] *= receiver.parts
    there = jax.device_put(sent, list(receiver.devices))
    place = receiver.sharding(*logical)
    return jax.make_array_from_single_device_arrays(tuple(shape), place, there), sum(x.nbytes for x in sent)
