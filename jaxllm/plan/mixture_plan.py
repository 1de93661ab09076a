"""Data mixture chosen by evidence: small runs, a law of the loss, its projection to the real size, and a search.

projektor (arXiv:2307.02460) in four steps:

1. Small runs at two sizes, on mixtures spread over the simplex (``mixture_runs``, ``spread_mixtures``).
2. At each size a law of the loss, regressed on the Sinkhorn distance from the mixture to the target (``TransportLaw``).
3. The projection of the two laws to the real size, without further parameters (``ProjectedLaw``).
4. Mirror descent over the shares (``minimise_on_simplex``).

"regression" takes a data mixing law in step 2 (arXiv:2403.16952), which knows nothing of the texts, and "grid" takes
the best of the mixtures that were run. Here the predicted number is the logarithm of the loss: the projection is then
a power law of the tokens, as scaling laws are, and its sign is safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxllm.data.selection.mixture_laws import (
    MixingLaw,
    MixtureLaw,
    ProjectedLaw,
    TransportLaw,
    fit_mixing_law,
    fit_transport_laws,
    projection_weights,
    rank_correlation,
)
from jaxllm.data.selection.ngram_embedding import embed_windows, sample_windows
from jaxllm.data.selection.optimal_transport import REGULARISATION, MixtureDistance
from jaxllm.data.selection.simplex_search import minimise_on_simplex, round_shares, spread_mixtures
from jaxllm.files import DataError
from jaxllm.plan.mixture_runs import MixtureRuns, MixtureTask
from jaxllm.svg import Line, chart, page, table

MixtureMethod = Literal["projektor", "regression", "grid"]
METHODS = ("projektor", "regression", "grid")
PARTS = 100
"""Shares are written as multiples of one hundredth."""
SOURCE_WINDOWS, TARGET_WINDOWS, WINDOW = 128, 256, 1024
"""Windows embedded of each source and of the target, and their tokens."""

RunProgress = Callable[[int, int, Sequence[float], int], None]
"""Called before each small run with its number, their total, its shares and its tokens."""


@dataclass(frozen=True, eq=False)
class MixtureChoice:
    """Mixture that a search has chosen, with its evidence. Losses are in nats per token of the target.

    Attributes:
        names: of the sources.
        shares: chosen, [K], multiples of one hundredth.
        method: how.
        sizes: tokens of the small runs.
        size: tokens that the mixture is chosen for.
        mixtures: [R K] of the small runs.
        losses: [R 2] of the small runs, at both sizes.
        left_out: [R] loss of the larger runs, each as predicted from the others; None for "grid".
        predict: (shares, tokens) -> predicted loss.
    """

    names: list[str]
    shares: Float[np.ndarray, " K"]
    method: MixtureMethod
    sizes: tuple[int, int]
    size: float
    mixtures: Float[np.ndarray, "R K"]
    losses: Float[np.ndarray, "R 2"]
    left_out: Float[np.ndarray, " R"] | None
    predict: Callable[[Sequence[float], float], float]

    @property
    def error(self) -> float | None:
        """Root mean square of the relative errors of ``left_out``; None for "grid"."""
        if self.left_out is None:
            return None
        return float(np.sqrt(np.mean((self.left_out / self.losses[:, 1] - 1) ** 2)))

    @property
    def ranks(self) -> float | None:
        """Rank correlation of ``left_out`` with the losses; None for "grid"."""
        return None if self.left_out is None else rank_correlation(self.left_out, self.losses[:, 1])

    @property
    def noise_factor(self) -> float:
        """Factor by which the projection to ``size`` multiplies independent errors of the two laws."""
        return math.hypot(*projection_weights(self.sizes, self.size))


def mixture_distance(task: MixtureTask, *, seed: int = 0, regularisation: float = REGULARISATION) -> MixtureDistance:
    """Sinkhorn distance from mixtures of a task's sources to its target, in the embedding of token n-grams.

    Args:
        seed: of the sampled windows.
        regularisation: as in ``MixtureDistance``.
    """
    sources = [
        embed_windows(sample_windows(one.documents, SOURCE_WINDOWS, WINDOW, seed + number))
        for number, one in enumerate(task.sources, 1)
    ]
    target = embed_windows(sample_windows(task.target, TARGET_WINDOWS, WINDOW, seed))
    return MixtureDistance([jnp.asarray(one) for one in sources], jnp.asarray(target), regularisation)


def choose_mixture(
    runs: MixtureRuns,
    *,
    method: MixtureMethod = "projektor",
    count: int = 16,
    sizes: tuple[float, float] = (1e5, 2e5),
    size: float | None = None,
    progress: RunProgress = lambda number, total, shares, tokens: None,
) -> MixtureChoice:
    """Chooses the shares of a mixture by small runs.

    Args:
        runs: of the task.
        method: "projektor", "regression" or "grid".
        count: number of mixtures that are run, each at both sizes.
        sizes: tokens of the small runs; rounded to whole steps.
        size: tokens that the mixture is chosen for; None: those of the larger small runs.
        progress: called before each small run that has not been done before.

    Raises:
        DataError: the settings do not go together; says what is legal.
    """
    sources = len(runs.task.sources)
    if method not in METHODS:
        raise DataError(f"no method {method!r}; legal: {', '.join(METHODS)}")
    least = 2 if method == "grid" else sources + 2
    if count < least:
        raise DataError(
            f"{count} mixtures are too few for {method} over {sources} sources; give --runs {least} or more"
        )
    small, large = runs.size(sizes[0]), runs.size(sizes[1])
    if small >= large:
        raise DataError(
            f"the sizes of the small runs are {small:,} and {large:,} tokens (whole steps of "
            f"{runs.tokens_per_step:,}); the second must be larger, for example twice the first"
        )
    wanted = float(large) if size is None else float(size)
    if wanted < small:
        raise DataError(f"size is {wanted:,.0f} tokens; legal: those of the smaller runs, {small:,}, or more")
    mixtures = spread_mixtures(sources, count)
    missing = [(one, n) for n in (small, large) for one in mixtures.tolist() if not runs.finished(one, n)]
    for number, (shares, tokens) in enumerate(missing, 1):
        progress(number, len(missing), shares, tokens)
        runs.loss(shares, tokens)
    losses = np.array([[runs.loss(one, n) for n in (small, large)] for one in mixtures.tolist()])
    return decide(runs.task, method, mixtures, losses, (small, large), wanted)


def decide(
    task: MixtureTask,
    method: MixtureMethod,
    mixtures: Float[np.ndarray, "R K"],
    losses: Float[np.ndarray, "R 2"],
    sizes: tuple[int, int],
    size: float,
) -> MixtureChoice:
    """Chooses shares from the losses of small runs; arguments as the attributes of ``MixtureChoice``."""
    if method == "grid":
        best = mixtures[int(np.argmin(_projected(losses, sizes, size)))]

        def measured(shares: Sequence[float], tokens: float) -> float:
            near = int(np.argmin(np.linalg.norm(mixtures - np.asarray(shares), axis=1)))
            return float(_projected(losses[near : near + 1], sizes, tokens)[0])

        return MixtureChoice(task.names, best, method, sizes, size, mixtures, losses, None, measured)
    laws: Sequence[MixingLaw | TransportLaw]
    if method == "regression":
        laws = [fit_mixing_law(mixtures, one) for one in losses.T]
    else:
        laws = fit_transport_laws(mixture_distance(task), mixtures, losses, projection_weights(sizes, size))

    def law_at(tokens: float) -> MixtureLaw:
        return ProjectedLaw(laws[0], laws[1], sizes, tokens)

    def predict(shares: Sequence[float], tokens: float) -> float:
        return math.exp(float(law_at(tokens)(jnp.asarray(shares, jnp.float32))))

    found = minimise_on_simplex(law_at(size), search_starts(mixtures, _projected(losses, sizes, size)))
    left_out = np.exp(laws[1].left_out)
    shares = round_shares(found.shares, PARTS)
    return MixtureChoice(task.names, shares, method, sizes, size, mixtures, losses, left_out, predict)


def search_starts(mixtures: Float[np.ndarray, "R K"], losses: Float[np.ndarray, " R"]) -> Float[np.ndarray, "3 K"]:
    """Starts of the search: the equal mixture and the two best that were run, moved inside the simplex."""
    equal = np.full(mixtures.shape[1], 1 / mixtures.shape[1])
    return np.array([equal, *(0.9 * mixtures[np.argsort(losses)[:2]] + 0.1 * equal)])


def _projected(losses: Float[np.ndarray, "R 2"], sizes: tuple[int, int], size: float) -> Float[np.ndarray, " R"]:
    """Losses of small runs, projected to a size run by run."""
    return np.exp(np.log(losses) @ np.array(projection_weights(sizes, size)))


def mixture_page(choice: MixtureChoice) -> str:
    """HTML page about a choice: shares, predicted loss over tokens, and predictions beside measurements."""
    equal = [1 / len(choice.names)] * len(choice.names)
    top = max(choice.size, choice.sizes[1])
    sizes = np.geomspace(choice.sizes[0], top, 40).tolist()
    doublings = [math.log2(n / choice.sizes[0]) for n in sizes]
    curves = [
        Line("chosen shares", doublings, [choice.predict(choice.shares.tolist(), n) for n in sizes], 0),
        Line("equal shares", doublings, [choice.predict(equal, n) for n in sizes], 1),
    ]
    figures = [
        chart(curves, title="predicted loss", unit=f"nats per token, by doublings of {choice.sizes[0]:,} tokens")
    ]
    if choice.left_out is not None:
        order = np.argsort(choice.losses[:, 1])
        places = list(range(1, len(order) + 1))
        pair = [
            Line("measured", places, choice.losses[order, 1].tolist(), 0, "points"),
            Line("predicted from the others", places, choice.left_out[order].tolist(), 1, "points"),
        ]
        figures.append(
            chart(pair, title=f"small runs of {choice.sizes[1]:,} tokens", unit="nats per token, best first")
        )
    shares = table([[name, float(share)] for name, share in zip(choice.names, choice.shares, strict=True)],
                   ["source", "share"])  # fmt: skip
    runs = table(
        [[*(float(p) for p in one), *(float(x) for x in loss)]
         for one, loss in zip(choice.mixtures, choice.losses, strict=True)],
        [*choice.names, *(f"{n:,} tokens" for n in choice.sizes)],
    )  # fmt: skip
    body = "".join(f'<div class="panel">{one}</div>' for one in [*figures, shares])
    return page(
        "Data mixture",
        f"<h1>Data mixture by {escape(choice.method)}</h1><p>{escape(summary(choice))}</p>"
        f'<div class="grid-of">{body}</div><h2>Small runs</h2><div class="panel wide">{runs}</div>',
    )


def summary(choice: MixtureChoice) -> str:
    """Sentences about a choice: predicted losses, how exact the law is, and how far it is projected."""
    equal = [1 / len(choice.names)] * len(choice.names)
    at = choice.size
    said = (
        f"Predicted loss at {at:,.0f} tokens: {choice.predict(choice.shares.tolist(), at):.4f} nats per token; "
        f"{choice.predict(equal, at):.4f} with equal shares."
    )
    if choice.error is not None:
        said += (
            f" Each run predicted from the others: {choice.error:.2%} off (root mean square), rank correlation "
            f"{choice.ranks:.2f}."
        )
    if choice.noise_factor > 1:
        said += f" The projection to that size multiplies errors of the small runs by {choice.noise_factor:.1f}."
    return said
