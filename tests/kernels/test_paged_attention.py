"""Paged attention in plain JAX, by the shared test body, and features that only plain JAX has.

Blocks are made tiny here, so that short requests cross many of them.
"""

from __future__ import annotations

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels.paged_attention import PageFormat, PagePool, TreeMask, paged_attention
from pallas_kernels.paged_attention.kv_formats import kv_format
from pallas_kernels.paged_attention.ragged import RaggedBatch
from pallas_kernels.paged_attention.shared_pages import check_shared
from pallas_kernels.paged_attention.slot_layout import half_floats
from tests import environment
from tests.kernels import paged_body
from tests.kernels.paged_body import CASES, LAYER, LAYERS, MIXED, Case, draw, error

implementations = pytest.mark.parametrize("implementation", paged_body.PLAIN)
NAMES = (
    "nothing at all",
    "trees of two words",
    "trees, everything",
    "shared pages",
    "window within a page",
    "latent",
    "everything",
    "everything, decode",
)


@pytest.fixture(autouse=True)
def small_pieces():
    with paged_body.small_pieces():
        yield


@pytest.mark.drawn(0.3)
@implementations
@pytest.mark.parametrize("name", NAMES)
def test_shared_body(implementation, name, rng, float64):
    paged_body.check(implementation, CASES[name], rng, bound=1e-14, dtype=np.float64)


@st.composite
def steps(draw) -> Case:
    """Any requests, GQA, head dims and windows; pages of 8 or 16."""
    request = st.tuples(st.integers(0, 40), st.sampled_from([0, 1, 1, 2, 5, 13]))
    k, decode = draw(st.integers(1, 2)), draw(st.booleans())
    requests = draw(st.lists(request, min_size=1, max_size=5))
    latent, h = k == 1 and draw(st.booleans()), draw(st.integers(1, 9))
    return Case(
        requests=tuple((held, min(new, 1) if decode else new) for held, new in requests),
        n=k * draw(st.sampled_from([1, 2, 3, 4])),
        k=k,
        h=h,
        v=draw(st.integers(1, h if latent else 9)),
        latent=latent,
        page=draw(st.sampled_from([8, 16])),
        multiple=draw(st.sampled_from([1, 4])),
        padding=max(draw(st.integers(0, 3)), 1 if not any(new for _, new in requests) else 0),
        window=draw(st.none() | st.integers(1, 20)),
        softcap=draw(st.none() | st.sampled_from([0.7, 5.0])),
        sinks=draw(st.booleans()),
        decode_only=decode,
    )


@hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate])
@hypothesis.given(case=steps(), seed=st.integers(0, 2**32 - 1))
def test_drawn_steps(case, seed):
    paged_body.check("xla", case, np.random.default_rng(seed))


@implementations
def test_bfloat16(implementation, rng):
    paged_body.check(implementation, CASES["decode, padded"], rng, bound=2**-7, dtype=jnp.bfloat16)


def test_a_pool_of_fewer_bits(rng):
    """Queries in float32, pages in bfloat16: new keys and values are rounded as they are written."""
    case = CASES["decode, padded"]
    step = draw(rng, case, np.float32)
    low = step._replace(rows=step.rows.astype(jnp.bfloat16))
    out, rows = paged_body.program("xla", case)(*low[:-2])
    assert (out.dtype, rows.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(paged_body.bits(rows), paged_body.bits(step.want_rows.astype(jnp.bfloat16)))
    exact = draw_again(step, np.asarray(rows, np.float64), case)
    assert error(out, exact) <= 2e-6


def draw_again(step, rows, case):
    """Exact attention over these pages, by the shared test body's oracle."""
    args = (step.page_table, step.cu_q_lens, step.kv_lens, step.sinks, case)
    return paged_body.oracle(np.nan_to_num(step.q), rows[LAYER], *args)


def encoded(step, case: Case, form: PageFormat) -> PagePool:
    """The step's pages, encoded."""
    (layers, pages, kv, size, _), h = step.rows.shape, form.key_dim
    tokens = jnp.asarray(step.rows).swapaxes(2, 3).reshape(-1, kv, case.format.width)
    v = None if form.latent else tokens[..., h : h + form.value_dim]
    numbers, scales, *_ = form.pack(tokens[..., :h], v, jnp.float32)
    numbers = numbers.reshape(layers, pages, size, kv, -1).swapaxes(2, 3)
    if scales is not None:
        scales = jnp.moveaxis(scales.reshape(layers, pages, size, kv, -1), 2, 4)
    return PagePool(numbers, form, scales)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(
    ("name", "encoding"), [("everything", "int8"), ("latent, decode", "fp8"), ("mixed", "bits of bfloat16")]
)
def test_encoded_pages(name, encoding, rng):
    """Attention reads the dequantised pages; new slots are those of ``pack``."""
    case = CASES[name]
    step, form = draw(rng, case, np.float32), dataclasses.replace(case.format, encoding=encoding)
    pool, kv = encoded(step, case, form), form.kv_heads
    q, k, table, starts, lens = (jnp.asarray(x) for x in (*step[:2], *step[4:7]))
    v, sinks = (None if x is None else jnp.asarray(x) for x in (step.v, step.sinks))

    def attend(pool: PagePool, implementation: str) -> tuple[jax.Array, PagePool]:
        return paged_attention(
            q, k, v, pool, LAYER, table, starts, lens, sinks=sinks, implementation=implementation, **case.options
        )

    for implementation in paged_body.PLAIN:
        out, after = jax.jit(attend, static_argnums=1)(pool, implementation)
        read = np.asarray(form.unpack(after.slots, jnp.float32), np.float64)
        assert error(out[: step.tokens], draw_again(step, read, case)[: step.tokens]) <= 2e-6
        assert (after.rows.dtype, after.token_bytes) == (form.stored("float32"), kv * form.slot_bytes("float32"))
        written = ~np.isnan(step.want_rows[..., 0]) & np.isnan(step.rows[..., 0])
        want = step.want_rows[written][..., : read.shape[-1]]  # some formats unpack no padding
        bound = {"int8": 1 / 127, "fp8": 1 / 8, "bits of bfloat16": 1 / 128}[encoding]
        assert np.abs(read[written] - want).max() <= bound * np.abs(want).max()
    with pytest.raises(ValueError, match=r"see PagePool\.zeros"):
        attend(PagePool(jnp.asarray(step.rows), form), "xla")


def large_pool(encoding: str = "plain") -> PagePool:
    """Its shape."""
    form = PageFormat(2, 8, 8, encoding=encoding)
    return jax.eval_shape(lambda: PagePool.zeros(form, layers=4, pages=4096, page_size=16, dtype=jnp.float32))


def memory(pool, columns: int, tokens: int, requests: int = 8, **options):
    """Temporary bytes of a loop over the layers of a donated pool."""

    def step(q, k, v, pool, table, starts, lens):
        def layer(i, carry):
            out, pool = carry
            more, pool = paged_attention(q + out, k, v, pool, i, table, starts, lens, implementation="xla", **options)
            return out + more, pool

        return jax.lax.fori_loop(0, pool.rows.shape[0], layer, (q, pool))

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    form, i32 = pool.format, jnp.int32
    args = array(tokens, 4, form.key_dim), array(tokens, 2, form.key_dim), array(tokens, 2, form.value_dim)
    ints = array(requests, columns, dtype=i32), array(requests + 1, dtype=i32), array(requests, dtype=i32)
    found = jax.jit(step, donate_argnums=3).lower(*args, pool, *ints).compile(environment.AS_EVER).memory_analysis()
    assert found is not None
    return found


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("encoding", ["plain", "fp8", "bits of bfloat16"])
def test_memory_follows_neither_the_pool_nor_the_longest_request(encoding):
    pool = large_pool(encoding)
    pool_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool))
    short, wide = (memory(pool, columns, 8) for columns in (4, 4096))
    assert short.alias_size_in_bytes >= pool_bytes, "the pool is not updated in place"
    assert wide.temp_size_in_bytes <= 1.1 * short.temp_size_in_bytes + 4096
    assert wide.temp_size_in_bytes < pool_bytes / 100, "a layer is copied"


@pytest.mark.drawn(0.3)
def test_memory_is_linear_in_tokens():
    few, many = (memory(large_pool(), 1024, tokens) for tokens in (256, 1024))
    assert many.temp_size_in_bytes <= 4.5 * few.temp_size_in_bytes


def test_inside_shard_map(rng, float64):
    """Heads split over a mesh axis; the page table and the lengths are the same everywhere."""
    case = Case(MIXED, 8, 4)
    step = draw(rng, case)
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    heads, pages = P(None, "tensor"), P(None, None, "tensor")

    def attend(q, k, v, rows, *ragged):
        form = PageFormat(rows.shape[2], case.h, case.h, multiple=case.multiple)
        out, pool = paged_attention(q, k, v, PagePool(rows, form), LAYER, *ragged, implementation="xla")
        return out, pool.rows

    with jax.set_mesh(mesh):
        specs = (heads, heads, heads, pages, P(), P(), P())
        run = jax.jit(jax.shard_map(attend, in_specs=specs, out_specs=(heads, pages)))
        out, rows = jax.device_get(run(*(jax.device_put(x, s) for x, s in zip(step[:7], specs, strict=True))))
    assert error(out, step.want) <= 1e-14
    np.testing.assert_array_equal(paged_body.bits(rows), paged_body.bits(step.want_rows))


def test_what_does_not_go_together_is_refused(rng):
    case = CASES["mixed"]
    step = draw(rng, case, np.float32)
    q, k, v, rows, table, starts, lens = (jnp.asarray(x) for x in step[:7])
    pool = PagePool(rows, case.format)
    call = functools.partial(paged_attention, implementation="xla")
    with pytest.raises(ValueError, match=r"v is missing, and the pool holds PageFormat"):
        call(q, k, None, pool, LAYER, table, starts, lens)
    with pytest.raises(ValueError, match=r"v \[24, 2, 3\] do not fit pages of PageFormat"):
        call(q, k, v[..., :3], pool, LAYER, table, starts, lens)
    with pytest.raises(ValueError, match=r"2 kv heads do not divide 3 query heads"):
        call(q[:, :3], k, v, pool, LAYER, table, starts, lens)
    with pytest.raises(ValueError, match=r"for 7 kv_lens there are 8 cu_q_lens and 7 rows .*, not 7 and 7"):
        call(q, k, v, pool, LAYER, table, starts[1:], lens)
    with pytest.raises(ValueError, match=r"a pool \[3, .* does not hold pages of PageFormat"):
        call(q, k, v, PagePool(rows, PageFormat(2, 4, 7)), LAYER, table, starts, lens)
    with pytest.raises(ValueError, match="window = 0; give a positive number"):
        call(q, k, v, pool, LAYER, table, starts, lens, window=0)
    tree = TreeMask(jnp.zeros((len(q), 1), jnp.int32), lens)
    with pytest.raises(ValueError, match="decode_only promises single tokens"):
        call(q, k, v, pool, LAYER, table, starts, lens, tree=tree, decode_only=True)
    with pytest.raises(ValueError, match=r"words and \[6\] slots for 24 tokens of 7 requests"):
        call(q, k, v, pool, LAYER, table, starts, lens, tree=tree._replace(first=lens[1:]))
    with pytest.raises(ValueError, match="shared pages are for decode steps"):
        call(q, k, v, pool, LAYER, table, starts, lens, shared=lens)
    with pytest.raises(ValueError, match="shared pages do not go with window"):
        call(q, k, v, pool, LAYER, table, starts, lens, shared=lens, window=3, decode_only=True)
    with pytest.raises(ValueError, match=r"\[6\] numbers of shared pages for 7 requests"):
        check_shared(lens[1:], 7, decode_only=True, window=None, retention=None, others={})
    latent = PagePool.zeros(PageFormat(1, 4, 3, latent=True), layers=LAYERS, pages=2, page_size=8, dtype=jnp.float32)
    with pytest.raises(ValueError, match="give the scale"):
        call(q, k[:, :1], None, latent, LAYER, table, starts, lens)


def test_formats():
    form = PageFormat(1, 576, 512, latent=True)
    assert (form.width, PageFormat(8, 128, 64).width) == (576, 192)
    assert PageFormat(1, 576, 512, latent=True, multiple=128).width == 640
    pool = PagePool.zeros(form, layers=2, pages=3, page_size=16, dtype=jnp.bfloat16)
    assert (pool.rows.shape, pool.page_size, pool.token_bytes) == ((2, 3, 1, 16, 576), 16, 1152)
    with pytest.raises(ValueError, match="no encoding 'int3'"):
        PageFormat(1, 8, 8, encoding="int3")
    with pytest.raises(ValueError, match="value_dim = 9 must not exceed key_dim = 8"):
        PageFormat(1, 8, 9, latent=True)
    with pytest.raises(ValueError, match="must be positive"):
        PageFormat(0, 8, 8)


@pytest.mark.drawn(0.3)
@hypothesis.settings(max_examples=5)
@hypothesis.given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), min_size=1, max_size=5), st.integers(1, 4))
def test_parts_of_a_flat_batch_are_the_whole(requests, parts):
    """Each row of a part is the request's token at the position that it has in the whole, and nothing else is."""
    lengths, before = np.array(requests).T
    whole = RaggedBatch(
        jnp.zeros((len(requests), 1), jnp.int32),
        jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32),
        jnp.asarray(lengths + before, jnp.int32),
    )
    count = -(-max(int(lengths.sum()), 1) // parts) + 1
    want = whole.tokens(count * parts)
    for part in range(parts):
        own = slice(part * count, (part + 1) * count)
        ragged = whole.part(part * count, count)
        got = ragged.tokens(count)
        real = np.asarray(want.real[own])
        np.testing.assert_array_equal(got.real, real)
        np.testing.assert_array_equal(np.asarray(got.request)[real], np.asarray(want.request[own])[real])
        np.testing.assert_array_equal(np.asarray(got.position)[real], np.asarray(want.position[own])[real])
        assert (np.asarray(ragged.kv_lens) >= np.asarray(ragged.lengths)).all()


@pytest.mark.parametrize(("name", "most"), [("int8", 127.0), ("fp8", 448.0)])
def test_encoded_values_are_the_nearest(name, most, rng):
    """Beside the numbers that the format has at the scale of its key: no other one is nearer to a value."""
    row, rows = kv_format(name), rng.standard_normal((5, 24)).astype(np.float32)
    stored, scales = row.encode(jnp.asarray(rows), (16, 8), jnp.float32)
    np.testing.assert_allclose(
        scales, np.stack([abs(rows[:, :16]).max(1), abs(rows[:, 16:]).max(1)], 1) / most, rtol=1e-6
    )
    got = np.asarray(row.unpack(stored, jnp.asarray(scales).T, (16, 8), jnp.float32))
    every = np.arange(-127, 128) if name == "int8" else np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    table = every.astype(np.float32)[np.isfinite(every.astype(np.float32))]
    each = np.repeat(np.asarray(scales), (16, 8), axis=1)
    least = np.abs(rows[..., None] - each[..., None] * table).min(axis=-1)
    np.testing.assert_allclose(np.abs(got - rows), least, rtol=0, atol=1e-6)


def test_half_floats_are_float16():
    """All 65,536 of them, subnormal ones and those that are not finite included, above any other bits."""
    every = np.arange(2**16, dtype=np.uint16)
    found = half_floats(jnp.asarray(every.astype(np.int32) | (every[::-1].astype(np.int32) << 16)))
    np.testing.assert_array_equal(found, every.view(np.float16).astype(np.float32))
