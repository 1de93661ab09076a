"""Attention in two phases (ChunkAttention): equal to that of each request's pages, and shared pages are read once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.infer import SamplingParams
from jaxllm.infer.chunks.common_pages import common_pages
from pallas_kernels._compat import interpreting
from pallas_kernels.paged_attention import PageFormat, PagePool, paged_attention
from tests import quick
from tests.infer import engines
from tests.kernels import paged_aot, paged_body, races
from tests.proofs.harness import proof

KINDS = {
    "grouped queries": (4, PageFormat(2, 6, 6, multiple=4), {}),
    "values of another size": (6, PageFormat(2, 6, 4, multiple=4), {}),
    "soft cap": (4, PageFormat(2, 6, 6, multiple=4), {"softcap": 0.7}),
    "sinks": (4, PageFormat(4, 6, 6, multiple=4), {}),
    "latent": (8, PageFormat(1, 12, 8, latent=True, multiple=4), {"scale": 0.3}),
    "int8": (4, PageFormat(2, 8, 8, encoding="int8", multiple=4), {}),
}
PAGE, COLUMNS, REQUESTS, PAGES = 4, 9, 7, 80
KERNELS = "pallas_tpu", "pallas_gpu"


@functools.cache
def _attend(kind: str, name: str) -> Any:
    _, form, options = KINDS[kind]

    def run(q: Any, k: Any, v: Any, rows: Any, scales: Any, table: Any, lens: Any, sinks: Any, shared: Any) -> Any:
        starts = jnp.arange(REQUESTS + 1, dtype=jnp.int32)
        out, pool = paged_attention(
            q, k, v, PagePool(rows, form, scales), 1, table, starts, lens, sinks=sinks, decode_only=True,
            shared=shared, implementation=name, **options,
        )  # fmt: skip
        return out, pool.rows

    return quick.jit(run) if name in ("xla", "reference") else jax.jit(run)


class Drawn(NamedTuple):
    """Requests at random, some of which begin with the same pages.

    Attributes:
        given: queries, keys, values, pages and scales.
        table, hidden: page tables; and those that name pages of nan where the shared ones are, but for the first
            request's.
        rest: tokens of each request, and sinks.
        shared: shared pages of each request.
    """

    given: tuple[Any, ...]
    table: np.ndarray
    hidden: np.ndarray
    rest: tuple[Any, ...]
    shared: np.ndarray


def _draw(kind: str, seed: int, page: int, dtype: Any) -> Drawn:
    rng = np.random.default_rng([seed, *kind.encode()])
    heads, form, _ = KINDS[kind]
    count = int(rng.integers(0, 6))
    members = rng.random(REQUESTS) < 0.6
    lens = np.where(members, count * page, 0) + rng.integers(1, page * (COLUMNS - count) + 1, REQUESTS)
    free = iter(rng.permutation(PAGES - 1))
    common = [next(free) for _ in range(count)]
    table = np.array([[*(common if m else []), *(next(free) for _ in range(COLUMNS - count * m))] for m in members])
    pool = PagePool.zeros(form, layers=2, pages=PAGES, page_size=page, dtype=dtype)
    filled = rng.normal(size=pool.rows.shape) * (40 if form.encoding == "int8" else 1)
    rows = jnp.asarray(filled.astype(pool.rows.dtype))
    scales = None if pool.scales is None else jnp.asarray(rng.uniform(0.01, 0.1, pool.scales.shape), jnp.float32)
    if form.encoding == "plain":
        rows = rows.at[:, PAGES - 1].set(np.nan)
    q, k = (rng.normal(size=(REQUESTS, n, form.key_dim)).astype(dtype) for n in (heads, form.kv_heads))
    v = None if form.latent else rng.normal(size=(REQUESTS, form.kv_heads, form.value_dim)).astype(dtype)
    sinks = rng.normal(size=heads).astype(dtype) if kind == "sinks" else None
    others = members & (np.arange(REQUESTS) != int(np.argmax(members)))
    hidden = table.copy()
    hidden[np.ix_(others, np.arange(count))] = PAGES - 1
    return Drawn((q, k, v, rows, scales), table, hidden, (lens, sinks), np.where(members, count, 0))


@proof("kv_cache", cases=[(kind, seed) for kind in KINDS for seed in range(30)], sample=6, float64=True, bound=1e-10)
def two_phases_are_one(case: tuple[str, int]) -> float:
    """Requests at random, some of which begin with the same pages: output and pages less those of the reference. Their
    own page tables name pages of nan where the shared ones are, but for the first request's: nothing else is read."""
    kind, seed = case
    drawn = _draw(kind, seed, PAGE, np.float64)
    want = _attend(kind, "reference")(*drawn.given, drawn.table, *drawn.rest, None)
    found = _attend(kind, "xla")(*drawn.given, drawn.hidden, *drawn.rest, drawn.shared)
    np.testing.assert_array_equal(found[1], want[1])
    return float(np.abs(np.asarray(found[0]) - np.asarray(want[0])).max())


@proof("kv_cache", cases=[(name, kind, seed) for seed in range(8) for kind in KINDS for name in KERNELS], sample=4,
       bound=2e-6)  # fmt: skip
def kernels_in_two_phases(case: tuple[str, str, int]) -> float:
    """The same by the Pallas kernels, interpreted, with small blocks; a kernel of TPUs has no race."""
    name, kind, seed = case
    with paged_body.small_pieces(), interpreting():
        drawn = _draw(kind, seed, 32 if kind == "int8" else 8, np.float32)
        want = _attend(kind, "reference")(*drawn.given, drawn.table, *drawn.rest, None)
        _attend.cache_clear()  # a program is traced with the sizes of its blocks
        attend = _attend(kind, name)
        with races.none_found() if name == "pallas_tpu" else contextlib.nullcontext():
            found = jax.device_get(attend(*drawn.given, drawn.hidden, *drawn.rest, drawn.shared))
        _attend.cache_clear()
    np.testing.assert_array_equal(found[1], want[1])
    return float(paged_body.error(found[0], np.asarray(want[0])))


@proof("kv_cache", cases=[(shape, topology) for shape in paged_aot.TWO_PHASES for topology in paged_aot.TOPOLOGIES],
       sample=1, bound=0.1)  # fmt: skip
def two_phases_compile(case: tuple[str, str]) -> float:
    """Compiled for each kind of device: bytes of temporaries over those of arguments and results, which have the pages
    twice: no copy of them is made."""
    found = paged_aot.compile_cell(*case)
    return found["temp_bytes"] / found["bytes"]


@proof("kv_cache", count=300, sample=10)
def common_pages_save_the_most(seed: int) -> None:
    """Random page lists: the chosen first pages are the same in all, behind every position that is written, and no set
    of sequences saves more reads of pages."""
    rng = np.random.default_rng(seed)
    size, many = 4, int(rng.integers(1, 8))
    pages = [[int(x) for x in rng.integers(0, 2, rng.integers(0, 7))] for _ in range(many)]
    pages = [[100 * column + page for column, page in enumerate(own)] for own in pages]
    computed = [max(0, len(own) * size - int(rng.integers(0, 6))) for own in pages]
    found = common_pages(pages, computed, size)
    depth, members = max(found), [i for i, n in enumerate(found) if n]
    assert set(found) <= {0, depth}
    assert len({tuple(pages[i][:depth]) for i in members}) <= 1
    assert all(depth * size <= computed[i] for i in members)
    whole = [tuple(own[: n // size]) for own, n in zip(pages, computed, strict=True)]
    prefixes = {own[:n] for own in whole for n in range(1, len(own) + 1)}
    most = max((len(one) * (sum(own[: len(one)] == one for own in whole) - 1) for one in prefixes), default=0)
    assert max(0, len(members) - 1) * depth == most


@proof("kv_cache", cases=[(m, way) for m in ("llama", "gemma3", "deepseek_v3", "gpt_oss") for way in
       ("roomy", "tight, recompute", "tight, swap")], sample=1, float64=True, bound=1e-10)  # fmt: skip
def engines_in_two_phases(case: tuple[str, str]) -> float:
    """Random traffic with common prefixes, less the training forward; some steps have common pages."""
    model, way = case
    rng = np.random.default_rng([*model.encode(), *way.encode()])
    config = dataclasses.replace(engines.ENGINES[way], two_phase=True, page_size=4, pages=60)
    engine = engines.build(config, model, "float64")
    prefix = rng.integers(0, engines.VOCAB, 24).tolist()
    asked = engines.traffic(rng, config, 4)
    for number in range(5):
        own = rng.integers(0, engines.VOCAB, 1 + number).tolist()
        params = SamplingParams(max_tokens=20, temperature=0.0, logprobs=0)
        asked.append({"prompt": [*prefix, *own], "params": params, "at": 20})
    seen, run = 0, engine.runner.run

    def counting(shape: Any, packed: Any, masks: Any = None) -> Any:
        nonlocal seen
        if shape.shares:
            seen += int(shape.inputs.views(packed[0])["shared"].max())
        return run(shape, packed) if masks is None else run(shape, packed, masks)

    engine.runner.run = counting  # type: ignore[method-assign]
    made = engines.serve(engine, asked)
    assert seen > 0
    return engines.error(model, "float64", made)
