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


class ActivationSlot(NamedTuple):
    """Slot of one operation in an ``ActivationStore``. R layers, of which the first K are offloaded.

    Attributes:
        kept: [R-K ...], activations on the device; F writes them.
        pending: [R ...], values for W; B writes them.
        left: [K ...], activations to be offloaded; F writes them.
        ready: [K ...], activations from the host; B and W read them.
    """

    kept: Values
    pending: Values
    left: Values
    ready: Values

    def saved(self, layer: Array, k: int, offloaded: bool) -> Values:
        """Activations that F saved of one layer; ``offloaded``: it is one of the first ``k``."""
        return [read_slot(v, layer) for v in self.ready] if offloaded else [read_slot(v, layer - k) for v in self.kept]

    def save(self, values: Sequence[Array], layer: Array, k: int, offloaded: bool) -> ActivationSlot:
        """Slot with the activations that F saves of one layer."""
        if offloaded:
            return self._replace(left=_put(self.left, values, layer))
        return self._replace(kept=_put(self.kept, values, layer - k))


class ActivationStore(NamedTuple):
    """Saved activations of one segment's layers on one device, between ticks.

    Attributes:
        kept: [slots R-K ...], activations on the device, from F for B and W.
        pending: [slots R ...], from B for W.
        host: [slots K ...], activations in host memory, from F for B and W.
        left: [K ...], activations of the last F, to be copied to the host.
        ready: [K ...], activations for the next operation, copied from the host.
    """

    kept: Values
    pending: Values
    host: Values
    left: Values
    ready: Values

    @classmethod
    def empty(cls, layer: SplitLayer, table: ScheduleTable, layers: int, offloaded: int) -> ActivationStore:
        """Store of zeros for so many layers, of which the first ``offloaded`` are offloaded."""
        kept = layer.saved if offloaded < layers else ()
        away = layer.saved if offloaded else ()
        return cls(
            [zeros(v, table.saves, layers - offloaded) for v in kept],
            [zeros(v, table.pendings, layers) for v in layer.pending],
            [zeros_on_host(v, table.hosted + 1, offloaded) for v in away],
            [zeros(v, offloaded) for v in away],
            [zeros(v, offloaded) for v in away],
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
