"""One body for every implementation of the grouped matrix product, against a loop over groups in numpy.

Legend: M rows, E groups, K columns of a row, N columns of the result.
"""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.api import IMPLEMENTATIONS

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

SIZES = {
    "one row": [1],
    "one group": [37],
    "all groups but one empty": [0, 1, 0],
    "empty first, last and between": [0, 5, 0, 0, 9, 0],
    "no multiple of anything": [1, 17, 3, 33, 2, 70],
    "one group has all": [0, 0, 129, 0],
    "many small": [1, 2, 1, 1, 3, 1, 0, 1, 2, 1],
}
LEFT = pytest.mark.parametrize("left", [0, 3], ids=["all rows", "rows left over"])


def draw(rng, sizes, left=0, k=6, n=5, dtype=np.float64):
    m = sum(sizes) + left
    shapes = (m, k), (len(sizes), k, n), (m, n)
    return *(jnp.asarray(rng.normal(size=s), dtype) for s in shapes), jnp.asarray(sizes, jnp.int32)


def oracle(lhs, rhs, d_out, sizes):
    """(out, d_lhs, d_rhs), a group at a time."""
    lhs, rhs, d_out = (np.asarray(x, np.float64) for x in (lhs, rhs, d_out))
    out, d_lhs, d_rhs, begin = np.zeros(d_out.shape), np.zeros(lhs.shape), np.zeros(rhs.shape), 0
    for e, size in enumerate(np.asarray(sizes)):
        rows = slice(begin, begin := begin + size)
        out[rows], d_lhs[rows], d_rhs[e] = lhs[rows] @ rhs[e], d_out[rows] @ rhs[e].T, lhs[rows].T @ d_out[rows]
    return out, d_lhs, d_rhs


@functools.partial(jax.jit, static_argnames="implementation")
def run(lhs, rhs, d_out, sizes, implementation):
    out, pull = jax.vjp(lambda a, b: grouped_matmul(a, b, sizes, implementation=implementation), lhs, rhs)
    return out, *pull(d_out)


def error(got, want) -> float:
    return max(
        float(np.linalg.norm(np.asarray(g, np.float64) - w) / (np.linalg.norm(w) or 1.0))
        for g, w in zip(got, want, strict=True)
    )


@implementations
@LEFT
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_is_the_loop(implementation, sizes, left, rng, float64):
    arguments = draw(rng, sizes, left)
    assert error(run(*arguments, implementation), oracle(*arguments)) <= 1e-14


@implementations
def test_no_group_has_a_row(implementation, rng, float64):
    arguments = draw(rng, [0, 0, 0], 4)
    assert all(not np.asarray(x).any() for x in run(*arguments, implementation))


@implementations
def test_random_sizes(implementation, rng, float64):
    """One program, whatever the sizes: blocks begin and end anywhere."""
    for _ in range(20):
        cuts = np.sort(rng.integers(0, 151, 6))
        sizes = np.diff(np.concatenate([[0], cuts])).tolist()
        arguments = draw(rng, sizes, 150 - sum(sizes))
        assert error(run(*arguments, implementation), oracle(*arguments)) <= 1e-14


@implementations
@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-6), (jnp.bfloat16, 2**-8)], ids=["float32", "bfloat16"])
def test_lower_precision(implementation, dtype, bound, rng):
    """Sums in float32: 600 products in bfloat16 would be off by per cents."""
    arguments = draw(rng, SIZES["no multiple of anything"], 2, 600, 40, dtype)
    got = run(*arguments, implementation)
    assert all(x.dtype == dtype for x in got)
    assert error(got, oracle(*arguments)) <= bound


@implementations
def test_same_twice(implementation, rng):
    arguments = draw(rng, SIZES["no multiple of anything"], dtype=np.float32)
    jax.tree.map(np.testing.assert_array_equal, run(*arguments, implementation), run(*arguments, implementation))


def test_a_group_is_bit_for_bit_its_own(rng):
    """What other groups' rows and matrices hold, nan included, does not reach this one."""
    lhs, rhs, d_out, sizes = draw(rng, [7, 20, 9], dtype=np.float32)
    rows = jnp.arange(36)[:, None]
    inside = (rows >= 7) & (rows < 27)
    others = jnp.where(inside, lhs, np.nan), rhs.at[jnp.array([0, 2])].set(np.nan), jnp.where(inside, d_out, np.nan)
    one, other = run(lhs, rhs, d_out, sizes, "xla"), run(*others, sizes, "xla")
    for a, b in zip(one[:2], other[:2], strict=True):
        np.testing.assert_array_equal(np.asarray(a)[7:27], np.asarray(b)[7:27])
    np.testing.assert_array_equal(np.asarray(one[2])[1], np.asarray(other[2])[1])


@implementations
def test_inside_shard_map(implementation, rng, float64):
    """Each shard has its own rows and sizes; the matrices are the same on all, so their gradient is summed."""
    parts = [draw(rng, [3, 0, 5]), draw(rng, [1, 6, 1])]
    rhs = parts[0][1]
    lhs, d_out, sizes = (jnp.concatenate([p[i] for p in parts]) for i in (0, 2, 3))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    rows = P("data")

    @jax.jit
    def both(lhs, rhs, d_out, sizes):
        def local(lhs, rhs, sizes):
            return grouped_matmul(lhs, rhs, sizes, implementation=implementation)

        mapped = jax.shard_map(local, in_specs=(rows, P(), rows), out_specs=rows)
        out, pull = jax.vjp(lambda a, b: mapped(a, b, sizes), lhs, rhs)
        return out, *pull(d_out)

    with jax.set_mesh(mesh):
        got = jax.device_get(both(jax.reshard(lhs, rows), rhs, jax.reshard(d_out, rows), jax.reshard(sizes, rows)))
    wants = [oracle(p[0], rhs, p[2], p[3]) for p in parts]
    want = *(np.concatenate([w[i] for w in wants]) for i in (0, 1)), wants[0][2] + wants[1][2]
    assert error(got, want) <= 1e-14


def test_temporary_memory_does_not_grow_with_the_groups():
    """No row is multiplied by another group's matrix, nothing is held per group and row."""

    def temporary(groups: int) -> int:
        shapes = (512, 32), (groups, 32, 48), (512, 48)
        arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
        lowered = run.lower(*arguments, jax.ShapeDtypeStruct((groups,), jnp.int32), "xla")
        memory = lowered.compile().memory_analysis()
        return memory.temp_size_in_bytes - 2 * groups * 32 * 48 * 4  # the gradient of the matrices, and its copy

    assert temporary(64) < 1.5 * temporary(8)


def test_what_cannot_be_is_refused(rng):
    lhs, rhs, _, sizes = draw(rng, [2, 3], dtype=np.float32)
    plain = inspect.unwrap(grouped_matmul)  # as it is outside of tests, where nothing checks annotations
    with pytest.raises(ValueError, match="rows of 5 columns, 2 matrices of 6 rows and 2 group sizes"):
        plain(lhs[:, :5], rhs, sizes)
    with pytest.raises(ValueError, match="1 group sizes do not go together"):
        plain(lhs, rhs, sizes[:1])
