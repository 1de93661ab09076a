"""Pallas kernels of flash attention, interpreted, by the shared test body.

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
from pallas_kernels.flash_attention import flash_attention
from tests.kernels import flash_body
from tests.kernels.flash_body import CASES, Case, draw, error, forward_and_vjp

PALLAS = ("pallas_tpu", "pallas_gpu")
implementations = pytest.mark.parametrize("implementation", PALLAS)
NAMES = (
    *("one token", "more bands than one band's length", "packed", "one query, many keys", "everything"),
    *("everything, heads that fill lanes", "only values fill lanes"),
)


@pytest.fixture(autouse=True)
def small_pieces():
    with flash_body.small_pieces():
        yield


@pytest.mark.drawn(0.3)
@implementations
@pytest.mark.parametrize("name", NAMES)
def test_shared_body(implementation, name, rng):
    """The shared body with at most two rows in a batch: an interpreted kernel takes time for each block."""
    case = CASES[name]
    flash_body.check(
        implementation, case._replace(b=1 if name.startswith(("packed", "everything")) else min(case.b, 2)), rng
    )


@st.composite
def shapes(draw) -> Case:
    """Odd lengths, GQA, head dims and windows that fit no block."""
    k, group, s = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 35))
    mask = draw(st.sampled_from(["index", "packed", "positions", "both"]))
    return Case(
        b=draw(st.integers(1, 2)),
        s=s,
        t=s if mask in ("index", "packed") else draw(st.integers(1, 35)),
        n=k * group,
        k=k,
        h=draw(st.integers(1, 9)),
        mask=mask,
        v=draw(st.none() | st.integers(1, 9)),
        window=draw(st.none() | st.integers(1, 20)),
        softcap=draw(st.none() | st.sampled_from([0.7, 5.0])),
        sinks=draw(st.booleans()),
    )


@pytest.mark.drawn(0.3)
@implementations
@hypothesis.settings(max_examples=1, phases=[hypothesis.Phase.generate])
@hypothesis.given(case=shapes(), seed=st.integers(0, 2**32 - 1))
def test_drawn_shapes(implementation, case, seed):
    flash_body.check(implementation, case, np.random.default_rng(seed))


@pytest.mark.drawn(0.3)
@implementations
def test_bfloat16(implementation, rng):
    """Kernels keep the output in bfloat16, and its rounding reaches the gradients of queries and keys.

    Over 60 tokens of 8 numbers its share of them is 2^-8 in nearly every draw; over few tokens it can be any.
    """
    inputs, extra = draw(rng, Case(2, 30, 30, 2, 1, 8, "packed"))
    low = [x.astype(jnp.bfloat16) for x in inputs]
    with interpreting():
        got = forward_and_vjp(implementation, low, extra)
    want = forward_and_vjp("reference", [x.astype(np.float32) for x in low], extra)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(got))
    assert all(error(a, b) <= 2**-7 for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


@pytest.mark.drawn(0.3)
def test_inside_shard_map_with_shared_keys(rng):
    """Queries vary over both mesh axes, keys and values over one: their gradients are summed over the other.

    The GPU's interpreter knows nothing of varying axes; test_flash_aot.py compiles that kernel inside a shard_map.
    """
    (q, k, v, d_out), _ = draw(rng, Case(2, 7, 7, 4, 1, 4), np.float32)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    by_head, by_row = P("data", None, "tensor"), P("data")
    attend = functools.partial(flash_attention, implementation="pallas_tpu")

    @jax.jit
    def run(q, k, v, d_out):
        mapped = jax.shard_map(attend, in_specs=(by_head, by_row, by_row), out_specs=by_head)
        out, pull = jax.vjp(mapped, q, k, v)
        return out, *pull(d_out)

    with jax.set_mesh(mesh), interpreting():
        placed = [jax.reshard(x, s) for x, s in ((q, by_head), (k, by_row), (v, by_row), (d_out, by_head))]
        got = jax.device_get(run(*placed))
    want = forward_and_vjp("reference", [q, k, v, d_out], {})
    assert all(error(a, b) <= 2e-6 for a, b in zip(got, want[:4], strict=True))


def test_named_kernels_do_not_fall_back():
    q = jnp.zeros((1, 3, 2, 4))
    with pytest.raises(NotImplementedError, match="pallas_tpu needs a TPU, not cpu"):
        flash_attention(q, q, q, implementation="pallas_tpu")
    with pytest.raises(NotImplementedError, match="pallas_gpu needs a GPU, not cpu"):
        flash_attention(q, q, q, implementation="pallas_gpu")


@implementations
def test_limits_are_named(implementation, float64):
    wide, q = jnp.zeros((1, 3, 1, 300), jnp.float32), jnp.zeros((1, 3, 1, 4))
    with interpreting():
        with pytest.raises(NotImplementedError, match=r"head dims up to 256, not q \[1, 3, 1, 300\]"):
            flash_attention(wide, wide, wide, implementation=implementation)
        with pytest.raises(NotImplementedError, match=r"not q float64\[1, 3, 1, 4\]"):
            flash_attention(q, q, q, implementation=implementation)


@implementations
def test_outside_shard_map_is_refused(implementation):
    q = jnp.zeros((2, 3, 1, 4))
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])):
        call = jax.jit(functools.partial(flash_attention, implementation=implementation))
        with interpreting(), pytest.raises(NotImplementedError, match=r"inside a jax.shard_map .* manual over data"):
            call(q, q, q)


@pytest.mark.drawn(0.3)
def test_an_explicit_mesh_of_one_device_needs_no_shard_map(rng):
    """Values and gradients as without a mesh; arguments that are no arrays, or None, are passed on."""
    q, k, v = (jnp.asarray(rng.normal(size=(2, 5, heads, 8)), jnp.float32) for heads in (4, 2, 2))

    def run(q, k, v):
        attend = functools.partial(flash_attention, window=3, implementation="pallas_gpu")
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(jnp.cos(out))

    with interpreting():
        want = jax.jit(run)(q, k, v)
        mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
        with jax.set_mesh(mesh):
            got = jax.jit(run)(*(jax.device_put(x, jax.NamedSharding(mesh, P("data"))) for x in (q, k, v)))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_none_chooses_the_kernel_of_the_platform():
    assert explain("flash_attention", platform="cpu").startswith("flash_attention on cpu: xla")
    on_tpu, on_gpu = (explain("flash_attention", platform=name) for name in ("tpu", "gpu"))
    assert on_tpu.startswith("flash_attention on tpu: pallas_tpu")
    assert "pallas_tpu: compared with float64 in interpret mode, not on a device" in on_tpu
    assert on_gpu.startswith("flash_attention on gpu: pallas_gpu")
    assert "cudnn: used where it is named: its backward pass is not deterministic" in on_gpu
    assert "pallas_tpu: not for gpu" in on_gpu
    with pytest.raises(ValueError, match="no operation 'attention'; there are"):
        explain("attention")
