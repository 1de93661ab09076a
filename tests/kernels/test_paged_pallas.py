"""Pallas kernels of paged attention, interpreted, by the shared test body.

TPU kernels run in TPU interpret mode, with races detected and memory full of nan.
"""

from __future__ import annotations

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call

from pallas_kernels import explain
from pallas_kernels._compat import interpreting
from pallas_kernels.paged_attention import PageFormat, PagePool, paged_attention, pallas_gpu
from tests.kernels import paged_body
from tests.kernels.paged_body import CASES, LAYER, Case, draw
from tests.kernels.test_paged_attention import encoded, steps

PALLAS = ("pallas_tpu", "pallas_gpu")
implementations = pytest.mark.parametrize("implementation", PALLAS)
NAMES = ("latent", "trees, everything", "everything", "everything, decode")


@pytest.fixture(autouse=True)
def small_pieces():
    with paged_body.small_pieces():
        yield


@pytest.mark.drawn(0.3)
@implementations
@pytest.mark.parametrize("name", NAMES)
def test_shared_body(implementation, name, rng):
    paged_body.check(implementation, CASES[name], rng)


@implementations
@hypothesis.settings(max_examples=1, phases=[hypothesis.Phase.generate])
@hypothesis.given(case=steps(), seed=st.integers(0, 2**32 - 1))
def test_drawn_steps(implementation, case, seed):
    paged_body.check(implementation, case._replace(multiple=4), np.random.default_rng(seed))


@implementations
def test_bfloat16(implementation, rng):
    case = Case(((21, 3), (15, 1), (0, 5)), 4, 2, page=16)
    paged_body.check(implementation, case, rng, bound=2**-6, dtype=jnp.bfloat16)


QUANTISED = {
    "latent": CASES["latent"]._replace(page=32),
    "everything": CASES["everything"]._replace(page=32),
    "decode over pages": Case(((0, 1), (31, 1), (32, 1), (100, 1), (0, 0)), 4, 2, page=32, padding=3, decode_only=True),
    "prompts over pages": Case(((0, 70), (31, 2), (60, 9), (5, 1)), 4, 2, page=32),
}


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(
    ("implementation", "name", "encoding"),
    [
        *(("pallas_tpu", name, encoding) for name, encoding in zip(QUANTISED, ("int8", "fp8") * 2, strict=True)),
        *(("pallas_gpu", name, encoding) for name, encoding in zip(QUANTISED, ("fp8", "int8") * 2, strict=True)),
        *((kernel, name, encoding) for kernel in PALLAS for name in QUANTISED for encoding in ("int4", "bfp4")),
    ],
)
def test_quantised_pages(implementation, name, encoding, rng):
    """Tiles are decoded by the format of the pages: values as in plain JAX, and every bit of pages and scales."""
    case = QUANTISED[name]
    step, form = draw(rng, case, np.float32), dataclasses.replace(case.format, encoding=encoding)
    pool = encoded(step, case, form)
    q, k, table, starts, lens = (jnp.asarray(x) for x in (*step[:2], *step[4:7]))
    v, sinks = (None if x is None else jnp.asarray(x) for x in (step.v, step.sinks))

    @functools.partial(jax.jit, static_argnums=1)
    def attend(pool: PagePool, implementation: str) -> tuple[jax.Array, PagePool]:
        return paged_attention(
            q, k, v, pool, LAYER, table, starts, lens, sinks=sinks, implementation=implementation, **case.options
        )

    want, want_pool = jax.device_get(attend(pool, "xla"))
    with interpreting():
        out, after = jax.device_get(attend(pool, implementation))
    assert paged_body.error(out, want) <= 2e-6
    np.testing.assert_array_equal(after.rows, want_pool.rows)
    np.testing.assert_array_equal(paged_body.bits(after.scales), paged_body.bits(want_pool.scales))
    if implementation == "pallas_tpu":
        races = interpret_pallas_call.races
        assert races is not None
        assert not races.races_found


def test_formats_that_kernels_do_not_read_are_named(rng):
    case = CASES["one token"]
    step = draw(rng, case, np.float32)
    pool = encoded(step, case, dataclasses.replace(case.format, encoding="bits of bfloat16"))
    q, k, v, *ragged = (jnp.asarray(x) for x in (*step[:3], *step[4:7]))
    for implementation in PALLAS:
        with (
            interpreting(),
            pytest.raises(NotImplementedError, match=r"format has a layout .*, not 'bits of bfloat16'"),
        ):
            paged_attention(q, k, v, pool, LAYER, ragged[0], ragged[1], ragged[2], implementation=implementation)


def test_named_kernels_do_not_fall_back(rng):
    with pytest.raises(NotImplementedError, match="pallas_tpu needs a TPU, not cpu"):
        paged_body.program("pallas_tpu", CASES["one token"])(*draw(rng, CASES["one token"], np.float32)[:-2])
    with pytest.raises(NotImplementedError, match="pallas_gpu needs a GPU, not cpu"):
        paged_body.program("pallas_gpu", CASES["one token"])(*draw(rng, CASES["one token"], np.float32)[:-2])


def test_limits_are_named(rng, float64, monkeypatch):
    case = CASES["decode"]
    step = draw(rng, case, np.float32)
    arrays = [jnp.asarray(x) for x in step[4:7]]
    q, k, v, rows = (jnp.asarray(x) for x in step[:4])

    def call(rows, q=q, table=arrays[0], implementation="pallas_tpu", **change):
        form = dataclasses.replace(case.format, **change)
        return paged_attention(q, k, v, PagePool(rows, form), LAYER, table, *arrays[1:], implementation=implementation)

    with interpreting():
        with pytest.raises(NotImplementedError, match=r"takes arrays all in bfloat16 or all .* q float64\[5, 4, 4\]"):
            call(rows, q.astype(jnp.float64))
        with pytest.raises(NotImplementedError, match="pages of a multiple of 8 slots in float32, not 4"):
            call(rows[:, :, :, :4])
        with pytest.raises(NotImplementedError, match=r"multiple of 4 elements, not 9: PageFormat\(multiple=4\)"):
            call(jnp.pad(rows, ((0, 0),) * 4 + ((0, 1),)), multiple=9)
        with pytest.raises(NotImplementedError, match=r"a page table of up to 131072 entries, not \[6, 30000\]"):
            call(rows, table=jnp.zeros((6, 30000), jnp.int32))
        monkeypatch.setattr(pallas_gpu, "MIN_DOT_DIM", 16)
        with pytest.raises(NotImplementedError, match="head dims of a multiple of 16, not 4 and 4"):
            call(rows, implementation="pallas_gpu")


def test_none_chooses_the_kernel_of_the_platform():
    assert explain("paged_attention", platform="cpu").startswith("paged_attention on cpu: xla")
    assert explain("paged_attention", platform="tpu").startswith("paged_attention on tpu: pallas_tpu")
    assert explain("paged_attention", platform="gpu").startswith("paged_attention on gpu: pallas_gpu")


def test_a_padded_slot_is_zeros():
    form = PageFormat(1, 3, 2, multiple=4)
    packed = form.pack(jnp.ones((2, 1, 3)), jnp.ones((2, 1, 2)), jnp.float32)
    assert packed.scales is None
    np.testing.assert_array_equal(packed.data, [[[1, 1, 1, 1, 1, 0, 0, 0]]] * 2)
