"""Dynamic program over layers: the layout and remat policy of each layer with the least step time within a memory.

The program goes through the layers in order (Galvatron, arXiv:2211.13878, section 4.2). Its state is the choice of the
last layer; of each state it keeps every partial plan that no other one is at most as slow as and at most as large as
(Pareto fronts), so memory is not rounded to buckets and the result is exact. Partial plans are also left out where a
bound by Lagrange multipliers says that they cannot become faster than a plan that is known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.plan.by_layer.layer_costs import ChoiceCost, LayerChoice, seconds_of

MOST_BOUNDS = 6
"""Lagrange multipliers whose bounds partial plans are held against."""
CLOSE = 1e-12
"""Relative difference of seconds below which two plans are equally fast."""


@dataclass(frozen=True)
class LayerProblem:
    """Layers in order, with what each may be and what that costs.

    Attributes:
        costs: of each run of equal groups of layers, the cost of one group by choice.
        repeats: number of groups of each run.
        ends: cost outside layers, by layout of the first layer.
        changes: cost of moving activations, by (layout before, layout after); "" before the first layer and after the
            last one.
        room: bytes that saved activations may take.
    """

    costs: tuple[Mapping[LayerChoice, ChoiceCost], ...]
    repeats: tuple[int, ...]
    ends: Mapping[str, ChoiceCost]
    changes: Mapping[tuple[str, str], ChoiceCost]
    room: float

    def plan_costs(self, plan: Sequence[LayerChoice]) -> list[ChoiceCost]:
        """Costs of a plan: a choice for each group of layers."""
        runs = [run for run, repeats in enumerate(self.repeats) for _ in range(repeats)]
        found = [self.ends[plan[0].layout]]
        found += [self.costs[run][choice] for run, choice in zip(runs, plan, strict=True)]
        layouts = ["", *(choice.layout for choice in plan), ""]
        return found + [self.changes[pair] for pair in itertools.pairwise(layouts)]

    def seconds(self, plan: Sequence[LayerChoice]) -> float:
        """Seconds of a plan, infinite where it does not fit."""
        costs = self.plan_costs(plan)
        return seconds_of(costs) if sum(cost.kept for cost in costs) <= self.room else math.inf


@dataclass(frozen=True)
class _Front:
    """Partial plans that end in one state: a row of ``rows`` each (base, gathers, ring, kept).

    Attributes:
        rows: sums of costs.
        before: state that each came from.
        parent: its index there.
    """

    rows: np.ndarray
    before: np.ndarray
    parent: np.ndarray


def fastest_plan(problem: LayerProblem, below: float = math.inf) -> tuple[LayerChoice, ...] | None:
    """The fastest plan that fits, a choice for each group of layers; None if none is faster than ``below``.

    Args:
        problem: layers and their costs.
        below: seconds of ``LayerProblem.seconds`` that the plan has to stay under.
    """
    solver = _Solver(problem, below)
    return solver.solve()


class _Solver:
    """One solution of a problem. A state is (index of the choice, whether the layout changed within the run).

    Within a run of equal groups, plans are looked at in one order alone: groups of one layout are neighbours, and of
    these the groups of one policy. Another order moves activations as often or more often, and costs the same else.
    """

    def __init__(self, problem: LayerProblem, below: float):
        self.problem = problem
        self.choices = tuple(dict.fromkeys(choice for costs in problem.costs for choice in costs))
        self.runs = [run for run, repeats in enumerate(problem.repeats) for _ in range(repeats)]
        self.best, self.plan = below, None
        self.cost = np.full((len(problem.costs), len(self.choices), 4), np.inf)
        for run, costs in enumerate(problem.costs):
            for c, choice in enumerate(self.choices):
                if choice in costs:
                    self.cost[run, c] = costs[choice]
        layouts = [choice.layout for choice in self.choices]
        self.moved = np.array([[problem.changes[a, b] for b in layouts] for a in layouts], float)
        self.first = np.array([np.add(problem.ends[layout], problem.changes["", layout]) for layout in layouts], float)
        self.last = np.array([problem.changes[layout, ""] for layout in layouts], float)

    def solve(self) -> tuple[LayerChoice, ...] | None:
        """The plan, see ``fastest_plan``."""
        if not self._relaxed():
            return self.plan
        fronts = [self._begin()]
        for unit in range(1, len(self.runs)):
            fronts.append(self._step(fronts[-1], unit))
        self._finish(fronts)
        return self.plan

    def _relaxed(self) -> bool:
        """Solves the problem with memory priced by Lagrange multipliers; False if that proves the known plan best.

        Step seconds are at least ``base + a gathers + b ring`` for shares a, b of 0 or 1, and for plans that fit at
        least that and ``price (kept - room)``, for any price of 0 or more.
        """
        weights = []
        signs = [(0.0, 1.0) if np.isfinite(self.cost[..., i]).any() and self._may_exceed(i) else (0.0,) for i in (1, 2)]
        for a, b in itertools.product(*signs):
            weights += [(1.0, a, b, price) for price in self._prices(a, b)]
        self.weights = np.array(weights)  # [G, 4]
        kept = self.weights[:, 3]
        step = np.einsum("rcf,gf->grc", np.where(np.isfinite(self.cost), self.cost, 0.0), self.weights)
        step[:, ~np.isfinite(self.cost[..., 0])] = np.inf
        move = np.einsum("abf,gf->gab", self.moved, self.weights)
        units = len(self.runs)
        # ahead[u]: least priced cost after unit u, by choice of unit u.
        self.ahead = np.zeros((units, len(weights), len(self.choices)))
        self.ahead[-1] = np.einsum("cf,gf->gc", self.last, self.weights)
        for unit in range(units - 2, -1, -1):
            later = step[:, self.runs[unit + 1]] + self.ahead[unit + 1]  # [G, C]
            self.ahead[unit] = (move + later[:, None, :]).min(-1)
        start = np.einsum("cf,gf->gc", self.first, self.weights) + step[:, self.runs[0]] + self.ahead[0]
        bounds = start.min(-1) - kept * self.problem.room
        if bounds.max() >= self._limit():
            return False
        for g in np.argsort(-bounds):
            choices = [int(start[g].argmin())]
            for unit in range(1, units):
                later = step[g, self.runs[unit]] + self.ahead[unit, g]
                choices.append(int((move[g, choices[-1]] + later).argmin()))
            self._offer(tuple(self.choices[c] for c in choices))
        best = np.argsort(-bounds)[:MOST_BOUNDS]
        self.weights, self.ahead = self.weights[best], self.ahead[:, best]
        return bool(bounds.max() < self._limit())

    def _may_exceed(self, column: int) -> bool:
        """Whether the sum of a column can be above 0."""
        costs = np.where(np.isfinite(self.cost[..., column]), self.cost[..., column], -np.inf).max(-1)
        most = sum(costs[run] for run in self.runs) + self.first[:, column].max() + self.last[:, column].max()
        return bool(most + max(0.0, self.moved[..., column].max()) * len(self.runs) > 0)

    def _prices(self, a: float, b: float) -> list[float]:
        """Prices of memory, seconds a byte, at which one choice of a run becomes better than another."""
        found = {0.0}
        for costs in self.cost:
            usable = costs[np.isfinite(costs[:, 0])]
            seconds = usable[:, :3] @ np.array([1.0, a, b])
            for i, j in itertools.combinations(range(len(usable)), 2):
                more, saved = seconds[i] - seconds[j], usable[j, 3] - usable[i, 3]
                if saved and more / saved > 0:
                    found.update(more / saved * factor for factor in (1 - 1e-6, 1 + 1e-6))
        return sorted(found)

    def _limit(self) -> float:
        return self.best - CLOSE * abs(self.best) if math.isfinite(self.best) else math.inf

    def _offer(self, plan: tuple[LayerChoice, ...]) -> None:
        seconds = self.problem.seconds(plan)
        if seconds < self._limit():
            self.best, self.plan = seconds, plan

    def _begin(self) -> dict[tuple[int, bool], _Front]:
        found = {}
        for c in range(len(self.choices)):
            rows = (self.first[c] + self.cost[self.runs[0], c])[None]
            if np.isfinite(rows).all() and (kept := self._promising(rows, 0, c)).any():
                found[c, False] = _Front(rows[kept], np.full(1, -1), np.full(1, -1))
        return found

    def _step(self, fronts: dict[tuple[int, bool], _Front], unit: int) -> dict[tuple[int, bool], _Front]:
        run, states = self.runs[unit], list(fronts)
        come: dict[tuple[int, bool], list[tuple[np.ndarray, int]]] = {}
        for s, (c, changed) in enumerate(states):
            for later, now in self._next(c, changed, inside=run == self.runs[unit - 1]):
                rows = fronts[c, changed].rows + (self.moved[c, later] + self.cost[run, later])
                if np.isfinite(rows).all():
                    come.setdefault((later, now), []).append((rows, s))
        found = {}
        for (c, changed), several in come.items():
            rows = np.concatenate([rows for rows, _ in several])
            before = np.concatenate([np.full(len(rows), s) for rows, s in several])
            parent = np.concatenate([np.arange(len(rows)) for rows, _ in several])
            kept = np.flatnonzero(self._promising(rows, unit, c))
            kept = kept[_front(rows[kept])]
            if len(kept):
                found[c, changed] = _Front(rows[kept], before[kept], parent[kept])
        return found

    def _next(self, c: int, changed: bool, inside: bool) -> Iterator[tuple[int, bool]]:
        """States that may follow a state; ``inside`` a run of equal groups, in its one order."""
        for later, choice in enumerate(self.choices):
            if not inside:
                yield later, False
            elif choice.layout == self.choices[c].layout:
                if later >= c:
                    yield later, changed
            elif not changed:
                yield later, True

    def _promising(self, rows: np.ndarray, unit: int, c: int) -> np.ndarray:
        """Whether partial plans may still become faster than the known plan, within the memory."""
        priced = rows @ self.weights.T + self.ahead[unit, :, c] - self.weights[:, 3] * self.problem.room
        return (priced.max(-1) < self._limit()) & (rows[:, 3] <= self.problem.room)

    def _finish(self, fronts: list[dict[tuple[int, bool], _Front]]) -> None:
        """Offers the fastest of the whole plans."""
        for state, front in fronts[-1].items():
            rows = front.rows + self.last[state[0]]
            seconds = rows[:, 0] + np.maximum(rows[:, 1], 0) + np.maximum(rows[:, 2], 0)
            seconds[rows[:, 3] > self.problem.room] = np.inf
            for label in np.argsort(seconds, kind="stable")[:2]:  # two, for one that rounding lets fit here alone
                plan, at, i = [], state, int(label)
                for unit in range(len(self.runs) - 1, -1, -1):
                    plan.append(self.choices[at[0]])
                    own = fronts[unit][at]
                    if unit:
                        at, i = list(fronts[unit - 1])[own.before[i]], int(own.parent[i])
                self._offer(tuple(reversed(plan)))


def _front(rows: np.ndarray) -> np.ndarray:
    """Indices of the rows that no other row is at most as large as in all columns; of equal rows the first."""
    order = np.lexsort(rows.T[::-1])
    left, found = order, []
    while len(left):
        best, left = left[0], left[1:]
        found.append(best)
        left = left[~(rows[best] <= rows[left]).all(-1)]
    return np.array(sorted(found), int)
