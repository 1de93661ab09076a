"""CompAct's Adam (arXiv:2410.15352, algorithm 2): gradients of matrices stay projected, and the state has r rows.

The backward pass of ``y = x w`` keeps ``x P`` instead of x and gives ``P^T G`` of r x O, not the gradient G of C x O
(``jaxllm.models.compact_matmul.ProjectedWeight``). Adam's two moments are those of the projected gradient, and the
update is lifted: ``SCALE * P adam(P^T G)``. P is random and is drawn anew every ``refresh`` steps; the moments stay.

Projected are the matrices of matmuls within layers. Experts, embeddings, output matrices, gains and biases have whole
gradients and Adam.

Legend: L layers, C inputs and O outputs of a matrix, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxllm.models.compact_matmul import ProjectedWeight, projection_keys, projection_matrix
from jaxllm.optim.matrix_params import STREAM_AXES, matrix_dims, own_dims, zeros_of_rank
from jaxllm.optim.optimizer_spec import DifferentiatedTree

SCALE = 0.25
"""Factor on the lifted update; GaLore's, which the paper compares with."""


class CompactState(NamedTuple):
    """Optimizer state of projected matrices: steps, and moments [L r 1.. *O] with as many dimensions as the matrix."""

    projected_steps: Int[Array, ""]
    mu: Any
    nu: Any


def input_dims(axes: tuple[str | None, ...]) -> tuple[int, ...]:
    """Dimensions of a parameter that activations are contracted with, where its gradient is projected; else empty.

    Args:
        axes: logical axes of the parameter.
    """
    found = matrix_dims(axes)
    if found is None or found.vocabulary or axes[0] != "layers" or "experts" in axes:
        return ()
    own = own_dims(axes)
    stream = next(i for i in own if axes[i] in STREAM_AXES)
    return (stream,) if stream == own[0] else tuple(i for i in own if i < stream)


def projected_like(param: Float[Array, "..."], inputs: tuple[int, ...], rank: int) -> Float[Array, "..."]:
    """Zeros of the shape and sharding of a parameter's projected gradient.

    Args:
        param: the parameter.
        inputs: its ``input_dims``.
        rank: r; 0 for a quarter of the inputs.
    """
    wide = math.prod(param.shape[i] for i in inputs)
    return zeros_of_rank(param, inputs, min(wide, rank or max(1, wide // 4)))


def scale_by_compact_adam(
    logical_axes: Any, rank: int, refresh: int, b1: float, b2: float, eps: float
) -> optax.GradientTransformation:
    """Adam of projected gradients, whose updates are lifted to the parameters; plain Adam for other parameters.

    Args:
        logical_axes: of the parameters.
        rank: r; 0 for a quarter of a matrix's inputs.
        refresh: steps between two projections.
        b1, b2, eps: Adam's.
    """
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    every = [found for axes in jax.tree.leaves(logical_axes, is_leaf=is_axes) if (found := input_dims(axes))]
    labels = jax.tree.map(lambda axes: "projected" if input_dims(axes) else "whole", logical_axes, is_leaf=is_axes)

    def init(params: Any) -> CompactState:
        leaves, structure = jax.tree.flatten(params)
        zeros = [projected_like(leaf, inputs, rank) for leaf, inputs in zip(leaves, every, strict=True)]
        mu, nu = structure.unflatten(zeros), structure.unflatten([jnp.zeros_like(zero) for zero in zeros])
        return CompactState(jnp.zeros((), jnp.int32), mu, nu)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, CompactState]:
        steps = state.projected_steps + 1
        mu = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, updates, state.mu)
        nu = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * jnp.square(g), updates, state.nu)

        def adam(m: Array, v: Array) -> Array:
            now = steps.astype(m.dtype)
            return m / (1 - b1**now) / (jnp.sqrt(v / (1 - b2**now)) + eps)

        number = state.projected_steps // refresh
        leaves, structure = jax.tree.flatten(params)
        found = zip(leaves, jax.tree.leaves(jax.tree.map(adam, mu, nu)), every, strict=True)
        return structure.unflatten([_lifted(number, *one) for one in found]), CompactState(steps, mu, nu)

    return optax.partition(
        {"projected": optax.GradientTransformation(init, update), "whole": optax.scale_by_adam(b1=b1, b2=b2, eps=eps)},
        labels,
    )


def projected_gradients(
    logical_axes: Any, rank: int, refresh: int
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Step hook: gradients of matrices are projected where they are computed, and do not exist whole.

    The projections are drawn from the optimizer's own count of steps, as its update draws them.

    Args:
        logical_axes, rank, refresh: as for ``scale_by_compact_adam``.
    """
    inputs = jax.tree.map(input_dims, logical_axes, is_leaf=lambda x: isinstance(x, tuple))

    def of_params(params: Any) -> Any:
        def one(param: Array, dims: tuple[int, ...]) -> Array:
            return projected_like(param, dims, rank) if dims else param

        return jax.tree.map(one, params, inputs)

    def gradients(value_and_grad: Callable[..., Any]) -> Callable[..., Any]:
        def take(state: Any, batch: Any, numerics: Any = None) -> Any:
            number = optax.tree.get(state.opt_state, "projected_steps") // refresh

            def into_params(points: Any, params: Any) -> Any:
                def one(point: Array, param: Array, dims: tuple[int, ...]) -> Any:
                    if not dims:
                        return point
                    keys = projection_keys(number, math.prod(param.shape[i] for i in dims), len(param))
                    return ProjectedWeight(jax.lax.stop_gradient(param), point, keys, len(dims))

                return jax.tree.map(one, points, params, inputs)

            return value_and_grad(state.params, batch, numerics, tree=DifferentiatedTree(of_params, into_params))

        return take

    return gradients


def _lifted(number: Array, param: Array, step: Array, inputs: tuple[int, ...]) -> Array:
    """Update of a stack of matrices from Adam's step of its projected gradient, one layer at a time."""
    inner = tuple(param.shape[i] for i in inputs)
    mesh = jax.sharding.get_abstract_mesh()
    place = None if mesh.empty else jax.P(*jax.typeof(param).sharding.spec.partitions[1:])

    def one(layer: tuple[Array, Array]) -> Array:
        key, own = layer
        own = jnp.squeeze(own, tuple(range(1, len(inner))))
        p = projection_matrix(inner, own.shape[0], key, own.dtype)
        return SCALE * jax.lax.dot_general(p, own, (((len(inner),), (0,)), ((), ())), out_sharding=place)

    return jax.lax.map(one, (projection_keys(number, math.prod(inner), len(param)), step))
