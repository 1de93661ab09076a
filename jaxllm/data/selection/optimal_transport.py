"""Entropic optimal transport: Sinkhorn's algorithm in log space, and the debiased Sinkhorn divergence.

Sinkhorn (Cuturi, arXiv:1306.0895) finds the plan P of least ``<P, C> + epsilon KL(P | a b^T)`` with marginals a and b.
In log space it alternates, until the marginals agree,

    f_n = -epsilon log sum_m b_m exp((g_m - C_nm) / epsilon)
    g_m = -epsilon log sum_n a_n exp((f_n - C_nm) / epsilon)

and the least value is ``<a, f> + <b, g>``. Its gradient in the weights a is f, by the envelope theorem, so no iteration
is differentiated. f_n is defined where a_n is zero too, so a share may leave the boundary of the simplex.

The Sinkhorn divergence (arXiv:1810.08278) subtracts half of the cost of each measure to itself, so that it is zero for
equal measures. Legend: N source points, M target points, D embedding width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

MAX_ITERATIONS = 10_000
REGULARISATION = 0.05
"""Epsilon in units of the median ground cost, of distances between mixtures and their target."""


class Potentials(NamedTuple):
    """Dual potentials of an entropic transport problem.

    source, target: f and g. marginal_error: sum of the absolute errors of the plan's source marginal.
    iterations: that were needed.
    """

    source: Float[Array, " N"]
    target: Float[Array, " M"]
    marginal_error: Float[Array, ""]
    iterations: Int[Array, ""]


def default_tolerance(dtype: jnp.dtype) -> float:
    """Marginal error at which Sinkhorn's algorithm stops: 1e-11 in float64, 1e-5 in float32."""
    return 1e-11 if dtype == jnp.float64 else 1e-5


@functools.partial(jax.jit, static_argnames=("tolerance", "max_iterations"))
def sinkhorn(
    source_weights: Float[ArrayLike, " N"],
    target_weights: Float[ArrayLike, " M"],
    cost: Float[ArrayLike, "N M"],
    epsilon: float | Float[Array, ""],
    tolerance: float | None = None,
    max_iterations: int = MAX_ITERATIONS,
) -> Potentials:
    """Sinkhorn's algorithm in log space.

    Args:
        source_weights, target_weights: a and b, each with the sum 1; zeros are legal.
        cost: C.
        epsilon: strength of the entropic regularisation, in units of the cost.
        tolerance: marginal error at which to stop; None: ``default_tolerance``.
        max_iterations: after which it stops in any case; ``Potentials.marginal_error`` says how far it came.
    """
    cost = jnp.asarray(cost)
    log_a, log_b = jnp.log(source_weights), jnp.log(target_weights)
    stop = default_tolerance(cost.dtype) if tolerance is None else tolerance

    def to_source(g: Float[Array, " M"]) -> Float[Array, " N"]:
        return -epsilon * jax.nn.logsumexp(log_b + (g - cost) / epsilon, axis=1)

    def to_target(f: Float[Array, " N"]) -> Float[Array, " M"]:
        return -epsilon * jax.nn.logsumexp(log_a[:, None] + (f[:, None] - cost) / epsilon, axis=0)

    def step(state: Potentials) -> Potentials:
        g = to_target(state.source)
        f = to_source(g)
        # The source marginal of the plan of (old f, new g) is a exp((old f - new f) / epsilon).
        error = jnp.sum(jnp.abs(source_weights * jnp.expm1((state.source - f) / epsilon)))
        return Potentials(f, g, error, state.iterations + 1)

    def unfinished(state: Potentials) -> Array:
        return (state.marginal_error > stop) & (state.iterations < max_iterations)

    rows, columns = cost.shape
    start = Potentials(
        jnp.zeros(rows, cost.dtype),
        jnp.zeros(columns, cost.dtype),
        jnp.array(jnp.inf, cost.dtype),
        jnp.array(0, jnp.int32),
    )
    return jax.lax.while_loop(unfinished, step, start)


def transport_plan(
    source_weights: Float[ArrayLike, " N"],
    target_weights: Float[ArrayLike, " M"],
    cost: Float[ArrayLike, "N M"],
    epsilon: float | Float[Array, ""],
    potentials: Potentials,
) -> Float[Array, "N M"]:
    """Transport plan of given potentials, ``a_n b_m exp((f_n + g_m - C_nm) / epsilon)``."""
    f, g = potentials.source, potentials.target
    weights = jnp.asarray(source_weights)[:, None] * jnp.asarray(target_weights)
    return weights * jnp.exp((f[:, None] + g - jnp.asarray(cost)) / epsilon)


@jax.custom_vjp
def transport_cost(
    source_weights: Float[Array, " N"],
    target_weights: Float[Array, " M"],
    cost: Float[Array, "N M"],
    epsilon: float | Float[Array, ""],
) -> Float[Array, ""]:
    """Least entropic transport cost ``<P, C> + epsilon KL(P | a b^T)``, with gradients in both weights only."""
    return _cost_and_potentials(source_weights, target_weights, cost, epsilon)[0]


def _cost_and_potentials(a: Array, b: Array, cost: Array, epsilon: float | Array) -> tuple[Array, tuple[Array, Array]]:
    found = sinkhorn(a, b, cost, epsilon)
    return a @ found.source + b @ found.target, (found.source, found.target)


def _backward(potentials: tuple[Array, Array], upstream: Array) -> tuple[Array, Array, None, None]:
    f, g = potentials
    return upstream * f, upstream * g, None, None


transport_cost.defvjp(_cost_and_potentials, _backward)


@functools.partial(jax.jit, static_argnames=("tolerance", "max_iterations"))
def self_potential(
    weights: Float[ArrayLike, " N"],
    cost: Float[ArrayLike, "N N"],
    epsilon: float | Float[Array, ""],
    tolerance: float | None = None,
    max_iterations: int = MAX_ITERATIONS,
) -> Float[Array, " N"]:
    """Potential of the transport from a measure to itself, whose two potentials are equal.

    Each iteration takes the mean of the old potential and Sinkhorn's new one, which needs tens of iterations where
    alternating needs hundreds (arXiv:1810.08278, section 3.1). Arguments as those of ``sinkhorn``.
    """
    cost, log_a = jnp.asarray(cost), jnp.log(weights)
    stop = default_tolerance(cost.dtype) if tolerance is None else tolerance

    def step(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        f, _, iterations = state
        new = -epsilon * jax.nn.logsumexp(log_a + (f - cost) / epsilon, axis=1)
        return (f + new) / 2, jnp.sum(jnp.abs(weights * jnp.expm1((f - new) / epsilon))), iterations + 1

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        return (state[1] > stop) & (state[2] < max_iterations)

    start = jnp.zeros(len(cost), cost.dtype), jnp.array(jnp.inf, cost.dtype), jnp.array(0, jnp.int32)
    return jax.lax.while_loop(unfinished, step, start)[0]


@jax.custom_vjp
def self_transport_cost(
    weights: Float[Array, " N"], cost: Float[Array, "N N"], epsilon: float | Float[Array, ""]
) -> Float[Array, ""]:
    """Least entropic transport cost of a measure to itself, with its gradient in the weights only."""
    return _self_cost_and_potential(weights, cost, epsilon)[0]


def _self_cost_and_potential(weights: Array, cost: Array, epsilon: float | Array) -> tuple[Array, Array]:
    f = self_potential(weights, cost, epsilon)
    return 2 * weights @ f, f


def _self_backward(f: Array, upstream: Array) -> tuple[Array, None, None]:
    return 2 * upstream * f, None, None


self_transport_cost.defvjp(_self_cost_and_potential, _self_backward)


def squared_distances(points: Float[ArrayLike, "N D"], others: Float[ArrayLike, "M D"]) -> Float[Array, "N M"]:
    """Half of the squared Euclidean distance of each pair of points: the ground cost."""
    points, others = jnp.asarray(points), jnp.asarray(others)
    norms = jnp.sum(points**2, axis=1)[:, None] + jnp.sum(others**2, axis=1)
    return jnp.maximum(norms / 2 - points @ others.T, 0)


class MixtureDistance:
    """Sinkhorn divergence from a mixture of sources to a target, as a differentiable function of the shares.

    A mixture with shares p is the measure that gives each point of source k the weight ``p_k / n_k``: the sources'
    points are sampled once, and no mixture is ever drawn. The gradient in ``p_k`` is the mean potential of the points
    of source k.

    Args:
        sources: embeddings of each source's points.
        target: embeddings of the target's points.
        regularisation: epsilon in units of the median cost between source and target points.

    Attributes:
        epsilon: in units of the cost.
    """

    def __init__(
        self,
        sources: Sequence[Float[ArrayLike, "_ D"]],
        target: Float[ArrayLike, "M D"],
        regularisation: float = REGULARISATION,
    ):
        points = jnp.concatenate([jnp.asarray(one) for one in sources])
        counts = [len(jnp.asarray(one)) for one in sources]
        self._cost = squared_distances(points, target)
        self._source_cost = squared_distances(points, points)
        self._member = jnp.repeat(jnp.eye(len(counts)) / jnp.array(counts), jnp.array(counts), axis=1)
        self._target_weights = jnp.full(self._cost.shape[1], 1 / self._cost.shape[1])
        self.epsilon = regularisation * float(jnp.median(self._cost))
        own = squared_distances(target, target)
        self._target_to_itself = self_transport_cost(self._target_weights, own, self.epsilon)

    def __call__(self, shares: Float[Array, " K"]) -> Float[Array, ""]:
        """Distance of the mixture with these shares, which have the sum 1."""
        weights = shares @ self._member
        to_itself = self_transport_cost(weights, self._source_cost, self.epsilon)
        to_target = transport_cost(weights, self._target_weights, self._cost, self.epsilon)
        return to_target - (to_itself + self._target_to_itself) / 2
