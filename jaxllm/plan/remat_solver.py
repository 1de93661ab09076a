"""Remat solver: per-layer gradient checkpointing policies of least recomputation under a memory budget.

A policy saves the values it names from the forward to the backward pass, so the number of layers with each policy
determines for how many layers each value is retained: a few integers per segment of the model instead of a choice for
every value of every layer. This is a small integer program, minimal time under a memory bound, as Moccasin states
rematerialisation with retention intervals (arXiv:2304.14463, section 2). Its sizes are measured by the compiler: the
step is compiled with each named policy for all layers, then with the solution; the difference between the solution's
program and the sum of its parts corrects the bound for another try.
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
"""Policies from the least saved to the most; layers get them in this order, so that the backward pass uses up first
what saves most.
"""
CLOSE = 0.95
"""Fraction of the budget beyond which no better solution is tried."""
TRIES = 5

Measure = Callable[[str], int]
"""Function from ``model.remat`` to the bytes that the step takes on a device."""


@dataclass(frozen=True)
class RematSolution:
    """Remat policies, and the candidates they were compared with.

    Attributes:
        remat: value for ``model.remat``.
        bytes: measured bytes of a device.
        flops: FLOPs per token, recomputation included.
        named: (bytes, FLOPs) of each policy for all layers.
        tried: (bytes, FLOPs) of every other candidate that was measured.
    """

    remat: str
    bytes: int
    flops: float
    named: Mapping[str, tuple[int, float]]
    tried: Mapping[str, tuple[int, float]]


def solve(config: RunConfig, budget: int, measure: Measure) -> RematSolution:
    """Per-layer policies with the least recomputation among those whose step takes at most ``budget`` bytes.

    Args:
        config: the run; its own remat is ignored.
        budget: bytes of a device, for everything that the step takes.
        measure: compiles the step.

    Raises:
        RematError: full remat takes more than the budget.
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
    more = 0.0  # bytes of a mixed program beyond the sum of its parts
    for _ in range(TRIES):
        counts = solve_policies(model, kept, costs, budget - least - more)
        if counts is None:
            break
        remat = format_policies(model, counts)
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
    return RematSolution(remat, *found[remat], named, tried)


def solve_policies(
    model: DecoderConfig, kept: Mapping[str, float], costs: Mapping[str, Sequence[float]], room: float
) -> list[list[tuple[str, int]]] | None:
    """Integer program: for each segment the number of repeats with each policy, without zeros; None if nothing fits.

    Args:
        model: the model.
        kept: bytes saved per layer, beside what "full" saves.
        costs: recomputed FLOPs of a segment's group.
        room: available bytes.
    """
    segments = model.segments
    pairs = list(itertools.product(range(len(segments)), NAMED))
    sizes = np.array([len(segments[s][0]) * kept[name] for s, name in pairs])
    of_segment = np.array([[float(s == one) for s, _ in pairs] for one in range(len(segments))])
    repeats = np.array([count for _, count in segments], float)
    scale = max(1.0, float(np.abs(sizes).max()))  # scales bytes and FLOPs to about one, for the solver
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
    # Among solutions with equally few recomputed matmuls, save most: that recomputes the fewest elementwise operations.
    found = least(-sizes / scale, optimize.LinearConstraint(price[None], -np.inf, found.fun + 1e-6))
    numbers = {pair: round(x) for pair, x in zip(pairs, found.x, strict=True)}
    return [[(name, numbers[s, name]) for name in NAMED if numbers[s, name]] for s in range(len(segments))]


def format_policies(model: DecoderConfig, counts: Sequence[Sequence[tuple[str, int]]]) -> str:
    """``model.remat`` string of the policies: "full=3,none=5", or the single name that all layers have."""
    rows = [(name, n * len(g)) for (g, _), row in zip(model.segments, counts, strict=True) for name, n in row]
    runs = [(name, sum(n for _, n in run)) for name, run in itertools.groupby(rows, key=lambda row: row[0])]
    return runs[0][0] if len(runs) == 1 else ",".join(f"{name}={n}" for name, n in runs)
