"""Search of trials with a learned cost model: a regression of measured times proposes what to measure next.

Modelled on the schedule explorer of TVM (arXiv:1802.04799, section 5). The first trials are spread over the candidates;
a forest of regression trees is then fitted to the logarithms of the times so far, and proposes the candidates with the
least predicted time, plus some at random, so that one wrong prediction does not end the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.tune.forest import fit_forest

FIRST_SHARE = 0.4
"""Share of the trials that are spread over the candidates before the first fit."""
BATCH = 3
"""Trials between two fits; the last of each batch is drawn at random among the better half of the predictions."""
FAILED = 10.0
"""Factor on the slowest time that stands for a candidate that failed."""

Measure = Callable[[int], float | None]
"""Index of a candidate -> seconds (or cycles); None for one that fails."""


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        best: index of the fastest candidate; None if all trials failed.
        trials: (index, time or None) in the order in which they were measured.
    """

    best: int | None
    trials: tuple[tuple[int, float | None], ...]


def search(
    features: Sequence[Sequence[float]],
    measure: Measure,
    trials: int,
    *,
    seed: int = 0,
    first: Sequence[int] = (),
    prior: Sequence[float] | None = None,
) -> SearchResult:
    """Measures some of the candidates and returns the fastest.

    Args:
        features: numbers that describe each candidate, of equal length; the forest sees those and products of pairs.
        measure: measures one candidate.
        trials: number of candidates to measure; all of them if there are no more.
        seed: of the random choices.
        first: indices to measure first, such as the present block sizes.
        prior: predicted time of each candidate before anything is measured, such as that of a roofline; the first
            trials then lean to its least ones, and the forest sees it too.

    Raises:
        ValueError: no candidates, or no trials.
    """
    if not features or trials < 1:
        raise ValueError(f"search: {len(features)} candidates and {trials} trials; give at least one of each.")
    rng, x = np.random.default_rng(seed), describe(features, prior)
    found: dict[int, float | None] = {}

    def run(index: int) -> None:
        if index not in found and len(found) < trials:
            found[index] = measure(index)

    for index in first:
        run(index)
    for index in spread(x, max(2, math.ceil(FIRST_SHARE * trials)), rng, prior):
        run(int(index))
    while len(found) < min(trials, len(features)):
        left = np.asarray([i for i in range(len(features)) if i not in found])
        slowest = max((time for time in found.values() if time is not None), default=1.0)
        times = [slowest * FAILED if time is None else time for time in found.values()]
        predicted = fit_forest(x[list(found)], np.log(times), seed=seed)(x[left])[:, 0]
        ranked = left[np.argsort(predicted, kind="stable")]
        for index in ranked[: BATCH - 1]:
            run(int(index))
        run(int(rng.choice(ranked[: max(1, len(ranked) // 2)])))
    legal = {index: time for index, time in found.items() if time is not None}
    return SearchResult(min(legal, key=lambda index: legal[index]) if legal else None, tuple(found.items()))


def describe(features: Sequence[Sequence[float]], prior: Sequence[float] | None) -> np.ndarray:
    """Features of the regression: logarithms of the numbers, their sums in pairs (products), and that of the prior."""
    logs = np.log2(np.asarray(features, np.float64) + 1e-9)
    columns = [logs, *(logs[:, [i]] + logs[:, [j]] for i in range(logs.shape[1]) for j in range(i))]
    if prior is not None:
        columns.append(np.log2(np.asarray(prior, np.float64))[:, None])
    return np.concatenate(columns, axis=1)


def spread(x: np.ndarray, count: int, rng: np.random.Generator, prior: Sequence[float] | None) -> list[int]:
    """Indices of candidates that are far from each other: each next one is the farthest from those taken.

    With a prior, among the half of the candidates that it thinks fastest, and its fastest first.
    """
    pool = np.arange(len(x)) if prior is None else np.argsort(np.asarray(prior), kind="stable")[: (len(x) + 1) // 2]
    scaled = (x[pool] - x[pool].mean(axis=0)) / (x[pool].std(axis=0) + 1e-9)
    taken = [int(rng.integers(len(pool))) if prior is None else 0]
    away = np.full(len(pool), np.inf)
    while len(taken) < min(count, len(pool)):
        away = np.minimum(away, np.square(scaled - scaled[taken[-1]]).sum(axis=1))
        taken.append(int(np.argmax(away)))
    return [int(pool[i]) for i in taken]
