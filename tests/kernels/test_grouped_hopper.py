"""Mosaic-GPU kernels of the grouped matmul, in GPU interpret mode: values, and what they refuse by name."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import explain
from pallas_kernels._compat import interpreting
from pallas_kernels._mosaic_gpu import HOPPER
from pallas_kernels.grouped_matmul import grouped_matmul
from tests.kernels import grouped_hopper_aot
from tests.kernels.grouped_body import draw, program
from tests.kernels.grouped_hopper_body import CASES, MUTATIONS, PACKAGE, check
from tests.proofs.kernels.mutants import mutated

call = functools.partial(grouped_matmul, implementation="mosaic_gpu")


@pytest.mark.drawn(0.2)
@pytest.mark.parametrize("name", CASES)
def test_shared_body(name, rng):
    check("mosaic_gpu", CASES[name], rng)


@pytest.mark.drawn(0.2)
def test_float16(rng):
    check("mosaic_gpu", CASES["many in a tile"], rng, "float16", 2**-10)


@pytest.mark.drawn(0.2)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy multiplies in the interpreter
def test_infinite_rows_of_a_group_stay_in_it():
    """Gradients of the others are those without it, bit for bit."""
    lhs, rhs, d_out, sizes = draw(np.random.default_rng(0), CASES["many in a tile"], jnp.bfloat16)
    run = program("mosaic_gpu")
    with interpreting():
        clean = run(lhs, rhs, d_out, sizes)
        wild = run(lhs.at[6:36].set(jnp.inf), rhs, d_out.at[6:36].set(-jnp.inf), sizes)
    others = np.array([0, 1, 4, 5])
    for one, other in zip(clean[:2], wild[:2], strict=True):
        np.testing.assert_array_equal(np.delete(one, np.s_[6:36], 0), np.delete(other, np.s_[6:36], 0))
    np.testing.assert_array_equal(clean[2][others], wild[2][others])
    assert not np.isfinite(np.asarray(wild[2][3], np.float32)).any()


def test_a_race_is_a_failed_check(rng):
    """Every tile's copy writes the columns of the first: of jax 0.10 the values are wrong, newer ones end the call."""
    mistake = MUTATIONS["mosaic_gpu", "columns of the first tile"]
    with mutated(PACKAGE, *mistake), pytest.raises(AssertionError):
        check("mosaic_gpu", CASES["groups end in tiles"], rng)


@pytest.mark.drawn(0.2)
def test_a_real_shape_is_lowered_for_an_h100():
    result = grouped_hopper_aot.compile_cell("gpt-oss-20b", "h100:1x2")
    assert result["temp_bytes"] < 1e-3 * result["bytes"]


def test_limits_are_named():
    lhs, rhs, sizes = jnp.zeros((128, 64), jnp.bfloat16), jnp.zeros((1, 64, 64), jnp.bfloat16), jnp.array([3])
    with pytest.raises(NotImplementedError, match="mosaic_gpu needs a GPU, not cpu"):
        call(lhs, rhs, sizes)
    with interpreting():
        with pytest.raises(NotImplementedError, match="all in bfloat16 or all in float16, not lhs float32"):
            call(lhs.astype(jnp.float32), rhs.astype(jnp.float32), sizes)
        with pytest.raises(
            NotImplementedError, match=r"rows in multiples of 128 .* not lhs \[100, 64\] and 64 columns"
        ):
            call(lhs[:100], rhs, sizes)
        with pytest.raises(NotImplementedError, match=r"columns in multiples of 64, not .* 40 columns"):
            call(lhs, rhs[..., :40], sizes)


def test_only_hopper_has_wgmma():
    names = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA B200", "NVIDIA A100"
    assert [bool(HOPPER.search(name)) for name in names] == [True] * 4 + [False] * 2


def test_it_is_used_where_it_is_named():
    assert "mosaic_gpu: used where it is named" in explain("grouped_matmul", platform="gpu")
