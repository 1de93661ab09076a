"""Passing shards around a ring of TPUs inside a kernel, by remote DMA between pairs of buffers.

Of everything that travels a device has two buffers in HBM. During a step it reads one, sends that one into the other of
its right neighbour, and receives into its own other one. Nobody sends into a buffer before its owner has said that it
is free: at the first step that both neighbours are inside the kernel, later that the owner has read and sent on what
was in it. What follows travels one step behind: a step's buffer receives what the left neighbour added up in the step
before, and is added to in this one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.ring_attention.xla import Ring

_LEFT, _RIGHT = 0, 1


def neighbours(ring: Ring) -> Int[Array, "2"]:
    """Who sends to this device and who it sends to, by their places in the mesh, row by row."""
    mesh, mine = jax.sharding.get_abstract_mesh(), jax.lax.axis_index(ring.axis)
    place = jnp.zeros(2, jnp.int32)
    for name, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True):
        both = jnp.stack([mine - 1, mine + 1]) % size
        place = place * size + (both if name == ring.axis else jax.lax.axis_index(name))
    return place


def collective_id(ring: Ring) -> int:
    """One for each mesh axis: those who signal along one must not be heard along another."""
    return jax.sharding.get_abstract_mesh().axis_names.index(ring.axis)


def semaphores(travelling: Collection[str], following: Collection[str]) -> list[Any]:
    """The scratch of a kernel, for the last fields of ``Passing``."""
    one, other = pltpu.SemaphoreType.DMA((len(travelling),)), pltpu.SemaphoreType.DMA((max(len(following), 1),))
    return [one, one, one, other, other, pltpu.SemaphoreType.REGULAR, pltpu.SemaphoreType.REGULAR]


class Passing(NamedTuple):
    """The exchange of one step, inside a kernel whose grid runs over the steps.

    Attributes:
        refs: by name: ``neighbours``; of what travels ``own_NAME`` and NAME [2, ...]; of what follows NAME [2, ...].
        travelling, following: names.
        last: the last step, from 0; nothing is sent in it but what follows.
        moved_in, sent, arrived: copies of what travels.
        follower_sent, follower_arrived: of what follows.
        free, follower_free: how often the right neighbour's buffer has become free.
    """

    refs: dict[str, Any]
    travelling: tuple[str, ...]
    following: tuple[str, ...]
    last: int
    moved_in: Any
    sent: Any
    arrived: Any
    follower_sent: Any
    follower_arrived: Any
    free: Any
    follower_free: Any

    @property
    def step(self) -> Any:
        """From 0."""
        return pl.program_id(0)

    @property
    def slot(self) -> Any:
        """The buffer of this step."""
        return jax.lax.rem(self.step, 2)

    def move_in(self) -> None:
        """In the first step: the own shard into the first buffer, and nobody goes on before its neighbours are here."""

        @pl.when(self.step == 0)
        def _() -> None:
            own = [
                pltpu.make_async_copy(self.refs[f"own_{name}"], self.refs[name].at[0], self.moved_in.at[i])
                for i, name in enumerate(self.travelling)
            ]
            _start(own)
            if self.last:
                barrier = pltpu.get_barrier_semaphore()
                self._signal(barrier, _LEFT)
                self._signal(barrier, _RIGHT)
                pl.semaphore_wait(barrier, 2)
            _wait(own)

    def send(self) -> None:
        """Begins to pass on what travels, once there is room."""

        @pl.when(self.step < self.last)
        def _() -> None:
            @pl.when(self.step > 0)
            def _() -> None:
                pl.semaphore_wait(self.free, 1)

            _start(self._copies())

    def receive(self) -> None:
        """Ends it: the next step's shard is here, and this step's buffer is free."""

        @pl.when(self.step < self.last)
        def _() -> None:
            _wait(self._copies())

            @pl.when(self.step < self.last - 1)
            def _() -> None:
                self._signal(self.free, _LEFT)

    def send_follower(self) -> None:
        """Begins to pass on what was added up in the step before."""

        @pl.when(self.step > 0)
        def _() -> None:
            pl.semaphore_wait(self.follower_free, 1)
            _start(self._follower_copies())

    def receive_follower(self) -> None:
        """Ends it: the other buffer, unused in the first step, is free."""

        @pl.when(self.step > 0)
        def _() -> None:
            _wait(self._follower_copies())

        @pl.when(self.step < self.last)
        def _() -> None:
            self._signal(self.follower_free, _LEFT)

    def _signal(self, semaphore: Any, which: int) -> None:
        to = self.refs["neighbours"][which]
        pl.semaphore_signal(semaphore, 1, device_id=to, device_id_type=pl.DeviceIdType.LOGICAL)

    def _copies(self) -> list[Any]:
        here, there = self.slot, 1 - self.slot
        return [self._copy(n, here, there, self.sent.at[i], self.arrived.at[i]) for i, n in enumerate(self.travelling)]

    def _follower_copies(self) -> list[Any]:
        here, there = 1 - self.slot, self.slot
        semaphores = self.follower_sent, self.follower_arrived
        return [self._copy(n, here, there, *(s.at[i] for s in semaphores)) for i, n in enumerate(self.following)]

    def _copy(self, name: str, here: Any, there: Any, sent: Any, arrived: Any) -> Any:
        buffers, to = self.refs[name], self.refs["neighbours"][_RIGHT]
        return pltpu.make_async_remote_copy(
            buffers.at[here], buffers.at[there], sent, arrived, device_id=to, device_id_type=pl.DeviceIdType.LOGICAL
        )


def _start(copies: Iterable[Any]) -> None:
    for copy in copies:
        copy.start()


def _wait(copies: Iterable[Any]) -> None:
    for copy in copies:
        copy.wait()
