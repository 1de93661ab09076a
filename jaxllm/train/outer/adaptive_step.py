"""Adaptive step: a training step whose compression is re-chosen from measured errors (``jaxllm.train.outer.lgreco``).

    every ``grads.every`` steps    errors of this batch's gradients -> a choice of ranks -> the program of that choice

Another choice is another compiled program; there are at most ``grads.programs`` of them in a run. Once there are as
many, the cheapest of them is taken that is within the error budget, or the most exact. The choices are arrays of the
train state, so a resumed run goes on with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.train.outer.lgreco import RANKS, candidates, fewest_bytes, layer_bytes, layers_of, rank_errors
from jaxllm.train.step.train_state import TrainState

Choice = tuple[tuple[int, ...], ...]
"""Ranks of the layers of each parameter; () for one without matrices."""
ROUNDING = 1 + 1e-6
"""Room for the rounding of sums of squared errors."""
NONE = -1
"""In arrays: no choice yet."""


def no_choices(params: Any, programs: int) -> dict[str, jax.Array]:
    """State of choices before the first: ``choices`` Int[programs layers], all ``NONE``, and the number of the current.

    Args:
        params: of the run.
        programs: most choices.
    """
    layers = sum(layers_of(leaf.shape) for leaf in jax.tree.leaves(params) if candidates(leaf.shape))
    return {"choices": jnp.full((programs, layers), NONE, jnp.int32), "current": jnp.full((), NONE, jnp.int32)}


@dataclass(frozen=True)
class Layers:
    """Layers of a model's parameters as the solver sees them.

    Attributes:
        params: shapes and shardings of the parameters, in order.
        names: paths of the parameters.
    """

    params: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, params: Any) -> Layers:
        """Layers of a tree of abstract parameters."""
        leaves = jax.tree_util.tree_leaves_with_path(params)
        names = tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves)
        return cls(tuple(leaf for _, leaf in leaves), names)

    def chosen(self, row: Sequence[int]) -> Choice:
        """Choice of a row of ranks of all layers."""
        rest = iter(int(rank) for rank in row)
        counts = (layers_of(leaf.shape) if candidates(leaf.shape) else 0 for leaf in self.params)
        return tuple(tuple(next(rest) for _ in range(count)) for count in counts)

    def options(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Candidates of each layer, and their bytes."""
        ranks, sizes = [], []
        for leaf in self.params:
            if found := candidates(leaf.shape):
                ranks += [found] * layers_of(leaf.shape)
                sizes += [layer_bytes(leaf)] * layers_of(leaf.shape)
        return ranks, sizes

    def described(self, choice: Choice) -> dict[str, list[int]]:
        """Ranks of the layers by parameter, for a file; 0: sent whole."""
        return {name: list(ranks) for name, ranks in zip(self.names, choice, strict=True) if ranks}


def best_row(
    layers: Layers, errors: Mapping[str, np.ndarray], budget: float, known: Sequence[tuple[int, ...]], programs: int
) -> tuple[int, ...]:
    """Ranks of all layers for measured errors.

    Args:
        layers: of the model.
        errors: squared errors by number of the parameter (``rank_errors``), and ``energy``: of all its matrices.
        budget: relative error of all matrices together.
        known: choices so far.
        programs: most choices.
    """
    ranks, sizes = layers.options()
    own = [row for number in range(len(layers.params)) if str(number) in errors for row in errors[str(number)]]
    allowed = budget**2 * float(errors["energy"])

    def cost(row: tuple[int, ...]) -> tuple[bool, float, float]:
        """Rows within the budget first, by bytes; then the others, by error."""
        places = [ranks[layer].index(rank) for layer, rank in enumerate(row)]
        error = sum(float(own[layer][place]) for layer, place in enumerate(places))
        sent = sum(sizes[layer][place] for layer, place in enumerate(places))
        return (False, sent, error) if error <= allowed * ROUNDING else (True, error, sent)

    solved = tuple(ranks[layer][option] for layer, option in enumerate(fewest_bytes(own, sizes, allowed)))
    # The solver rounds errors up; where one rank for all is just within the budget, it may be cheaper.
    uniform = [tuple(rank if rank in found else found[-2] for found in ranks) for rank in RANKS]
    row = min(solved, *uniform, key=cost)
    return row if row in known or len(known) < programs else min(known, key=cost)


def measured_errors(gradients: Any) -> dict[str, jax.Array]:
    """Squared errors of low ranks of a gradient, by number of the parameter, and ``energy``, their sum at rank 0.

    Args:
        gradients: of all devices together.
    """
    found: dict[str, jax.Array] = {}
    energy = jnp.zeros(())
    for number, leaf in enumerate(jax.tree.leaves(gradients)):
        if candidates(leaf.shape):
            found[str(number)] = rank_errors(leaf)
            energy += jnp.sum(jnp.square(leaf.astype(found[str(number)].dtype)))
    return {**found, "energy": energy}


class AdaptiveStep:
    """Training step that chooses its program from measured errors.

    Args:
        layers: of the model.
        compiled: ``choice -> compiled step``.
        measure: compiled ``(state, batch) -> squared errors``, see ``measured_errors``.
        name: of the link's state in ``TrainState.extras``.
        budget: relative error of all matrices together.
        every: steps between two choices.
        told: called with the step, the choice by parameter and its bytes, when a program is chosen.
    """

    def __init__(
        self,
        layers: Layers,
        compiled: Callable[[Choice], Any],
        measure: Any,
        name: str,
        budget: float,
        every: int,
        told: Callable[[int, dict[str, list[int]], int], None] = lambda *_: None,
    ):
        self.layers, self._compiled, self._measure, self._name = layers, compiled, measure, name
        self._budget, self._every, self._told = budget, every, told
        self._programs: dict[Choice, Any] = {}
        self._rows: list[tuple[int, ...]] = []
        self._row: tuple[int, ...] | None = None
        self._step: int | None = None

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """The state after the step, and its metrics, among them ``sent_bytes``: the arrays that it all-reduced."""
        if self._step is None:
            self._resume(state)
        if self._row is None or self._step % self._every == 0:  # type: ignore[operator]
            state = self._choose(state, batch)
        assert self._row is not None
        state, metrics = self._program(self._row)(state, batch)
        self._step += 1  # type: ignore[operator]
        return state, {**metrics, "sent_bytes": np.float32(self.bytes_of(self._row))}

    def bytes_of(self, row: Sequence[int]) -> int:
        """Bytes of one device's arrays of all matrices that are all-reduced in a step with these ranks."""
        ranks, sizes = self.layers.options()
        return sum(sizes[layer][ranks[layer].index(rank)] for layer, rank in enumerate(row))

    def _resume(self, state: TrainState) -> None:
        kept = state.extras[self._name]
        self._step = int(state.step)
        rows, current = np.asarray(kept["choices"]), int(kept["current"])
        self._rows = [tuple(int(rank) for rank in row) for row in rows if row[0] != NONE]
        self._row = self._rows[current] if current != NONE else None

    def _choose(self, state: TrainState, batch: Any) -> TrainState:
        """State with the choice for this batch's gradients."""
        kept = state.extras[self._name]
        errors = {name: np.asarray(one) for name, one in self._measure(state, batch).items()}
        row = best_row(self.layers, errors, self._budget, self._rows, kept["choices"].shape[0])
        if row == self._row:
            return state
        if row not in self._rows:
            self._rows.append(row)
        self._row = row
        self._told(self._step or 0, self.layers.described(self.layers.chosen(row)), self.bytes_of(row))
        rows = np.full(kept["choices"].shape, NONE, np.int32)
        rows[: len(self._rows)] = self._rows
        new = {"choices": rows, "current": np.int32(self._rows.index(row))}
        placed = {name: jax.device_put(value, kept[name].sharding) for name, value in new.items()}
        return replace(state, extras={**state.extras, self._name: {**kept, **placed}})

    def _program(self, row: tuple[int, ...]) -> Any:
        choice = self.layers.chosen(row)
        if choice not in self._programs:
            self._programs[choice] = self._compiled(choice)
        return self._programs[choice]
