"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (arXiv:2409.11321, algorithm 3).

For a gradient G of m x n, L and R are running means of ``G G^T`` and ``G^T G``, and Q_L and Q_R their eigenvectors;
the second moment is that of ``Q_L^T G Q_R``. The first step only computes the eigenvectors and updates nothing; every
``refresh`` steps they follow by one step of orthogonal iteration. A side of more than 10,000 keeps its own axes, as in
its authors' code.

Where gradients have a null space, such as along a side longer than the other after one step, its eigenvectors would be
determined by rounding and differ between meshes; a small ascending diagonal is added to L and R before decomposition.

Legend: S stacked matrices, m rows, n columns.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxllm.optim.matrix_params import MatrixDims, decompose_each, from_matrices, to_matrices, zeros_of_rank
from jaxllm.optim.param_groups import auto_sharded, partition_matrices

MAX_BASIS_SIZE = 10_000
"""Largest side that has an eigenbasis."""
JITTER = 1e-3
"""Largest element of the added diagonal, relative to the mean of the diagonal it is added to."""


class SoapState(NamedTuple):
    """Optimizer state by matrix, dimensions as G's: moments [S m n]; per side a running mean and basis [S m m]."""

    count: Int[Array, ""]
    first: Any
    second: Any
    means: Any
    bases: Any


def scale_by_soap(logical_axes: Any, refresh: int, b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """SOAP for matrices within layers; Adam for embeddings, output heads, gains and biases.

    Args:
        logical_axes: of the parameters.
        refresh: steps between two updates of the eigenbases.
        b1, b2, eps: Adam's.
    """

    def of_matrices(found: list[MatrixDims]) -> optax.GradientTransformation:
        def init(params: Any) -> SoapState:
            leaves, structure = jax.tree.flatten(params)
            squares = structure.unflatten(
                [tuple(_square(leaf, side, of) for side in of[:2]) for leaf, of in zip(leaves, found, strict=True)]
            )
            zeros = jax.tree.map(jnp.zeros_like, params)
            again = jax.tree.map(jnp.zeros_like, (zeros, squares))
            return SoapState(jnp.zeros((), jnp.int32), zeros, again[0], squares, again[1])

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            del params
            leaves, structure = jax.tree.flatten(updates)
            olds = [structure.flatten_up_to(part) for part in state[1:]]
            made = [_step(state.count, grad, of, *old) for grad, of, *old in zip(leaves, found, *olds, strict=True)]
            out, *news = (structure.unflatten(part) for part in zip(*made, strict=True))
            return out, SoapState(state.count + 1, *news)

        def _step(
            count: Array,
            grad: Array,
            of: MatrixDims,
            first: Array,
            second: Array,
            means: tuple[Array, ...],
            bases: tuple[Array, ...],
        ) -> tuple[Any, ...]:
            whole, m, v = (to_matrices(x, of.rows, of.columns) for x in (grad, first, second))
            begun = (count > 0).astype(whole.dtype)
            rows, columns = (None if not x.ndim else to_matrices(x, of.rows, of.columns) for x in bases)
            seen = _turn(whole, rows, columns)
            m = jnp.where(count > 0, b1 * m + (1 - b1) * whole, m)
            v = jnp.where(count > 0, b2 * v + (1 - b2) * jnp.square(seen), v)
            steps = jnp.maximum(count, 1).astype(whole.dtype)
            adam = _turn(m, rows, columns) / (1 - b1**steps) / (jnp.sqrt(v / (1 - b2**steps)) + eps)
            back = [None if basis is None else basis.mT for basis in (rows, columns)]
            out = begun * _turn(adam, *back)

            new_means, new_bases = list(means), list(bases)
            which = jnp.where(count == 0, 2, jnp.where(count % refresh == 0, 1, 0))
            for side, basis in enumerate((rows, columns)):
                if basis is None:
                    continue
                square = jnp.einsum(("smn,skn->smk", "smn,smk->snk")[side], whole, whole)
                now = b2 * to_matrices(means[side], of.rows, of.columns) + (1 - b2) * square
                new = [
                    lambda basis, v: (basis, v),
                    lambda basis, v, now=now, side=side: _iterated(_lifted(now), basis, v, side),
                    lambda basis, v, now=now: (_eigenvectors(_lifted(now)), v),
                ]
                basis, v = jax.lax.switch(which, new, basis, v)
                new_means[side], new_bases[side] = (
                    from_matrices(x, means[side].shape, of.rows, of.columns) for x in (now, basis)
                )
            result = (from_matrices(x, grad.shape, of.rows, of.columns) for x in (out, m, v))
            return *result, tuple(new_means), tuple(new_bases)

        return auto_sharded(optax.GradientTransformation(init, update))

    return partition_matrices(logical_axes, of_matrices, optax.scale_by_adam(b1=b1, b2=b2, eps=eps))


def _square(leaf: Array, side: tuple[int, ...], of: MatrixDims) -> Array:
    """Zeros for the running mean of one side, sharded as that side; a scalar for a side without an eigenbasis."""
    size = math.prod(leaf.shape[i] for i in side)
    other = of.columns if side == of.rows else of.rows
    return jnp.zeros((), leaf.dtype) if size > MAX_BASIS_SIZE else zeros_of_rank(leaf, other, size)


def _turn(x: Float[Array, "S m n"], rows: Array | None, columns: Array | None) -> Float[Array, "S m n"]:
    """Change of basis: ``rows^T x columns``."""
    if rows is not None:
        x = jnp.einsum("smk,smn->skn", rows, x)
    return x if columns is None else jnp.einsum("smn,snk->smk", x, columns)


def _lifted(mean: Float[Array, "S k k"]) -> Float[Array, "S k k"]:
    """Running mean with the small ascending diagonal added."""
    k = mean.shape[-1]
    size = jnp.trace(mean, axis1=1, axis2=2)[:, None, None] / k
    return mean + JITTER * size * jnp.diag(jnp.arange(1, k + 1, dtype=mean.dtype) / k)


def _eigenvectors(mean: Float[Array, "S k k"]) -> Float[Array, "S k k"]:
    """Eigenvectors, by descending eigenvalue."""
    return decompose_each(lambda stack: jnp.linalg.eigh(stack)[1], mean)[:, :, ::-1]


def _iterated(
    mean: Float[Array, "S k k"], basis: Float[Array, "S k k"], v: Float[Array, "S m n"], side: int
) -> tuple[Array, Array]:
    """One step of orthogonal iteration, columns by descending estimate, as the second moment (algorithm 4)."""
    order = jnp.argsort(-jnp.einsum("smk,smn,snk->sk", basis, mean, basis), axis=-1)
    basis = jnp.take_along_axis(basis, order[:, None, :], axis=2)
    v = jnp.take_along_axis(v, jnp.expand_dims(order, 2 - side), axis=1 + side)
    return decompose_each(lambda stack: jnp.linalg.qr(stack)[0], mean @ basis), v
