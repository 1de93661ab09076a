"""Pallas kernels over pages that are encoded as a whole (KIVI), beside the latest tokens in full precision."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._compat import interpreting
from pallas_kernels.paged_attention import PageFormat, PagePool, paged_attention
from pallas_kernels.paged_attention.channel_formats import KiviFormat
from pallas_kernels.paged_attention.kv_formats import KV_FORMATS
from pallas_kernels.paged_attention.residual_window import Residual
from pallas_kernels.paged_attention.shadow.shadow_format import ShadowFormat
from tests.kernels import encoded_body, paged_body
from tests.kernels.encoded_body import History

PALLAS = ("pallas_tpu", "pallas_gpu")
HISTORIES = {
    "two bits": History("short2"),
    "four bits, values of another size": History("short4", h=8, v=12),
    "everything": History("short4", 6, 2, 12, 8, window=50, softcap=0.7, sinks=True),
    "window within a page": History("short2", window=20),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Formats with short windows, and small blocks."""
    for bits in (2, 4):
        monkeypatch.setitem(KV_FORMATS, f"short{bits}", KiviFormat(bits, 40))
    with paged_body.small_pieces():
        yield


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("implementation", PALLAS)
@pytest.mark.parametrize("name", list(HISTORIES))
def test_as_the_reference(implementation, name, rng):
    """Chunks of any lengths, whose encoded pages a kernel reads: what it attends to differs between their queries."""
    assert encoded_body.check(implementation, HISTORIES[name], rng) <= 2e-6


def test_formats_that_kernels_do_not_read_are_named(monkeypatch):
    monkeypatch.setitem(KV_FORMATS, "small", ShadowFormat(4, 16, 1, 8, 8))
    form = PageFormat(2, 8, 8, encoding="small", multiple=4)
    pool = PagePool.zeros(form, layers=1, pages=2, page_size=32, dtype="float32", sequences=1)
    q, k, v = (jnp.ones((1, heads, 8), jnp.float32) for heads in (4, 2, 2))
    ints, rings = (
        (np.zeros((1, 2), int), np.array([0, 1]), np.ones(1, int)),
        Residual(jnp.zeros(1, int), jnp.zeros(1, int)),
    )
    for kernel in PALLAS:
        with interpreting(), pytest.raises(NotImplementedError, match=r"has a layout .*, not 'small'"):
            paged_attention(q, k, v, pool, 0, *map(jnp.asarray, ints), residual=rings, implementation=kernel)
