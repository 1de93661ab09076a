"""Predicted loss and the search over it, on synthetic runs whose law is known."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.data.selection.mixture_laws import ProjectedLaw, fit_mixing_law, fit_transport_laws, projection_weights
from jaxllm.data.selection.optimal_transport import MixtureDistance
from jaxllm.data.selection.simplex_search import minimise_on_simplex, spread_mixtures
from jaxllm.plan.mixture_plan import search_starts
from tests.proofs.harness import proof

SIZES = (1_000, 2_000)


def clouds(rng: np.random.Generator, sources: int) -> MixtureDistance:
    """Distance of mixtures of normal clouds to a mixture of some of them."""
    middles = rng.normal(size=(sources, 3)) * 0.7
    points = [middle + rng.normal(size=(12, 3)) * 0.5 for middle in middles]
    wanted = rng.dirichlet(np.ones(sources))
    chosen = rng.choice(sources, 24, p=wanted)
    return MixtureDistance(points, middles[chosen] + rng.normal(size=(24, 3)) * 0.5, 0.2)


def simulated(rng: np.random.Generator, distance: MixtureDistance, mixtures: np.ndarray) -> np.ndarray:
    """Losses [R 2] that follow projektor's law, with noise of a tenth of a percent."""
    sources = mixtures.shape[1]
    values = np.array([float(distance(jnp.array(one))) for one in mixtures])
    own, slopes = rng.normal(size=sources) * 0.05, rng.uniform(0.2, 0.6, sources)
    base = 1 + mixtures @ own + values / values.std() * 0.1 * (mixtures @ slopes)
    both = base[:, None] - np.array([0.0, 0.08]) * rng.uniform(0.8, 1.2)
    return np.exp(both) * (1 + 1e-3 * rng.normal(size=both.shape))


@proof("mixtures", count=40, sample=2, bound={"slope": 1e-5}, float64=True)
def predicted_loss_has_the_slope_of_its_gradient(seed: int) -> dict[str, float]:
    """Both laws, projected to a larger size: the gradient in the shares is that of central differences, to 1e-5 of the
    largest slope; the fitted coefficients amplify what the distance's iterations leave."""
    rng = np.random.default_rng(seed)
    sources = int(rng.integers(2, 5))
    distance = clouds(rng, sources)
    mixtures = spread_mixtures(sources, 4 * sources + 2)
    losses = simulated(rng, distance, mixtures)
    weights = projection_weights(SIZES, 10_000)
    pairs: list[list[Any]] = [fit_transport_laws(distance, mixtures, losses, weights)]
    pairs.append([fit_mixing_law(mixtures, one) for one in losses.T])
    worst = 0.0
    for small, large in pairs:
        law = ProjectedLaw(small, large, SIZES, 10_000)
        shares = rng.dirichlet(np.full(sources, 3.0))
        gradient = jax.grad(law)(jnp.array(shares))
        direction = rng.normal(size=sources)
        direction -= direction.mean()
        step = 1e-4 * shares.min() * direction / np.abs(direction).max()
        slope = float(law(jnp.array(shares + step)) - law(jnp.array(shares - step))) / 2
        scale = float(jnp.abs(gradient - gradient.mean()).max() * np.abs(step).max())
        worst = max(worst, abs(slope - float(gradient @ step)) / scale)
    return {"slope": worst}


@proof("mixtures", count=24, sample=1, bound={"above_the_grid": 1e-5}, float64=True)
def search_finds_what_a_grid_finds(seed: int) -> dict[str, float]:
    """Mirror descent reaches a predicted log loss no higher than the best of all mixtures in steps of 1/24."""
    rng = np.random.default_rng(seed)
    sources = int(rng.integers(2, 4))
    distance = clouds(rng, sources)
    mixtures = spread_mixtures(sources, 4 * sources + 4)
    losses = simulated(rng, distance, mixtures)
    laws: list[Any]
    if rng.random() < 0.7:
        laws = fit_transport_laws(distance, mixtures, losses, projection_weights(SIZES, 5_000))
    else:
        laws = [fit_mixing_law(mixtures, one) for one in losses.T]
    law = ProjectedLaw(laws[0], laws[1], SIZES, 5_000)
    found = minimise_on_simplex(law, search_starts(mixtures, losses[:, 1]))
    assert math.isclose(found.shares.sum(), 1, abs_tol=1e-9)
    assert found.shares.min() >= 0
    cuts = itertools.combinations(range(24 + sources - 1), sources - 1)
    lattice = np.array([np.diff([-1, *cut, 24 + sources - 1]) - 1 for cut in cuts]) / 24
    grid = min(float(law(jnp.array(one))) for one in lattice)
    return {"above_the_grid": max(0.0, found.value - grid)}
