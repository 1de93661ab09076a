"""Pallas kernels of the grouped matmul, interpreted, by the shared test body.

TPU kernels run in TPU interpret mode, with races detected and memory full of nan.
"""

from __future__ import annotations

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import explain
from pallas_kernels._compat import interpreting
from pallas_kernels.grouped_matmul import config, grouped_matmul, pallas_gpu
from tests.kernels import grouped_body
from tests.kernels.grouped_aot import SHAPES
from tests.kernels.grouped_body import CASES, PALLAS, Case, draw, error, oracle

implementations = pytest.mark.parametrize("implementation", PALLAS)
small_pieces = pytest.mark.usefixtures("pieces")
NAMES = ("one row", "no multiple of anything", "rows left over")
"""The others are tried by the proofs with mutants."""


@pytest.fixture
def pieces():
    with grouped_body.small_pieces():
        yield


@pytest.mark.drawn(0.3)
@small_pieces
@implementations
@pytest.mark.parametrize("name", NAMES)
def test_shared_body(implementation, name, rng):
    grouped_body.check(implementation, CASES[name], rng)


@small_pieces
@implementations
@hypothesis.settings(max_examples=1, phases=[hypothesis.Phase.generate])
@hypothesis.given(
    sizes=st.lists(st.integers(0, 25), min_size=1, max_size=6),
    left=st.integers(0, 20),
    k=st.integers(1, 20),
    n=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_drawn_shapes(implementation, sizes, left, k, n, seed):
    hypothesis.assume(sum(sizes) + left)
    grouped_body.check(implementation, Case(tuple(sizes), left, k, n), np.random.default_rng(seed))


@pytest.mark.drawn(0.3)
@implementations
def test_bfloat16_in_the_tiles_of_a_real_model(implementation, rng):
    """A part of Qwen3-30B-A3B: 6 of its experts, all of a quarter's columns. Accumulation is in float32."""
    sizes = (70, 0, 130, 1, 128, 59)
    case = Case(sizes, 0, 512, 192)
    grouped_body.check(implementation, case, rng, jnp.bfloat16, 2**-8)


def test_inside_shard_map(rng):
    """Each shard has its own rows and sizes; the matrices are the same on all, so their gradient is summed.

    The GPU's interpreter knows nothing of varying axes; grouped_aot.py compiles that kernel inside a shard_map.
    """
    parts = [draw(rng, Case((3, 0, 5)), np.float32), draw(rng, Case((1, 6, 1)), np.float32)]
    rhs = parts[0][1]
    lhs, d_out, sizes = (jnp.concatenate([p[i] for p in parts]) for i in (0, 2, 3))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    rows = P("data")
    local = functools.partial(grouped_matmul, implementation="pallas_tpu")

    @jax.jit
    def both(lhs, rhs, d_out, sizes):
        mapped = jax.shard_map(local, in_specs=(rows, P(), rows), out_specs=rows)
        out, pull = jax.vjp(lambda a, b: mapped(a, b, sizes), lhs, rhs)
        return out, *pull(d_out)

    with jax.set_mesh(mesh), interpreting():
        got = jax.device_get(both(jax.reshard(lhs, rows), rhs, jax.reshard(d_out, rows), jax.reshard(sizes, rows)))
    wants = [oracle(p[0], rhs, p[2], p[3]) for p in parts]
    want = *(np.concatenate([w[i] for w in wants]) for i in (0, 1)), wants[0][2] + wants[1][2]
    assert error(got, want) <= 1e-6


@pytest.mark.parametrize("kind", [*config._TPU, "TPU v99"])
def test_tiles_fit(kind):
    limits = config.tpu_limits(kind)
    for x in SHAPES.values():
        item = 2 if x.dtype == "bfloat16" else 4
        product = config.matmul_tiles(kind, x.m, x.e, x.k, x.n, item)
        outer = config.outer_tiles(kind, x.m, x.e, x.k, x.n, item)
        held = item * (product.rows * product.inner + product.inner * product.columns)
        assert held < limits.tiles_bytes
        assert item * outer.rows * (outer.left + outer.columns) + 4 * outer.left * outer.columns < limits.tiles_bytes
        for size, whole in ((product.inner, x.k), (product.columns, x.n), (outer.left, x.k), (outer.columns, x.n)):
            assert size == whole or size % 128 == 0


def test_named_kernels_do_not_fall_back():
    lhs, rhs, sizes = jnp.zeros((3, 4)), jnp.zeros((1, 4, 5)), jnp.array([3])
    with pytest.raises(NotImplementedError, match="pallas_tpu needs a TPU, not cpu"):
        grouped_matmul(lhs, rhs, sizes, implementation="pallas_tpu")
    with pytest.raises(NotImplementedError, match="pallas_gpu needs a GPU, not cpu"):
        grouped_matmul(lhs, rhs, sizes, implementation="pallas_gpu")


@implementations
def test_limits_are_named(implementation, float64, monkeypatch):
    lhs, rhs, sizes = jnp.zeros((3, 4)), jnp.zeros((1, 4, 5)), jnp.array([3])
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    call = functools.partial(grouped_matmul, implementation=implementation)
    low, low_rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    with interpreting():
        with pytest.raises(NotImplementedError, match=r"not lhs float64\[3, 4\], rhs float64\[1, 4, 5\]"):
            call(lhs, rhs, sizes)
        with pytest.raises(NotImplementedError, match=r"no empty arrays: lhs float32\[0, 4\]"):
            call(low[:0], low_rhs, sizes)
        if implementation == "pallas_gpu":
            monkeypatch.setattr(pallas_gpu, "MAX_ELEMENTS", 20)
            with pytest.raises(NotImplementedError, match=r"fewer than 2\^31 elements: .* rhs \[1, 4, 5\]"):
                call(low, low_rhs, sizes)
        with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match=r"inside a jax.shard_map .* over data"):
            jax.jit(call)(low, low_rhs, sizes)


def test_none_chooses_the_kernel_of_the_platform():
    on_tpu, on_gpu = (explain("grouped_matmul", platform=name) for name in ("tpu", "gpu"))
    assert on_tpu.startswith("grouped_matmul on tpu: pallas_tpu")
    assert on_gpu.startswith("grouped_matmul on gpu: pallas_gpu")
