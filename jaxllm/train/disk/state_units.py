"""State units: the parts in which a step streams optimizer state or parameters: one for each layer, one for the rest.

A state that is updated unit by unit is not one array for each leaf: it is in files (``state_files``), or in shards of
unequal size (``jaxllm.train.unequal.uneven_state``). Scalars of the state, such as step counters, stay in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxllm.checkpoint.offloaded_leaf import OffloadedLeaf
from jaxllm.config import ConfigError


class StateUnit(NamedTuple):
    """Unit of state that is read, updated and written as a whole.

    Attributes:
        segment: name of the segment of layers; empty: everything outside of layers.
        row: repeat of the segment's group.
    """

    segment: str
    row: int

    def __str__(self) -> str:
        return f"layers {self.segment}/{self.row}" if self.segment else "embedding and head"


class StateUnits(ABC):
    """Optimizer state, or parameters, as units that a step takes and gives back one after the other.

    Args:
        abstract: the optimizer state, or the parameters, as ``abstract_state`` has them in memory.
        setting: of the run that asks for it, for messages.
        field: "opt_state"; or "params", of which only layers are in units.

    Attributes:
        units: units of the state in the order of a pass: layers, then what is outside of them.
        kept: numbers of the leaves that stay as they are.

    Raises:
        ConfigError: the state is not one of layers.
    """

    def __init__(self, abstract: Any, setting: str, field: Literal["opt_state", "params"] = "opt_state"):
        self._leaves, self._structure = jax.tree.flatten_with_path(abstract)
        segments = [_segment_of(path) for path, _ in self._leaves]
        self.kept = [n for n, (_, x) in enumerate(self._leaves) if not (segments[n] if field == "params" else x.ndim)]
        streamed = [n for n in range(len(self._leaves)) if n not in self.kept]
        repeats: dict[str, int] = {}
        for n in streamed:
            path, leaf = self._leaves[n]
            if (segment := segments[n]) and repeats.setdefault(segment, leaf.shape[0]) != leaf.shape[0]:
                raise ConfigError(
                    f"{setting}: {field}{jax.tree_util.keystr(path)} is not stacked over the "
                    f"{repeats[segment]} layers of its segment; leave {setting} empty."
                )
        self.units = [StateUnit(s, row) for s, count in repeats.items() for row in range(count)]
        self.units += [StateUnit("", 0)] if any(not segments[n] for n in streamed) else []
        self._members = {s: [n for n in streamed if segments[n] == s] for s in (*repeats, "")}

    @abstractmethod
    def leaf(self, number: int) -> OffloadedLeaf:
        """Leaf in the place of the array that is this leaf of the tree."""

    @abstractmethod
    def begin(self, order: Sequence[int]) -> None:
        """Begins a pass.

        Args:
            order: numbers of the units that will be taken and given.
        """

    @abstractmethod
    def take(self, unit: int) -> Any:
        """Arrays of a unit, for the program that updates it."""

    @abstractmethod
    def give(self, unit: int, arrays: Any) -> None:
        """Takes the new arrays of a unit that was taken."""

    @abstractmethod
    def end(self) -> str:
        """Ends a pass; returns a line for the log, or an empty one."""

    def leaves(self) -> Any:
        """The state with ``OffloadedLeaf`` in the place of arrays in units, and the abstract leaves that are kept."""
        return self._structure.unflatten(
            [leaf if n in self.kept else self.leaf(n) for n, (_, leaf) in enumerate(self._leaves)]
        )

    def with_kept(self, values: Sequence[Any]) -> Any:
        """The state with these values of the leaves that stay in memory."""
        given = iter(values)
        leaves = jax.tree.leaves(self.leaves())
        return self._structure.unflatten([next(given) if n in self.kept else x for n, x in enumerate(leaves)])

    def kept_of(self, state: Any) -> list[Any]:
        """Leaves of a state that stay in memory, such as the scalars of an optimizer state."""
        return [leaf for n, leaf in enumerate(jax.tree.leaves(state)) if n in self.kept]

    def abstract_rows(self, segment: str) -> list[jax.ShapeDtypeStruct]:
        """Shapes and even shardings of the arrays of a unit, in the order of the tree; [1, ...] of a layer."""
        leaves = [self._leaves[n][1] for n in self._members.get(segment, [])]
        return [
            jax.ShapeDtypeStruct(
                (1, *x.shape[1:]) if segment else tuple(x.shape), np.dtype(x.dtype), sharding=x.sharding
            )
            for x in leaves
        ]

    def order(self, backwards: bool) -> list[int]:
        """Units in the order of a pass: layers forwards or backwards, then what is outside of them.

        When every other pass goes backwards, it begins with what a window of files still has.
        """
        layers = [n for n, unit in enumerate(self.units) if unit.segment]
        return (
            layers[::-1] * backwards + layers * (not backwards) + [n for n, u in enumerate(self.units) if not u.segment]
        )


def _segment_of(path: tuple[Any, ...]) -> str:
    keys = [str(getattr(key, "key", "")) for key in path]
    return keys[keys.index("segments") + 1] if "segments" in keys else ""
