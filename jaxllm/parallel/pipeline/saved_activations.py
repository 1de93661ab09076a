"""What F leaves for B and W, and B for W: pools of slots on the device, and for a part of the layers on the host.

An operation has one slot of each pool. Only that goes through the branches of the operations: XLA would copy a whole
pool that does, and the TPU compiler cannot copy to the host in a branch.

Of layers whose activations are offloaded (PipeOffload, arXiv:2503.01328), the device has what the last F left, which
goes out beside the next operation, and what the next operation takes, which comes in beside the one before. So there is
one copy each way with every tick, whatever it does. The one out is first: of two at a time, the GPU compiler would copy
the host's whole pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxllm.parallel.pipeline.schedule_table import ScheduleTable
from jaxllm.parallel.pipeline.slot_arrays import at, put, zeros, zeros_on_host
from jaxllm.parallel.pipeline.stage_split import SplitLayer

Values = list[Array]
"""An array for each value that a layer's F saves, or its B leaves; of no layers: none."""


class ActivationSlot(NamedTuple):
    """An operation's part of a ``ActivationStore``, see there. R layers, of which the first K are offloaded.

    Attributes:
        kept: [R-K ...], F fills it.
        pending: [R ...], B fills it.
        left: [K ...], F fills it.
        ready: [K ...], B and W take it.
    """

    kept: Values
    pending: Values
    left: Values
    ready: Values

    def saved(self, layer: Array, k: int, offloaded: bool) -> Values:
        """What F saved of one layer; of the first ``k`` if ``offloaded``."""
        return [at(v, layer) for v in self.ready] if offloaded else [at(v, layer - k) for v in self.kept]

    def save(self, values: Sequence[Array], layer: Array, k: int, offloaded: bool) -> ActivationSlot:
        """With what F saves of one layer."""
        if offloaded:
            return self._replace(left=_put(self.left, values, layer))
        return self._replace(kept=_put(self.kept, values, layer - k))


class ActivationStore(NamedTuple):
    """What one segment's layers have left on one device, between ticks.

    Attributes:
        kept: [slots R-K ...], from F for B and W.
        pending: [slots R ...], from B for W.
        host: [slots K ...] in the host's memory, as ``kept`` is.
        left: [K ...], of the last F.
        ready: [K ...], for the next operation.
    """

    kept: Values
    pending: Values
    host: Values
    left: Values
    ready: Values

    @classmethod
    def empty(cls, cut: SplitLayer, table: ScheduleTable, layers: int, offloaded: int) -> ActivationStore:
        """Of so many layers."""
        kept = cut.saved if offloaded < layers else ()
        away = cut.saved if offloaded else ()
        return cls(
            [zeros(v, table.saves, layers - offloaded) for v in kept],
            [zeros(v, table.pendings, layers) for v in cut.pending],
            [zeros_on_host(v, table.hosted + 1, offloaded) for v in away],
            [zeros(v, offloaded) for v in away],
            [zeros(v, offloaded) for v in away],
        )

    def open(self, cell: Mapping[str, Array]) -> tuple[ActivationSlot, ActivationStore, Values]:
        """Before an operation: its slot; then the store, and what comes from the host beside it."""
        kept = [at(v, cell["saved"]) for v in self.kept]
        pending = [at(v, cell["pending"]) for v in self.pending]
        there = [jax.device_put(v, jax.memory.Space.Host) for v in self.left]
        host = _put(self.host, there, cell["out"])
        brought = [jax.device_put(at(v, cell["back"]), jax.memory.Space.Device) for v in host]
        return ActivationSlot(kept, pending, self.left, self.ready), self._replace(host=host), brought

    def close(self, slot: ActivationSlot, brought: Values, cell: Mapping[str, Array]) -> ActivationStore:
        """After an operation."""
        return ActivationStore(
            _put(self.kept, slot.kept, cell["saved"]),
            _put(self.pending, slot.pending, cell["pending"]),
            self.host,
            slot.left,
            [jnp.where(cell["stays"], a, b) for a, b in zip(slot.left, brought, strict=True)],
        )


def _put(pool: Values, values: Sequence[Array], place: Array) -> Values:
    return [put(p, v, place) for p, v in zip(pool, values, strict=True)]
