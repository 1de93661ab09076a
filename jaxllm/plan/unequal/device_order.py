"""Device order: places of unequal devices in a mesh of stages and replicas, for the fastest step.

Units of devices (``unequal_cluster``) are placed as P stages of R replicas. A stage computes as slowly as its slowest
unit and sends as slowly as its slowest message to the next stage does; once a step, replicas sum their gradients over
their slowest link, and stages bring weights to where they are used. Layers are chosen for each order (``depth_split``).
Orders are searched as in Pipette (arXiv:2405.18093): by simulated annealing, and where there are few units by branch
and bound, which is exact. Groups on fast links end up in one stage, and messages between stages on the slow links
(Holmes, arXiv:2312.03549), without a rule that says so.

Legend: U units, P stages, R replicas; the unit at place r of stage p is ``order[p * R + r]``.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.parallel.pipeline.stage_layout import split_units
from jaxllm.plan.unequal.depth_split import DepthSplit, best_split, split_of

MOST_EXACT = 8
"""Units up to which orders are searched by branch and bound."""
EXACT_START = 200
"""Swaps of simulated annealing before branch and bound."""
MOST_NODES = 1500
"""Beginnings of orders that a search looks at."""
NEAR = 1e-9
"""Part of a step by which orders are as good as others."""
ANNEALING_STEPS = 3000
"""Swaps that simulated annealing tries."""
CHAIN = 1000
"""Swaps after which it starts again from another order: a step is as long as its slowest message, so from some orders
no swap of two units is faster though others are by half."""


class DeviceOrder(NamedTuple):
    """An order of units with its depths.

    Attributes:
        seconds: of a step.
        order: units by place. [U]
        split: layers of the stages.
        sums: seconds of the step in which replicas sum gradients.
        moved: seconds of the step in which stages bring weights to where they are used, and gradients back.
    """

    seconds: float
    order: tuple[int, ...]
    split: DepthSplit
    sums: float
    moved: float


@dataclass(frozen=True)
class OrderCosts:
    """Costs of a pipeline on unequal units.

    Attributes:
        stages, replicas: P and R, whose product is U.
        layer: seconds of a layer, of a micro-batch forward and backward, by unit. [U]
        head: seconds of embedding and head, which the last stage has. [U]
        message: bytes that a device sends to the next stage for a micro-batch, there and back.
        sums: bytes that a device sends to other replicas in a step.
        ends: bytes of embedding and head that a device gathers from all stages in a step, and sums over them.
        moved: the same for each layer of the deepest stage, where stages are not equally deep: layers are then stored
            by width (``jaxllm.parallel.pipeline.stage_layout``).
        links: bytes/s each way of a device of one unit to one of another, the same both ways. [U U]
        layers: of the model.
        most: layers that a stage may have.
        micro_batches: of a step.
    """

    stages: int
    replicas: int
    layer: tuple[float, ...]
    head: tuple[float, ...]
    message: float
    sums: float
    ends: float
    moved: float
    links: tuple[tuple[float, ...], ...]
    layers: int
    most: int
    micro_batches: int

    def rows(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        """Units of each stage."""
        return [tuple(order[at : at + self.replicas]) for at in range(0, len(order), self.replicas)]

    def stage(self, units: Sequence[int], after: Sequence[int]) -> tuple[float, float]:
        """(Seconds of a layer, of what is beside layers) of a stage for a micro-batch.

        Args:
            units: of the stage. [R]
            after: of the next stage; empty for the last. [R]
        """
        layer = max(self.layer[u] for u in units)
        if not after:
            return layer, max(self.head[u] for u in units)
        return layer, max(self.message / self.links[a][b] for a, b in zip(units, after, strict=True))

    def stages_of(self, order: Sequence[int]) -> tuple[list[float], list[float]]:
        """(Seconds of a layer, of what is beside layers) by stage, for a micro-batch."""
        rows = self.rows(order)
        found = [self.stage(row, after) for row, after in zip(rows, [*rows[1:], ()], strict=True)]
        return [layer for layer, _ in found], [beside for _, beside in found]

    def sum_seconds(self, rows: Sequence[Sequence[int]]) -> float:
        """Seconds of a step in which replicas of stages sum gradients: the slowest stage's."""
        return max((self.sums / self.links[a][b] for row in rows for a in row for b in row if a != b), default=0.0)

    def seconds_a_byte(self, order: Sequence[int]) -> float:
        """Seconds of each byte that a device has in parts for all stages, by the slowest device."""
        if self.stages == 1:
            return 0.0
        columns = [order[r :: self.replicas] for r in range(self.replicas)]
        return (
            max(sum(1 / self.links[a][b] for b in column if b != a) for column in columns for a in column) / self.stages
        )

    def placed(self, order: Sequence[int], exact: bool = True) -> DeviceOrder | None:
        """An order with its best depths; None where the layers do not fit.

        Args:
            order: units by place. [U]
            exact: whether all largest depths are tried, or some.
        """
        once, a_byte = self.sum_seconds(self.rows(order)), self.seconds_a_byte(order)
        found = self.best_depths(*self.stages_of(order), a_byte, exact)
        if found is None:
            return None
        split, moved = found
        return DeviceOrder(split.seconds(self.micro_batches) + moved + once, tuple(order), split, once, moved)

    def best_depths(
        self, layer: Sequence[float], beside: Sequence[float], a_byte: float, exact: bool = True
    ) -> tuple[DepthSplit, float] | None:
        """Best depths of stages, and seconds in which weights are moved; None where the layers do not fit.

        Args:
            layer, beside: seconds of a layer and of what is beside layers, by stage. [P]
            a_byte: seconds of each byte that a device has in parts for all stages.
            exact: see ``placed``.
        """
        micro, least = self.micro_batches, -(-self.layers // self.stages)
        free = best_split(layer, beside, self.layers, self.most, micro)
        if free is None:
            return None
        # Deeper stages may save less than their weights cost.
        depths = list(range(least, max(free.depths))) if self.moved else []
        depths = depths if exact else sorted({*depths[:1], *depths[len(depths) // 2 : len(depths) // 2 + 1]})
        even = [(least,) * self.stages] if self.layers % self.stages == 0 and least <= self.most else []
        found = [(split_of(layer, beside, one), self.ends * a_byte) for one in even]
        found.append((free, (self.ends + self.moved * max(free.depths)) * a_byte))
        seconds = min(split.seconds(micro) + moved for split, moved in found)
        for most in depths:
            if free.seconds(micro) + (self.ends + self.moved * most) * a_byte >= seconds:
                break
            if (split := best_split(layer, beside, self.layers, most, micro)) is not None:
                found.append((split, (self.ends + self.moved * max(split.depths)) * a_byte))
                seconds = min(seconds, split.seconds(micro) + found[-1][1])
        return min(found, key=lambda one: one[0].seconds(micro) + one[1])

    def placed_evenly(self, order: Sequence[int]) -> DeviceOrder | None:
        """An order with depths as even as training makes them; None where they do not fit."""
        depths = split_units(self.layers, self.stages)
        if max(depths) > self.most:
            return None
        split, a_byte = split_of(*self.stages_of(order), depths), self.seconds_a_byte(order)
        once = self.sum_seconds(self.rows(order))
        moved = (self.ends + self.moved * max(depths) * (len(set(depths)) > 1)) * a_byte
        return DeviceOrder(split.seconds(self.micro_batches) + once + moved, tuple(order), split, once, moved)

    def bound(self, order: tuple[int, ...] = ()) -> float:
        """Seconds that no order is below whose first stages are these, complete; infinite where none fits.

        A stage that is complete costs what it does; those after it cost at least as much as stages of the units left,
        sorted by speed, over the fastest links.
        """
        rows, left = self.rows(order), [u for u in range(len(self.layer)) if u not in order]
        known = [self.stage(row, after) for row, after in itertools.pairwise(rows)]
        if rows:
            fastest = max(self.links[a][b] for a in rows[-1] for b in left)
            known.append((self.stage(rows[-1], ())[0], self.message / fastest))
        fastest = max((self.links[a][b] for a in left for b in left if a != b), default=math.inf)
        sent, seconds = self.message / fastest, self.sum_seconds(rows)
        if self.replicas > 1:
            ranked = sorted(self.layer[u] for u in left)[self.replicas - 1 :: self.replicas]
            known += [*((one, sent) for one in ranked[:-1]), (ranked[-1], 0.0)]
            return seconds + min(self.head[u] for u in left) + self._least(tuple(known))
        if len(left) > 1:  # messages of single units, each over its own fastest link
            own = sorted(self.message / max(self.links[u][v] for v in left if v != u) for u in left)
            seconds += sum(own[:-1]) - (len(left) - 1) * sent
        lasts = {(self.layer[u], self.head[u]): sorted(self.layer[v] for v in left if v != u) for u in left}
        ways = ((*known, *((one, sent) for one in rest), last) for last, rest in lasts.items())
        return seconds + min(self._least(way) for way in ways)

    def _least(self, stages: tuple[tuple[float, float], ...]) -> float:
        """Seconds of the best depths, with weights moved over each unit's fastest links."""
        if stages not in self._found:
            a_byte = max(sum(sorted(1 / link for link in row)[1 : self.stages]) for row in self.links) / self.stages
            layer, beside = zip(*stages, strict=True)
            best = self.best_depths(layer, beside, a_byte)
            self._found[stages] = math.inf if best is None else best[0].seconds(self.micro_batches) + best[1]
        return self._found[stages]

    @functools.cached_property
    def _found(self) -> dict[tuple[tuple[float, float], ...], float]:
        return {}

    @functools.cached_property
    def alike(self) -> tuple[int, ...]:
        """The first unit that each can change places with at no cost. [U]"""
        return tuple(next(v for v in range(u + 1) if self._same(u, v)) for u in range(len(self.layer)))

    def _same(self, u: int, v: int) -> bool:
        own = (self.layer[u], self.head[u]) == (self.layer[v], self.head[v])
        return own and all(self.links[u][w] == self.links[v][w] for w in range(len(self.layer)) if w not in (u, v))


def best_order(costs: OrderCosts, below: float = math.inf) -> DeviceOrder | None:
    """The fastest order; None where the layers fit in none.

    Up to ``MOST_EXACT`` units by branch and bound, exact where ``MOST_NODES`` beginnings of orders are enough, and by
    simulated annealing above.

    Args:
        costs: of the units.
        below: seconds of interest: where no order is below, any order or none is returned.
    """
    if len(costs.layer) <= MOST_EXACT:
        return exact_order(costs, below, MOST_NODES)
    return None if costs.bound() >= below else annealed_order(costs)


def exact_order(costs: OrderCosts, below: float = math.inf, nodes: float = math.inf) -> DeviceOrder | None:
    """The fastest order by branch and bound: stages are filled one after the other.

    Units that can change places are tried once, and stages of which no order goes on to a faster step not at all.

    Args:
        costs, below: see ``best_order``.
        nodes: beginnings of orders after which the best order so far is returned.
    """
    best: DeviceOrder | None = None
    units, each = len(costs.layer), costs.replicas

    def fill(order: tuple[int, ...], left: list[int]) -> None:
        nonlocal best, nodes
        nodes -= 1
        if nodes < 0:
            return
        if not left:
            found = costs.placed(order)
            if found is not None and (best is None or found.seconds < best.seconds):
                best = found
            return
        if len(order) % each == 0 and best is not None and costs.bound(order) >= min(best.seconds, below) * (1 - NEAR):
            return
        tried: set[int] = set()
        for unit in left:
            falls = 0 < len(order) < each and unit < order[-1]  # replicas can all change places
            if costs.alike[unit] not in tried and not falls:
                tried.add(costs.alike[unit])
                fill((*order, unit), [u for u in left if u != unit])

    if costs.bound() >= below:
        return None
    best = annealed_order(costs, EXACT_START)
    fill((), list(range(units)))
    return best


def annealed_order(costs: OrderCosts, steps: int = ANNEALING_STEPS, seed: int = 0) -> DeviceOrder | None:
    """A fast order by simulated annealing; the same for the same seed.

    Chains of ``CHAIN`` swaps, or one of all if they are fewer: the first from the given order or that by speed, the
    others from drawn ones.

    Args:
        costs: of the units.
        steps: swaps of two units, or of two stages, that are tried.
        seed: of what is tried.
    """
    units, draw = len(costs.layer), random.Random(seed)
    starts = [costs.placed(start, exact=False) for start in (tuple(range(units)), _sorted_order(costs))]
    fitting = [start for start in starts if start is not None]
    if not fitting:
        return None  # whether the layers fit depends on their number alone
    chains = max(1, steps // CHAIN)
    best = here = min(fitting, key=_seconds)
    for chain in range(chains):
        if chain:
            here = costs.placed(draw.sample(range(units), units), exact=False) or best
        best = min(best, _annealed_chain(costs, here, steps // chains, 0.1 * best.seconds, draw), key=_seconds)
    return costs.placed(best.order)


def _annealed_chain(costs: OrderCosts, here: DeviceOrder, steps: int, warm: float, draw: random.Random) -> DeviceOrder:
    """The fastest order of so many swaps; ``warm`` is the first temperature, in seconds."""
    units, each, best = len(costs.layer), costs.replicas, here
    for step in range(steps):
        temperature = warm * 1e-4 ** (step / steps)
        order = list(here.order)
        if each > 1 and draw.random() < 0.3:
            p, q = draw.randrange(costs.stages), draw.randrange(costs.stages)
            for r in range(each):
                order[p * each + r], order[q * each + r] = order[q * each + r], order[p * each + r]
        else:
            a, b = draw.randrange(units), draw.randrange(units)
            order[a], order[b] = order[b], order[a]
        found = costs.placed(order, exact=False)
        if found is None:
            continue
        worse = found.seconds - here.seconds
        if worse <= 0 or draw.random() < math.exp(-worse / temperature):
            here = found
            best = min(best, found, key=_seconds)
    return best


def _seconds(order: DeviceOrder) -> float:
    return order.seconds


def _sorted_order(costs: OrderCosts) -> tuple[int, ...]:
    return tuple(sorted(range(len(costs.layer)), key=lambda u: (costs.layer[u], u)))
