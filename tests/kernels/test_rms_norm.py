"""RMS norm, by the shared test body; and what it saves for the backward pass."""

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
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rms_norm.api import IMPLEMENTATIONS
from tests import environment
from tests.kernels import rms_norm_body
from tests.kernels.rms_norm_body import CASES, Case, draw, errors, oracle

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@implementations
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_is_the_formula(implementation, case, rng, float64):
    rms_norm_body.check(implementation, case, rng, np.float64, 1e-14)


@implementations
@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-6), (jnp.bfloat16, 2**-8)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["odd", "gain less one", "a part of Llama-3.1-8B"])
def test_lower_precision(implementation, dtype, bound, name, rng):
    rms_norm_body.check(implementation, CASES[name], rng, dtype, bound)


@implementations
@hypothesis.settings(max_examples=5, phases=[hypothesis.Phase.generate])
@hypothesis.given(
    rows=st.lists(st.integers(1, 5), max_size=2).map(tuple),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=2).map(tuple),
    plus_one=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_drawn_shapes(implementation, rows, shape, plus_one, seed):
    with environment.x64():
        case = Case(rows, shape, 0.1, plus_one)
        rms_norm_body.check(implementation, case, np.random.default_rng(seed), np.float64, 1e-14)


def test_keeps_its_input_and_a_number_a_row(rng):
    x, gain, _ = draw(rng, Case((16, 8), (256,)), jnp.bfloat16)

    def kept(implementation: str) -> int:
        _, pull = jax.vjp(lambda x, gain: rms_norm(x, gain, eps=1e-6, implementation=implementation), x, gain)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(pull))

    assert kept("xla") <= x.nbytes + gain.nbytes + 4 * x.size // 256
    assert kept("reference") >= 3 * x.nbytes


@implementations
@pytest.mark.parametrize("mapped", [True, False], ids=["shard_map", "explicit axes"])
def test_on_a_mesh_is_as_on_one_device(implementation, mapped, rng, float64):
    """Rows over `data`: the gain's gradient is summed over it."""
    case = Case((6,), (8,), 0.1)
    arguments = x, gain, d_out = draw(rng, case)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    local = functools.partial(rms_norm, eps=case.eps, implementation=implementation)
    rows = P("data")

    @jax.jit
    def run(x, gain, d_out):
        call = jax.shard_map(local, in_specs=(rows, P()), out_specs=rows) if mapped else local
        out, pull = jax.vjp(call, x, gain)
        return out, *pull(d_out)

    with jax.set_mesh(mesh):
        got = jax.device_get(run(jax.reshard(x, rows), gain, jax.reshard(d_out, rows)))
    assert all(e <= 1e-14 for e in errors(got, oracle(*arguments, case), arguments, case).values())


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"x \[2, 3\] and gain \[2\] do not go together"):
        rms_norm(jnp.ones((2, 3)), jnp.ones(2), eps=1e-6)


def test_can_be_explained():
    assert explain("rms_norm", platform="tpu").startswith("rms_norm on tpu: xla")
