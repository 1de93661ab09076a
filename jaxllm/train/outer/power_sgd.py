"""PowerSGD: gradients of matrices are averaged over a mesh axis as two thin factors (arXiv:1905.13727).

Of device r's matrix M_r, with a basis Q that all share and that the last step left:

    P <- orthonormal basis of the mean of M_r Q;   Q <- the mean of M_r^T P;   the mean of M_r is taken to be P Q^T

One power iteration a step: only P and Q are all-reduced, rank (m + n) numbers of m n. Matrices of rank at most ``rank``
are averaged exactly. Arrays that are not smaller as factors (vectors, thin matrices) are averaged whole.

Legend: L stacked matrices, M rows, N columns, K rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import sharding


@dataclass(frozen=True)
class PowerSgd:
    """Low-rank mean of matrices.

    Attributes:
        rank: of the factors, 1 or more.
    """

    rank: int

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"powersgd: rank = {self.rank}; give 1 or more, such as powersgd:4.")

    def shape(self, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
        """Stacked matrices, rows and columns that an array is seen as; None: it is averaged whole."""
        if len(shape) < 2:
            return None
        stack, rows, columns = (1, *shape) if len(shape) == 2 else (shape[0], shape[1], math.prod(shape[2:]))
        return (stack, rows, columns) if self.rank * (rows + columns) < rows * columns else None

    def basis(self, shape: tuple[int, ...], seed: int) -> Float[Array, "L N K"] | None:
        """First basis Q of an array: random, from a seed; None where the array is averaged whole."""
        if (found := self.shape(shape)) is None:
            return None
        stack, _, columns = found
        return jax.random.normal(jax.random.key(seed), (stack, columns, self.rank), jnp.result_type(float))

    def mean(self, x: Array, basis: Float[Array, "L N K"], axis: str) -> tuple[Array, Float[Array, "L N K"]]:
        """Low-rank mean over a mesh axis, and the next basis; inside a ``jax.shard_map`` that is manual over the axis.

        Rows of the matrices stay split over the other mesh axes as they are.

        Args:
            x: array of this device.
            basis: Q, the same on all devices.
            axis: the mesh axis.
        """
        found = self.shape(x.shape)
        assert found is not None
        split = self._row_axes(x)
        matrices = _sharded(x, (None, *split, *(None,) * (x.ndim - 2))[x.ndim == 2 :]).reshape(found)
        basis = basis.astype(x.dtype)
        product = jax.lax.pmean(_einsum("lmn,lnk->lmk", matrices, basis, (None, *split, None)), axis)
        left = jnp.linalg.qr(_sharded(product, (None, None, None)))[0]
        left = _sharded(left, (None, *split, None))
        right = jax.lax.pmean(_einsum("lmn,lmk->lnk", matrices, left, (None, None, None)), axis)
        mean = _einsum("lmk,lnk->lmn", left, right, (None, *split, None)).reshape(x.shape)
        return (
            mean if sharding.current_mesh() is None else jax.sharding.reshard(mean, jax.typeof(x).sharding.spec)
        ), right

    def sent(self, leaf: jax.ShapeDtypeStruct) -> int:
        """Bytes of the arrays of one device that are all-reduced in a step, for a parameter with a sharding."""
        assert leaf.sharding is not None
        local, width = leaf.sharding.shard_shape(leaf.shape), jnp.dtype(leaf.dtype).itemsize
        if (found := self.shape(leaf.shape)) is None:
            return math.prod(local) * width
        stack, _, columns = found
        return stack * (local[0 if len(local) == 2 else 1] + columns) * self.rank * width

    @staticmethod
    def _row_axes(x: Array) -> tuple[Any]:
        """Mesh axes that split the rows of the matrices, as a part of a partition spec."""
        if sharding.current_mesh() is None:
            return (None,)
        spec = jax.typeof(x).sharding.spec
        at = 0 if x.ndim == 2 else 1
        return (spec[at] if at < len(spec) else None,)


def _sharded(x: Array, parts: tuple[Any, ...]) -> Array:
    return x if sharding.current_mesh() is None else jax.sharding.reshard(x, jax.P(*parts))


def _einsum(equation: str, x: Array, y: Array, parts: tuple[Any, ...]) -> Array:
    if sharding.current_mesh() is None:
        return jnp.einsum(equation, x, y)
    return jnp.einsum(equation, x, y, out_sharding=jax.P(*parts))
