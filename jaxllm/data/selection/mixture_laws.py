"""Laws that predict the loss of a mixture, fitted to small runs: projektor's, and a data mixing law.

Both predict the logarithm of the loss, in nats per token, at one number of training tokens. ``ProjectedLaw`` maps
two of them, fitted at two sizes, to another size.

projektor (arXiv:2307.02460, section 4) regresses performance on the optimal-transport distance OT(p) between mixture
and target, with coefficients that are quadratic in the shares:

    sum_k (b2_k p_k^2 + b1_k p_k + b0) OT(p) + sum_k (c2_k p_k^2 + c1_k p_k + c0)

Since the shares have the sum 1, b0 and c0 are part of b1 and c1. There are 4K coefficients, about as many as runs, so
the regression here is ridge regression. Both sizes have the same penalty, the one with the least leave-one-out error of
the projected loss: the projection multiplies the noise of the runs, and asks for a larger penalty than each size alone.

The data mixing law (arXiv:2403.16952) is ``floor + exp(sum_k t_k p_k)``; it knows nothing of the texts.

Legend: R runs, K sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

PENALTIES = np.logspace(-6, 0, 25)
"""Penalties of the ridge regression that are tried, per run, of standardised features."""
FLOORS = np.concatenate([[0.0], 1 - np.logspace(-2, 0, 40)[::-1][1:]])
"""Floors of the data mixing law that are tried, as shares of the least loss."""

MixtureLaw = Callable[[Float[Array, " K"]], Float[Array, ""]]
"""Shares -> logarithm of the predicted loss, differentiable."""


def transport_features(shares: Float[Array, " K"], distance: Float[Array, ""]) -> Float[Array, "4*K"]:
    """Features of projektor's regression: shares and their squares, alone and times the distance to the target."""
    own = jnp.concatenate([shares, shares**2])
    return jnp.concatenate([own, distance * own])


@dataclass(frozen=True, eq=False)
class TransportLaw:
    """projektor's law at one size.

    Attributes:
        distance: shares -> distance of the mixture to the target.
        coefficients: [4K], of ``transport_features``.
        intercept: added to them.
        left_out: [R] logarithm of the loss of each run as predicted from the others.
    """

    distance: Callable[[Float[Array, " K"]], Float[Array, ""]]
    coefficients: Float[np.ndarray, " features"]
    intercept: float
    left_out: Float[np.ndarray, " R"]

    def __call__(self, shares: Float[Array, " K"]) -> Float[Array, ""]:
        """Logarithm of the predicted loss."""
        features = transport_features(shares, self.distance(shares))
        return features @ jnp.asarray(self.coefficients, features.dtype) + self.intercept


def fit_transport_laws(
    distance: Callable[[Float[Array, " K"]], Float[Array, ""]],
    shares: Float[np.ndarray, "R K"],
    losses: Float[np.ndarray, "R sizes"],
    weights: Sequence[float] = (1.0,),
) -> list[TransportLaw]:
    """Fits projektor's law at each size, by ridge regression.

    Args:
        distance: shares -> distance of the mixture to the target.
        shares: of the runs.
        losses: of the runs at each size, nats per token.
        weights: of the sizes in the projected log loss (``projection_weights``), whose leave-one-out error chooses the
            penalty.
    """
    rows = [np.asarray(transport_features(jnp.asarray(one), distance(jnp.asarray(one))), np.float64) for one in shares]
    features, target = np.array(rows), np.log(losses)
    middle, scale = features.mean(axis=0), features.std(axis=0) + 1e-12
    centred = target - target.mean(axis=0)
    u, size, v = np.linalg.svd((features - middle) / scale, full_matrices=False)

    def left_out_errors(penalty: float) -> Float[np.ndarray, "R sizes"]:
        """Residual of each run over one minus its leverage, which is its error when it is left out."""
        shrunk = size**2 / (size**2 + penalty)
        leverage = 1 / len(target) + (u**2) @ shrunk
        return (centred - u @ (shrunk[:, None] * (u.T @ centred))) / np.maximum(1 - leverage, 1e-9)[:, None]

    penalty = min(
        PENALTIES * len(target), key=lambda one: float(np.sum((left_out_errors(one) @ np.array(weights)) ** 2))
    )
    coefficients = (v.T @ ((size / (size**2 + penalty))[:, None] * (u.T @ centred))) / scale[:, None]
    intercepts, left_out = target.mean(axis=0) - middle @ coefficients, target - left_out_errors(penalty)
    return [
        TransportLaw(distance, coefficients[:, n], float(intercepts[n]), left_out[:, n]) for n in range(target.shape[1])
    ]


@dataclass(frozen=True, eq=False)
class MixingLaw:
    """Data mixing law at one size, ``floor + exp(sum_k t_k p_k)`` (arXiv:2403.16952).

    Attributes:
        floor: loss, nats per token.
        exponents: t, [K].
        left_out: [R] logarithm of the loss of each run as predicted from the others.
    """

    floor: float
    exponents: Float[np.ndarray, " K"]
    left_out: Float[np.ndarray, " R"]

    def __call__(self, shares: Float[Array, " K"]) -> Float[Array, ""]:
        """Logarithm of the predicted loss."""
        return jnp.log(self.floor + jnp.exp(shares @ jnp.asarray(self.exponents, shares.dtype)))


def fit_mixing_law(shares: Float[np.ndarray, "R K"], losses: Float[np.ndarray, " R"]) -> MixingLaw:
    """Fits a data mixing law: least squares of the logarithm above each of many floors, of which the best is kept."""
    left_out = []
    for number in range(len(losses)):
        floor, exponents = _fit_exponents(np.delete(shares, number, axis=0), np.delete(losses, number))
        left_out.append(math.log(floor + math.exp(shares[number] @ exponents)))
    floor, exponents = _fit_exponents(shares, losses)
    return MixingLaw(floor, exponents, np.array(left_out))


def _fit_exponents(
    shares: Float[np.ndarray, "R K"], losses: Float[np.ndarray, " R"]
) -> tuple[float, Float[np.ndarray, " K"]]:
    found = []
    for floor in FLOORS * losses.min():
        exponents = np.linalg.lstsq(shares, np.log(losses - floor), rcond=None)[0]
        found.append((float(np.sum((floor + np.exp(shares @ exponents) - losses) ** 2)), float(floor), exponents))
    return min(found, key=lambda one: one[0])[1:]


@dataclass(frozen=True, eq=False)
class ProjectedLaw:
    """Law at a size other than those it was fitted at, without further parameters (arXiv:2307.02460, section 4.2).

    The logarithm of the loss is linear in the logarithm of the tokens, for each mixture on a line of its own:

        log L(N) = (log(N / N0) log L(N1) - log(N / N1) log L(N0)) / log(N1 / N0)

    Attributes:
        small, large: laws at two sizes.
        sizes: N0 and N1, tokens.
        size: N, tokens.
    """

    small: MixtureLaw
    large: MixtureLaw
    sizes: tuple[int, int]
    size: float

    def __call__(self, shares: Float[Array, " K"]) -> Float[Array, ""]:
        """Logarithm of the predicted loss."""
        of_small, of_large = projection_weights(self.sizes, self.size)
        return of_large * self.large(shares) + of_small * self.small(shares)


def projection_weights(sizes: tuple[int, int], size: float) -> tuple[float, float]:
    """Weights of the two log losses in the projection to ``size``; their sum is 1.

    Errors of the small runs count in the projection as these weights say, so a far projection needs exact runs.
    """
    span = math.log(sizes[1] / sizes[0])
    return -math.log(size / sizes[1]) / span, math.log(size / sizes[0]) / span


def rank_correlation(first: Float[np.ndarray, " R"], second: Float[np.ndarray, " R"]) -> float:
    """Spearman's rank correlation; equal values have the mean of their ranks."""

    def ranks(values: Float[np.ndarray, " R"]) -> Float[np.ndarray, " R"]:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[inverse]

    a, b = ranks(first), ranks(second)
    if not a.std() or not b.std():
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])
