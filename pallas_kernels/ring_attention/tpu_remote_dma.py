"""Remote DMA of shards around a ring of TPUs, inside a kernel, with double buffering.

For each rotating array (a shard's keys and values) a device has two buffers in HBM. During a step it reads one, sends
it into the other buffer of its right neighbour, and receives into its own other one. A device sends into a buffer only
after the owner has signalled that it is free: at the first step that both neighbours have entered the kernel, later
that the owner has read and sent on the buffer's contents. Accumulated arrays (gradients of keys and values) follow one
step behind: the current step's buffer receives what the left neighbour accumulated in the previous step, and is then
added to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.ring_attention.xla import RingConfig

_LEFT, _RIGHT = 0, 1


def neighbours(ring: RingConfig) -> Int[Array, "2 A"]:
    """Indices on the A mesh axes of the left neighbour (sender) and of the right neighbour (receiver) on the ring.

    All are said, though but one differs from the sender's: where a kernel asks for the others itself, jax 0.12 cannot
    lower it.
    """
    mine = ring.place()
    both = jax.lax.axis_index(ring.axis) - mine + jnp.stack([mine - 1, mine + 1]) % ring.shards
    names = jax.sharding.get_abstract_mesh().axis_names
    return jnp.stack([both if n == ring.axis else jnp.full(2, jax.lax.axis_index(n)) for n in names], axis=1)


def collective_id(ring: RingConfig) -> int:
    """Barrier id of a ring, one per mesh axis, so that signals along one axis are not received along another."""
    return jax.sharding.get_abstract_mesh().axis_names.index(ring.axis)


def semaphores(rotating: Collection[str], accumulated: Collection[str]) -> list[Any]:
    """Scratch semaphores of a kernel, for the last fields of ``RingExchange``."""
    one, other = pltpu.SemaphoreType.DMA((len(rotating),)), pltpu.SemaphoreType.DMA((max(len(accumulated), 1),))
    return [one, one, one, other, other, pltpu.SemaphoreType.REGULAR, pltpu.SemaphoreType.REGULAR]


class RingExchange(NamedTuple):
    """Remote DMA of one step of one core, inside a kernel whose grid runs over the cores of a device and the steps.

    A core sends its own part of the arrays, to the same core of the neighbour: each has semaphores of its own.

    Attributes:
        refs: by name: ``neighbours``; for each rotating array ``own_NAME`` and NAME [2, ...]; for each accumulated one
            NAME [2, ...]; of the core's part.
        rotating, accumulated: names of the arrays.
        last: index of the last step; only accumulated arrays are sent in it.
        loaded, sent, arrived: DMA semaphores of the rotating arrays.
        grads_sent, grads_arrived: DMA semaphores of the accumulated arrays.
        free, grads_free: semaphores that count how often the right neighbour's buffer has become free.
    """

    refs: dict[str, Any]
    rotating: tuple[str, ...]
    accumulated: tuple[str, ...]
    last: int
    loaded: Any
    sent: Any
    arrived: Any
    grads_sent: Any
    grads_arrived: Any
    free: Any
    grads_free: Any

    @property
    def step(self) -> Any:
        """Index of the step, from 0."""
        return pl.program_id(1)

    @property
    def slot(self) -> Any:
        """Index of this step's buffer."""
        return jax.lax.rem(self.step, 2)

    def load_own(self) -> None:
        """First step: copies the shard's own arrays into the first buffers and waits at a barrier with both
        neighbours.
        """

        @pl.when(self.step == 0)
        def _() -> None:
            own = [
                pltpu.make_async_copy(self.refs[f"own_{name}"], self.refs[name].at[0], self.loaded.at[i])
                for i, name in enumerate(self.rotating)
            ]
            _start(own)
            if self.last:
                barrier = pltpu.get_barrier_semaphore()
                self._signal(barrier, _LEFT)
                self._signal(barrier, _RIGHT)
                pl.semaphore_wait(barrier, 2)
            _wait(own)

    def send(self) -> None:
        """Starts to send the rotating arrays to the right neighbour, once its buffers are free."""

        @pl.when(self.step < self.last)
        def _() -> None:
            @pl.when(self.step > 0)
            def _() -> None:
                pl.semaphore_wait(self.free, 1)

            _start(self._copies())

    def receive(self) -> None:
        """Waits for the next step's arrays, and signals the left neighbour that this step's buffers are free."""

        @pl.when(self.step < self.last)
        def _() -> None:
            _wait(self._copies())

            @pl.when(self.step < self.last - 1)
            def _() -> None:
                self._signal(self.free, _LEFT)

    def send_grads(self) -> None:
        """Starts to send what was accumulated in the previous step."""

        @pl.when(self.step > 0)
        def _() -> None:
            pl.semaphore_wait(self.grads_free, 1)
            _start(self._grad_copies())

    def receive_grads(self) -> None:
        """Waits for the accumulated arrays, and signals that the other buffers are free; in the first step these are
        unused.
        """

        @pl.when(self.step > 0)
        def _() -> None:
            _wait(self._grad_copies())

        @pl.when(self.step < self.last)
        def _() -> None:
            self._signal(self.grads_free, _LEFT)

    def _signal(self, semaphore: Any, which: int) -> None:
        core = None if pl.num_programs(0) == 1 else pl.program_id(0)
        pl.semaphore_signal(semaphore, 1, device_id=self._address(which), core_index=core)

    def _copies(self) -> list[Any]:
        here, there = self.slot, 1 - self.slot
        return [self._copy(n, here, there, self.sent.at[i], self.arrived.at[i]) for i, n in enumerate(self.rotating)]

    def _grad_copies(self) -> list[Any]:
        here, there = 1 - self.slot, self.slot
        semaphores = self.grads_sent, self.grads_arrived
        return [self._copy(n, here, there, *(s.at[i] for s in semaphores)) for i, n in enumerate(self.accumulated)]

    def _copy(self, name: str, here: Any, there: Any, sent: Any, arrived: Any) -> Any:
        buffers, to = self.refs[name], self._address(_RIGHT)
        return pltpu.make_async_remote_copy(buffers.at[here], buffers.at[there], sent, arrived, device_id=to)

    def _address(self, which: int) -> dict[str | tuple[str, ...], Any]:
        neighbour = self.refs["neighbours"]
        return {name: neighbour[which, i] for i, name in enumerate(jax.sharding.get_abstract_mesh().axis_names)}


def _start(copies: Iterable[Any]) -> None:
    for copy in copies:
        copy.start()


def _wait(copies: Iterable[Any]) -> None:
    for copy in copies:
        copy.wait()
