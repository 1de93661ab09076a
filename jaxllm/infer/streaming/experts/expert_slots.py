"""Expert slots: some experts of each mixture layer are on the device, the others wait on the host.

A layer has a stacked buffer of N experts and a table that says which expert is in which slot, so that nothing is
compiled when experts come and go (EdgeMoE, arXiv:2308.14352). Which expert leaves is decided by when it was last used,
or by the router's scores of the last steps (HybriMoE, arXiv:2504.05897).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float, Int

Eviction = Literal["lru", "score"]
LookAhead = Literal["router", "statistics", "none"]
LOOK_AHEAD: tuple[LookAhead, ...] = ("router", "statistics", "none")
DECAY = 0.9
"""Weight of the former score of an expert against the router's share in a step."""


@dataclass
class SlotCounts:
    """Counts of the slots of all layers.

    Attributes:
        wanted: experts that tokens of a step were routed to, by layer and step.
        hits: of them, those that were in a slot.
        loads: experts that were copied to the device.
        load_bytes: their bytes.
        rounds: passes over slots in which experts computed; one a layer and step if the slots suffice.
        on_host: experts that the host's processor computed.
        failures: experts that could not be read from their files.
        predicted: experts that were loaded ahead of their use.
        predicted_hits: of them, those that the next step of that layer wanted.
    """

    wanted: int = 0
    hits: int = 0
    loads: int = 0
    load_bytes: int = 0
    rounds: int = 0
    on_host: int = 0
    failures: int = 0
    predicted: int = 0
    predicted_hits: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of wanted experts that were in a slot."""
        return self.hits / self.wanted if self.wanted else 0.0


class ExpertSlots:
    """Slots of one layer.

    Args:
        experts: number of experts of the layer.
        slots: number of slots, at most that.
        eviction: who leaves: "lru", the expert that was used longest ago; "score", the one with the lowest mean of the
            router's shares, of late steps more than of earlier ones.

    Attributes:
        table: int32[E], slot of each expert; ``slots`` for those that are in none.
    """

    def __init__(self, experts: int, slots: int, eviction: Eviction = "lru"):
        if not 1 <= slots <= experts:
            raise ValueError(f"expert slots = {slots}; give 1 to {experts}, the number of experts.")
        if eviction not in ("lru", "score"):
            raise ValueError(f"eviction of experts = {eviction!r}; legal: 'lru', 'score'.")
        self.slots, self.eviction = slots, eviction
        self.table = np.full(experts, slots, np.int32)
        self._expert: list[int | None] = [None] * slots
        self._used, self._time = np.zeros(experts, np.int64), 0
        self._scores = np.zeros(experts)

    def see(self, shares: Float[np.ndarray, " E"]) -> None:
        """Takes note of the router's mean share of each expert in a step, for the scores."""
        self._scores = DECAY * self._scores + (1 - DECAY) * shares

    def has(self, expert: int) -> bool:
        """Whether an expert is in a slot."""
        return bool(self.table[expert] < self.slots)

    @property
    def free(self) -> int:
        """Number of slots that no expert has had yet."""
        return self._expert.count(None)

    @property
    def first(self) -> int | None:
        """The expert in the first slot."""
        return self._expert[0]

    def rounds(self, wanted: Sequence[int]) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        """Rounds in which wanted experts compute: those that are there first, then as many as fit at a time.

        The slots and the table change when the next round is taken: use the table of each before.

        Yields:
            the experts of a round, and (expert, slot) of those that have to be loaded for it.
        """
        if here := [expert for expert in wanted if self.has(expert)]:
            self._use(here)
            yield here, []
        left = [expert for expert in wanted if expert not in here]
        while left:
            some, left = left[: self.slots], left[self.slots :]
            loads = [(expert, self._place(expert, keep=some)) for expert in some]
            self._use(some)
            yield some, loads

    def ahead(self, expert: int, keep: Sequence[int]) -> int | None:
        """Slot for an expert that is loaded before it is wanted; None: it is there, or all slots hold ``keep``."""
        if self.has(expert) or (None not in self._expert and all(e in keep for e in self._expert)):
            return None
        return self._place(expert, keep=[*keep, expert])

    def forget(self, expert: int) -> None:
        """Frees the slot of an expert that has not come."""
        self._expert[int(self.table[expert])] = None
        self.table[expert] = self.slots

    def _use(self, experts: Sequence[int]) -> None:
        self._time += 1
        self._used[list(experts)] = self._time

    def _place(self, expert: int, keep: Sequence[int]) -> int:
        """Gives an expert a slot: a free one, or that of the one that leaves."""
        if None in self._expert:
            slot = self._expert.index(None)
        else:
            by = self._used if self.eviction == "lru" else self._scores
            leaving = min((e for e in self._expert if e is not None and e not in keep), key=lambda e: (by[e], e))
            slot = int(self.table[leaving])
            self.table[leaving] = self.slots
        self._expert[slot], self.table[expert] = expert, slot
        return slot


def wanted_experts(experts: Int[np.ndarray, "T A"], tokens: int, count: int) -> list[int]:
    """Experts that the first tokens of a flat batch were routed to, most of them first.

    Args:
        experts: of each token; ``count`` where one has weight 0.
        tokens: number of first tokens.
        count: E, number of experts.
    """
    found, many = np.unique(experts[:tokens], return_counts=True)
    return [int(expert) for expert in found[np.argsort(-many, kind="stable")] if expert < count]


def empty_slots(expert: Any, slots: int, make: Callable[[tuple[int, ...], Any], Any]) -> Any:
    """Buffer of a layer with ``slots`` experts like this one, made by ``make(shape, dtype)`` for each array."""
    return jax.tree.map(lambda x: make((slots, *x.shape[1:]), x.dtype), expert)
