"""Pallas kernels of paged attention, interpreted, by the shared test body.

TPU kernels run in TPU interpret mode, with races detected and memory full of nan.
"""

from __future__ import annotations

import dataclasses

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels import explain
from pallas_kernels._compat import interpreting
from pallas_kernels._dispatch import VERIFIED
from pallas_kernels.paged_attention import PageFormat, PagePool, paged_attention, pallas_gpu
from tests.kernels import paged_body
from tests.kernels.paged_body import CASES, LAYER, Case, draw
from tests.kernels.test_paged_attention import steps

PALLAS = ("pallas_tpu", "pallas_gpu")
implementations = pytest.mark.parametrize("implementation", PALLAS)
NAMES = ("latent", "everything", "everything, decode")


@pytest.fixture(autouse=True)
def small_pieces():
    with paged_body.small_pieces():
        yield


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


def test_none_never_chooses_what_was_not_verified():
    assert explain("paged_attention", platform="cpu").startswith("paged_attention on cpu: xla")
    assert explain("paged_attention", platform="tpu").startswith("paged_attention on tpu: pallas_tpu")
    on_gpu = explain("paged_attention", platform="gpu")
    assert "gpu" in VERIFIED["paged_attention"]["pallas_gpu"] or "pallas_gpu: not verified on gpu" in on_gpu


def test_a_padded_slot_is_zeros():
    form = PageFormat(1, 3, 2, multiple=4)
    packed = form.pack(jnp.ones((2, 1, 3)), jnp.ones((2, 1, 2)), jnp.float32)
    assert packed.scales is None
    np.testing.assert_array_equal(packed.data, [[[1, 1, 1, 1, 1, 0, 0, 0]]] * 2)
