"""Saved activations of a pipeline stage: pools of slots for what F saves for B and W, and what B leaves for W.

An operation uses one slot of each pool, and only that slot goes through the branches of ``jax.lax.switch``: XLA would
copy a whole pool that does, and the TPU compiler cannot copy to the host in a branch.

Activation offload (PipeOffload, arXiv:2503.01328): of offloaded layers, the device holds the activations of the last F,
which are copied to the host during the next operation, and those that the next operation reads, which are copied back
during the one before. So every tick has one copy each way, whatever its operation. The copy to the host comes first:
with two copies in flight the GPU compiler would copy the whole host pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxllm.parallel.pipeline.schedule_table import ScheduleTable
from jaxllm.parallel.pipeline.slot_arrays import read_slot, write_slot, zeros, zeros_on_host
from jaxllm.parallel.pipeline.stage_split import SplitLayer

Values = list[Array]
"""One array for each value that a layer's F saves, or its B leaves for W; empty for no layers."""


Away = bool | Array
"""Whether the activations of an operation's chunk are offloaded; traced where that depends on the chunk."""


class ActivationSlot(NamedTuple):
    """Slot of one operation in an ``ActivationStore``, with L layers of a band.

    Attributes:
        kept: [L ...], activations on the device; F writes them. Empty where every chunk is offloaded.
        pending: [L ...], values for W; B writes them.
        left: [L ...], activations to be offloaded; F writes them. Empty where no chunk is offloaded.
        ready: [L ...], activations from the host; B and W read them.
    """

    kept: Values
    pending: Values
    left: Values
    ready: Values

    def saved(self, layer: Array, away: Away) -> Values:
        """Activations that F saved of one layer of the band."""
        if isinstance(away, bool):
            return [read_slot(v, layer) for v in (self.ready if away else self.kept)]
        both = zip(self.ready, self.kept, strict=True)
        return [jnp.where(away, read_slot(there, layer), read_slot(here, layer)) for there, here in both]

    def save(self, values: Sequence[Array], layer: Array, away: Away) -> ActivationSlot:
        """Slot with the activations that F saves of one layer of the band."""
        if isinstance(away, bool):
            pool = "left" if away else "kept"
            return self._replace(**{pool: _put(getattr(self, pool), values, layer)})
        # Of a chunk that is offloaded, the slot on the device is another one's, and stays what it is.
        kept = [jnp.where(away, read_slot(p, layer), v) for p, v in zip(self.kept, values, strict=True)]
        return self._replace(left=_put(self.left, values, layer), kept=_put(self.kept, kept, layer))


class ActivationStore(NamedTuple):
    """Saved activations of a band of L of one segment's layers on one device, between ticks.

    Attributes:
        kept: [slots L ...], activations on the device, from F for B and W, of chunks that stay.
        pending: [slots L ...], from B for W.
        host: [slots L ...], activations in host memory, from F for B and W, of chunks that are offloaded.
        left: [L ...], activations of the last F, to be copied to the host.
        ready: [L ...], activations for the next operation, copied from the host.
    """

    kept: Values
    pending: Values
    host: Values
    left: Values
    ready: Values

    @classmethod
    def empty(cls, layer: SplitLayer, table: ScheduleTable, layers: int, kept: bool, away: bool) -> ActivationStore:
        """Store of zeros for a band.

        Args:
            layer: of the segment.
            table: with slots for the band's chunks.
            layers: of the band.
            kept, away: whether activations of any chunk stay, and of any are offloaded.
        """
        stays, goes = (layer.saved if some else () for some in (kept, away))
        return cls(
            [zeros(v, table.saves, layers) for v in stays],
            [zeros(v, table.pendings, layers) for v in layer.pending],
            [zeros_on_host(v, table.hosted + 1, layers) for v in goes],
            [zeros(v, layers) for v in goes],
            [zeros(v, layers) for v in goes],
        )

    def open(self, cell: Mapping[str, Array]) -> tuple[ActivationSlot, ActivationStore, Values]:
        """Slot of an operation, the store during it, and the activations that are copied from the host meanwhile."""
        kept = [read_slot(v, cell["saved"]) for v in self.kept]
        pending = [read_slot(v, cell["pending"]) for v in self.pending]
        there = [jax.device_put(v, jax.memory.Space.Host) for v in self.left]
        host = _put(self.host, there, cell["out"])
        brought = [jax.device_put(read_slot(v, cell["back"]), jax.memory.Space.Device) for v in host]
        return ActivationSlot(kept, pending, self.left, self.ready), self._replace(host=host), brought

    def close(self, slot: ActivationSlot, brought: Values, cell: Mapping[str, Array]) -> ActivationStore:
        """Store after an operation whose slot is ``slot``."""
        return ActivationStore(
            _put(self.kept, slot.kept, cell["saved"]),
            _put(self.pending, slot.pending, cell["pending"]),
            self.host,
            slot.left,
            [jnp.where(cell["stays"], a, b) for a, b in zip(slot.left, brought, strict=True)],
        )


def _put(pool: Values, values: Sequence[Array], place: Array) -> Values:
    return [write_slot(p, v, place) for p, v in zip(pool, values, strict=True)]
