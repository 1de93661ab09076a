"""Messages between stages that are projected onto a subspace, in those replicas whose links are slow.

A slow replica sends x U, where U has r orthonormal columns, instead of a message x of width D: r/D of the bytes. The
receiver of an activation fills what the projection took with the embedding e of the same tokens, which every stage has:

    activations    x <- U U^T x + (I - U U^T) e
    gradients     dx <- U U^T dx,  de <- de + (I - U U^T) dx

These are the gradients of the model with the projection in it. With r = D nothing is lost. Heterogeneous SparseLoCo
(arXiv:2601.02360); U here is fixed and random.

Legend: B batch, S sequence, D embed, r rank.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Pairs = tuple[tuple[int, int], ...]


class SlowLinks(NamedTuple):
    """Replicas whose messages between stages are projected.

    Attributes:
        replicas: R, size of the mesh axis ``replica``, which is manual where messages are sent.
        slow: numbers of the slow replicas.
        rank: r.
    """

    replicas: int
    slow: tuple[int, ...]
    rank: int

    def is_here(self) -> Array:
        """Whether this device is in a slow replica."""
        return jnp.isin(jax.lax.axis_index("replica"), jnp.asarray(self.slow))

    def basis(self, width: int, dtype: jnp.dtype) -> Float[Array, "D r"]:
        """U, the same in every step and on every device."""
        wide = jnp.promote_types(dtype, jnp.float32)
        columns = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (width, self.rank), wide))[0]
        return columns.astype(dtype)

    def send(
        self, message: Float[Array, "B S D"], basis: Float[Array, "D r"], stages: int, pairs: Pairs
    ) -> Float[Array, "B S D"]:
        """Message that arrives from the neighbour; in a slow replica the projection of it.

        Args:
            message: of this device.
            basis: U.
            stages: P.
            pairs: (source, destination) stages.
        """

        def permuted(x: Array, replicas: list[int]) -> Array:
            there = [(r * stages + a, r * stages + b) for r in replicas for a, b in pairs]
            return jax.lax.ppermute(x, ("replica", "stage"), there)

        arrived = permuted(message @ basis, list(self.slow)) @ basis.T
        fast = [r for r in range(self.replicas) if r not in self.slow]
        return jnp.where(self.is_here(), arrived, permuted(message, fast)) if fast else arrived


def lost(x: Float[Array, "B S D"], basis: Float[Array, "D r"]) -> Float[Array, "B S D"]:
    """(I - U U^T) x: what a projection takes of x."""
    return x - (x @ basis) @ basis.T
