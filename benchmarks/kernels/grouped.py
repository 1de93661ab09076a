"""Products of rows with their group's matrix: ours, ``jax.lax.ragged_dot``, and a dense product of the same FLOPs.

Legend: M rows, K columns of a row, E groups, N columns of the result.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.measure import Cost, Work, hopper, ours
from pallas_kernels.grouped_matmul import grouped_matmul


@dataclass(frozen=True)
class Shape:
    """``m`` rows in ``e`` groups of drawn sizes, some of them empty."""

    m: int
    k: int
    n: int
    e: int
    dtype: str = "bfloat16"

    def sizes(self) -> np.ndarray:
        """Group sizes as a router gives them: far from equal."""
        rng = np.random.default_rng(0)
        return rng.multinomial(self.m, rng.dirichlet(np.full(self.e, 0.5))).astype(np.int32)

    def cost(self, *, backward: bool) -> Cost:
        """One product forward, two backward; rows once, and the matrices of groups that are not empty."""
        used = int(np.count_nonzero(self.sizes()))
        item = jnp.dtype(self.dtype).itemsize
        rows, results, matrices = self.m * self.k, self.m * self.n, used * self.k * self.n
        if backward:  # reads lhs, rhs, d_out; writes d_lhs and all of d_rhs
            return Cost(4 * self.m * self.k * self.n, item * (2 * rows + results + matrices + self.e * self.k * self.n))
        return Cost(2 * self.m * self.k * self.n, item * (rows + results + matrices))


SHAPES = {
    "Mixtral-8x7B, 8k tokens": Shape(16384, 4096, 14336, 8),
    "gpt-oss-20b, 8k tokens": Shape(32768, 2880, 5760, 32),
    "DeepSeek-V3, 4k tokens, 32 experts": Shape(4096, 7168, 4096, 32),
}
TINY = {"tiny": Shape(40, 16, 24, 4, "float32")}


def work(shape: Shape) -> Work:
    """Work of a shape: FLOPs, bytes, and the contenders to time."""
    keys = jax.random.split(jax.random.key(0), 3)
    lhs = jax.random.normal(keys[0], (shape.m, shape.k), shape.dtype)
    rhs = jax.random.normal(keys[1], (shape.e, shape.k, shape.n), shape.dtype)
    d_out = jax.random.normal(keys[2], (shape.m, shape.n), shape.dtype)
    names = (*ours(), *hopper(), "ragged_dot")

    def dense(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return lhs @ rhs[0]

    return Work(
        dataclasses.asdict(shape),
        (lhs, rhs, jnp.asarray(shape.sizes())),
        functools.partial(grouped_matmul, implementation="xla"),
        {**{name: functools.partial(grouped_matmul, implementation=name) for name in names}, "dense product": dense},
        (shape.cost(backward=False), shape.cost(backward=True)),
        differentiated=2,
        d_out=d_out,
        own_truth={"dense product": dense},
    )
