"""What to compute again under a budget of bytes: the policies of layers that cost least, as the compiler measures them.

A policy keeps the values it names from the forward pass to the backward pass, so how many layers have it says for how
many layers each value is retained: whole numbers, a few for each segment of the model, instead of a choice for every
value of every layer. So stated it is a small integer program, minimal time under a bound of memory, as Moccasin states
rematerialisation with retention intervals (arXiv:2304.14463, section 2). Its sizes are the compiler's: the step is
compiled with each named policy for all layers, then with the answer; what the program of the answer takes more or less
than the sum of its parts moves the bound for another try.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from jaxllm.models import DecoderConfig
from jaxllm.models.remat import RematError
from jaxllm.train.config import RunConfig
from jaxllm.train.model_flops import hardware_flops_per_token, recomputed_flops

NAMED = ("full", "attention", "elementwise", "none")
"""From the least kept to the most; layers get them in this order, so that what keeps most is first used up."""
CLOSE = 0.95
"""Of the budget: nearer than that nothing more is tried."""
TRIES = 5

Measure = Callable[[str], int]
"""Bytes that the step takes of a device with ``model.remat`` so."""


@dataclass(frozen=True)
class Solved:
    """An answer, and what it was compared with.

    Attributes:
        remat: for ``model.remat``.
        bytes: of a device, measured.
        flops: of a token, with what is computed again.
        named: likewise (bytes, FLOPs) of each policy for all layers.
        tried: every other answer that was measured.
    """

    remat: str
    bytes: int
    flops: float
    named: Mapping[str, tuple[int, float]]
    tried: Mapping[str, tuple[int, float]]


def solve(config: RunConfig, budget: int, measure: Measure) -> Solved:
    """The policies by layers that compute least again among those whose step takes no more than ``budget`` bytes.

    Args:
        config: the run; its own remat plays no part.
        budget: bytes of a device, for all that the step takes.
        measure: compiles the step.

    Raises:
        RematError: with every block computed again it takes more.
    """
    model = config.model
    seq_len = config.data.seq_len

    def measured(remat: str) -> tuple[int, float]:
        return measure(remat), hardware_flops_per_token(dataclasses.replace(model, remat=remat), seq_len)

    named = {name: measured(name) for name in NAMED}
    least = named["full"][0]
    if least > budget:
        raise RematError(
            f"with every block computed again a step takes {least / 2**30:.3f} GiB, more than {budget / 2**30:.3f}: "
            "make the micro-batch smaller (accumulate), or split it over more devices."
        )
    costs = {name: [recomputed_flops(name, model, group, seq_len) for group, _ in model.segments] for name in NAMED}
    kept = {name: (size - least) / model.layers for name, (size, _) in named.items()}
    tried: dict[str, tuple[int, float]] = {}
    found = {name: both for name, both in named.items() if both[0] <= budget}
    more = 0.0  # what a mixed program takes beside the sum of its parts
    for _ in range(TRIES):
        counts = cheapest(model, kept, costs, budget - least - more)
        if counts is None:
            break
        remat = written(model, counts)
        if remat in named or remat in tried:
            break
        tried[remat] = measured(remat)
        size = tried[remat][0]
        if size <= budget:
            found[remat] = tried[remat]
            if size >= CLOSE * budget:
                break
        parts = [(name, n * len(g)) for (g, _), row in zip(model.segments, counts, strict=True) for name, n in row]
        more = size - least - sum(kept[name] * layers for name, layers in parts)
    remat = min(found, key=lambda one: (found[one][1], -found[one][0]))
    return Solved(remat, *found[remat], named, tried)


def cheapest(
    model: DecoderConfig, kept: Mapping[str, float], costs: Mapping[str, Sequence[float]], room: float
) -> list[list[tuple[str, int]]] | None:
    """Of each segment how many repeats have which policy, of those that have any; None if nothing fits.

    Args:
        kept: bytes of a layer, beside what "full" keeps.
        costs: FLOPs computed again of a segment's group.
        room: bytes there are.
    """
    segments = model.segments
    pairs = list(itertools.product(range(len(segments)), NAMED))
    sizes = np.array([len(segments[s][0]) * kept[name] for s, name in pairs])
    of_segment = np.array([[float(s == one) for s, _ in pairs] for one in range(len(segments))])
    repeats = np.array([count for _, count in segments], float)
    scale = max(1.0, float(np.abs(sizes).max()))  # of bytes, and of FLOPs: solvers like numbers near one
    price = np.array([costs[name][s] for s, name in pairs])
    price = price / max(1.0, float(price.max()))
    every = optimize.LinearConstraint(of_segment, repeats, repeats)  # pyright: ignore[reportArgumentType]
    fits = optimize.LinearConstraint(sizes[None] / scale, -np.inf, room / scale)

    def least(objective: np.ndarray, *more: optimize.LinearConstraint) -> optimize.OptimizeResult:
        whole, bounds = np.ones(len(pairs)), optimize.Bounds(0, np.inf)
        constraints = [every, fits, *more]
        return optimize.milp(objective, integrality=whole, bounds=bounds, constraints=constraints)

    found = least(price)
    if not found.success:
        return None
    # Of those that do as few products again the one that keeps most: it does least of what is no product.
    found = least(-sizes / scale, optimize.LinearConstraint(price[None], -np.inf, found.fun + 1e-6))
    numbers = {pair: round(x) for pair, x in zip(pairs, found.x, strict=True)}
    return [[(name, numbers[s, name]) for name in NAMED if numbers[s, name]] for s in range(len(segments))]


def written(model: DecoderConfig, counts: Sequence[Sequence[tuple[str, int]]]) -> str:
    """``model.remat`` of these: "full=3,none=5", or the one name that all layers have."""
    rows = [(name, n * len(g)) for (g, _), row in zip(model.segments, counts, strict=True) for name, n in row]
    runs = [(name, sum(n for _, n in run)) for name, run in itertools.groupby(rows, key=lambda row: row[0])]
    return runs[0][0] if len(runs) == 1 else ",".join(f"{name}={n}" for name, n in runs)
