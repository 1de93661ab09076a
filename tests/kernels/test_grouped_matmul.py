"""Grouped matmul in plain JAX, in float64, by the shared test body.

Legend: M rows, E groups, K columns of a row, N columns of the result.
"""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.api import IMPLEMENTATIONS
from tests import environment
from tests.kernels import grouped_body
from tests.kernels.grouped_body import CASES, PALLAS, PLAIN, Case, draw, error, oracle, program
from tests.kernels.grouped_hopper_body import MUTATIONS as HOPPER_MUTATIONS

implementations = pytest.mark.parametrize("implementation", PLAIN)


def test_every_implementation_is_tested():
    assert {*PLAIN, *PALLAS, *(name for name, _ in HOPPER_MUTATIONS)} == set(IMPLEMENTATIONS)


@pytest.mark.drawn(0.3)
@implementations
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_is_the_loop(implementation, case, rng, float64):
    grouped_body.check(implementation, case, rng, np.float64, 1e-14)


@implementations
def test_random_sizes(implementation, rng, float64):
    """One program, whatever the sizes: blocks begin and end anywhere."""
    run = program(implementation)
    for _ in range(20):
        cuts = np.sort(rng.integers(0, 151, 6))
        sizes = np.diff(np.concatenate([[0], cuts])).tolist()
        arguments = draw(rng, Case(tuple(sizes), 150 - sum(sizes)))
        assert error(run(*arguments), oracle(*arguments)) <= 1e-14


@implementations
@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-6), (jnp.bfloat16, 2**-8)], ids=["float32", "bfloat16"])
def test_lower_precision(implementation, dtype, bound, rng):
    """Accumulation in float32: 600 products summed in bfloat16 would be off by per cents."""
    arguments = draw(rng, CASES["no multiple of anything"]._replace(left=2, k=600, n=40), dtype)
    got = program(implementation)(*arguments)
    assert all(x.dtype == dtype for x in got)
    assert error(got, oracle(*arguments)) <= bound


def test_a_group_is_bit_for_bit_its_own(rng):
    """Rows and matrices of other groups, nan included, do not reach this one."""
    lhs, rhs, d_out, sizes = draw(rng, Case((7, 20, 9)), np.float32)
    run = program("xla")
    rows = jnp.arange(36)[:, None]
    inside = (rows >= 7) & (rows < 27)
    others = jnp.where(inside, lhs, np.nan), rhs.at[jnp.array([0, 2])].set(np.nan), jnp.where(inside, d_out, np.nan)
    one, other = run(lhs, rhs, d_out, sizes), run(*others, sizes)
    for a, b in zip(one[:2], other[:2], strict=True):
        np.testing.assert_array_equal(np.asarray(a)[7:27], np.asarray(b)[7:27])
    np.testing.assert_array_equal(np.asarray(one[2])[1], np.asarray(other[2])[1])


@implementations
def test_inside_shard_map(implementation, rng, float64):
    """Each shard has its own rows and sizes; the matrices are the same on all, so their gradient is summed."""
    parts = [draw(rng, Case((3, 0, 5))), draw(rng, Case((1, 6, 1)))]
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
        lowered = program("xla").lower(*arguments, jax.ShapeDtypeStruct((groups,), jnp.int32))
        memory = lowered.compile(environment.AS_EVER).memory_analysis()
        return memory.temp_size_in_bytes - 2 * groups * 32 * 48 * 4  # the gradient of the matrices, and its copy

    assert temporary(64) < 1.5 * temporary(8)


def test_what_cannot_be_is_refused(rng):
    lhs, rhs, _, sizes = draw(rng, Case((2, 3)), np.float32)
    plain = inspect.unwrap(grouped_matmul)  # as it is outside of tests, where nothing checks annotations
    with pytest.raises(ValueError, match="rows of 5 columns, 2 matrices of 6 rows and 2 group sizes"):
        plain(lhs[:, :5], rhs, sizes)
    with pytest.raises(ValueError, match="1 group sizes do not go together"):
        plain(lhs, rhs, sizes[:1])
