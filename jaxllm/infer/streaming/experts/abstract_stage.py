"""Abstract expert stage: the programs of mixture layers with experts in slots, for a device that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxllm.infer.streaming.experts.expert_slots import ExpertSlots, empty_slots
from jaxllm.infer.streaming.experts.expert_stage import ExpertStage
from jaxllm.infer.streaming.layer_store import Unit


@dataclass(frozen=True)
class AbstractExperts:
    """Experts of one mixture layer, of one shape.

    Attributes:
        count: number of them.
        whole: shapes and formats of one expert, [1, ...].
    """

    count: int
    whole: Any

    def __len__(self) -> int:
        return self.count

    @property
    def shapes(self) -> tuple[Any]:
        """The experts, of which programs take the shapes."""
        return (self.whole,)


class AbstractExpertStage(ExpertStage):
    """Description of a stage's programs; it has no arrays and runs nothing.

    Args:
        experts: shapes of the experts of each mixture, [E, ...], by unit and block.
        slots: experts of each mixture on the device.
        place: sharding of the device.
    """

    def __init__(self, experts: Mapping[tuple[Unit, str], Any], slots: int, place: Any):
        self._place, self.looks_ahead, self._host, self.files = place, True, None, []
        self._experts = {key: _abstract(own) for key, own in experts.items()}
        self.slots = {key: ExpertSlots(len(own), slots) for key, own in self._experts.items()}
        self._buffers = {key: empty_slots(own.whole, slots, self._abstract) for key, own in self._experts.items()}


def _abstract(experts: Any) -> AbstractExperts:
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), experts)
    return AbstractExperts(jax.tree.leaves(experts)[0].shape[0], one)
