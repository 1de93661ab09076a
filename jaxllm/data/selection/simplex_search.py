"""Search over the shares of a mixture: mirror descent on the simplex, and mixtures spread over it.

Legend: K sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxllm.files import DataError

CANDIDATES = 2_000
MOST_STEPS = 500
LEAST_SHARE = 0.05


def round_shares(shares: Float[np.ndarray, " K"], parts: int) -> Float[np.ndarray, " K"]:
    """Shares as multiples of ``1 / parts`` with the sum 1, by the largest remainders."""
    exact = np.asarray(shares, np.float64) * parts
    whole = np.floor(exact).astype(np.int64)
    missing = parts - int(whole.sum())
    whole[np.argsort(-(exact - whole), kind="stable")[:missing]] += 1
    return whole / parts


def spread_mixtures(
    sources: int, count: int, *, parts: int = 100, least: float = LEAST_SHARE, seed: int = 0
) -> Float[np.ndarray, "count K"]:
    """Mixtures spread over the simplex: the equal one first, then always the candidate farthest from those chosen.

    Candidates are multiples of ``1 / parts``: those with one source as large as can be, with two equal ones, and draws
    from the uniform distribution. The mixtures of a smaller count are the first ones of a larger count.

    Args:
        least: share that every source has, as far as half of the equal share allows. A run without one of the sources
            may never see some tokens of the target, and its loss then says little about other mixtures.

    Raises:
        DataError: there are fewer such mixtures.
    """
    floor = min(least, 0.5 / sources)
    eye = np.eye(sources)
    pairs = [(eye[i] + eye[j]) / 2 for i in range(sources) for j in range(i)]
    drawn = np.random.default_rng(seed).dirichlet(np.ones(sources), CANDIDATES)
    first = round_shares(np.full(sources, 1 / sources), parts)
    inside = floor + (1 - sources * floor) * np.array([*eye, *pairs, *drawn])
    candidates = np.unique([round_shares(one, parts) for one in inside], axis=0)
    if count > len(candidates):
        raise DataError(
            f"{count} different mixtures of {sources} sources, but in steps of 1/{parts} there are {len(candidates)}; "
            "take fewer runs"
        )
    chosen = [first]
    nearest = np.linalg.norm(candidates - first, axis=1)
    while len(chosen) < count:
        chosen.append(candidates[int(np.argmax(nearest))])
        nearest = np.minimum(nearest, np.linalg.norm(candidates - chosen[-1], axis=1))
    return np.array(chosen[:count])


@dataclass(frozen=True)
class SimplexMinimum:
    """Minimum that a search over the simplex found: shares, value, and the steps of mirror descent that it took."""

    shares: Float[np.ndarray, " K"]
    value: float
    steps: int


def minimise_on_simplex(
    loss: Callable[[Float[Array, " K"]], Float[Array, ""]],
    starts: Float[np.ndarray, "starts K"],
    *,
    steps: int = MOST_STEPS,
    tolerance: float = 1e-7,
) -> SimplexMinimum:
    """Mirror descent with the entropy (exponentiated gradient) from each start; returns the least value found.

    ``p <- p exp(-rate * gradient) / sum``, which stays on the simplex. The rate doubles after a step that lowers the
    loss and is halved until one does (backtracking), so the loss never rises.

    Args:
        loss: differentiable function of the shares; it is compiled.
        starts: shares to start from. Zeros stay zero, so a start lies inside the simplex.
        steps: at most, from each start.
        tolerance: a start is finished when a step lowers the loss by less.
    """
    evaluate = jax.jit(jax.value_and_grad(loss))
    best: SimplexMinimum | None = None
    for start in starts:
        found = _descend(evaluate, jnp.asarray(start), steps, tolerance)
        if best is None or found.value < best.value:
            best = found
    assert best is not None, "minimise_on_simplex needs a start"
    return best


def _descend(evaluate: Callable, shares: Array, steps: int, tolerance: float) -> SimplexMinimum:
    value, gradient = evaluate(shares)
    rate = 1.0 / max(float(jnp.max(jnp.abs(gradient - shares @ gradient))), 1e-12)
    count = 0
    while count < steps:
        lowered = None
        while count < steps:
            count += 1
            logits = jnp.log(shares) - rate * (gradient - shares @ gradient)
            moved = jax.nn.softmax(logits)
            there, its_gradient = evaluate(moved)
            if there < value:
                lowered = float(value - there)
                shares, value, gradient = moved, there, its_gradient
                rate *= 2
                break
            rate /= 2
            if rate * float(jnp.max(jnp.abs(gradient))) < 1e-9:
                break
        if lowered is None or lowered < tolerance:
            break
    return SimplexMinimum(np.asarray(shares, np.float64), float(value), count)
