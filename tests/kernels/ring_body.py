"""Shared test body of every implementation of ring attention: cases, attention on one device, one check.

Legend: B batch, S tokens of a shard, N query heads, K kv heads, H head dim of keys, V of values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxllm.data.context_by_need import ContextSlots
from pallas_kernels._compat import interpreting
from pallas_kernels.flash_attention import config, flash_attention
from pallas_kernels.ring_attention import order, ring_attention
from tests import environment
from tests.kernels import races

PACKAGE = "pallas_kernels.ring_attention"


class Case(NamedTuple):
    shards: int
    s: int  # of a shard
    n: int = 4
    k: int = 2
    v: int | None = None
    packed: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    layout: str = "zigzag"
    b: int = 2
    rings: int = 1  # side by side, the batch split over them
    cores: int = 1  # of a TPU


CASES = {
    "one shard": Case(1, 6),
    "two tokens a shard": Case(4, 2, packed=True),
    "eight shards": Case(8, 4, 2, 1, b=1),
    "packed": Case(4, 6, packed=True),
    "window within a shard": Case(4, 6, window=3),
    "window of one": Case(2, 4, window=1),
    "window over shards, packed": Case(4, 4, packed=True, window=7),
    "everything": Case(4, 6, 6, 2, 3, True, 9, 1.3, True),
    "everything of three shards, contiguous": Case(3, 10, 2, 1, 3, True, 21, 1.3, True, "contiguous", 1),
    "sinks, three shards, zigzag": Case(3, 4, 2, 1, 8, sinks=True, b=1),
    "two rings": Case(2, 4, 2, 1, packed=True, sinks=True, rings=2),
    "packed, three shards, striped": Case(3, 4, 2, 2, packed=True, layout="striped", b=1),
    "two cores of three shards": Case(3, 4, 4, 2, packed=True, layout="striped", b=1, cores=2),
    "two cores, everything": Case(4, 6, 8, 4, 3, True, 9, 1.3, True, cores=2),
    "two cores, two rings": Case(2, 4, 4, 2, packed=True, sinks=True, rings=2, cores=2),
    "two cores, odd kv heads": Case(2, 4, 3, 3, cores=2),
}
KILLERS = (
    "sinks, three shards, zigzag",
    "packed, three shards, striped",
    "everything of three shards, contiguous",
    "two cores of three shards",
)
"""Cases that a mutant is tried on, until one fails; see tests/proofs/kernels/mutants.py."""

_ALIKE = "None if {0} is None else jnp.ones_like({0})".format
MUTATIONS: dict[tuple[str, str], tuple[str, str, str]] = {
    ("reference", "another's queries"): ("reference", "jax.lax.axis_index(axis)", "0"),
    ("reference", "dropped segment"): (
        "reference",
        "q_segment_ids=segment_ids,",
        f"q_segment_ids={_ALIKE('segment_ids')},",
    ),
    ("xla", "another's keys"): ("xla", "theirs = (mine - step)", "theirs = (mine + step)"),
    ("xla", "wrong place"): ("layout", "(2 * shards - 1 - shard) * half", "(shards + shard) * half"),
    ("xla", "missing rescale"): ("xla", "total[0] * a[..., None]", "total[0]"),
    ("xla", "forgotten sink"): ("xla", "out * jnp.exp(lse - with_sink)[..., None], with_sink", "out, with_sink"),
    ("xla", "wrong half"): ("xla", "slice(0, size), slice(0, half))", "slice(0, size), slice(half, size))"),
    ("xla", "sums not sent on"): ("xla", "ring.shift(d_keys, 1) if last", "d_keys if last"),
    ("xla", "gradients not home"): ("xla", ", -last)", ", 0)"),
    ("pallas_tpu", "another's keys"): ("pallas_tpu", "theirs = (mine - step)", "theirs = (mine + step)"),
    ("pallas_tpu", "earlier keys forgotten"): (
        "pallas_tpu",
        'refs[f"{name}_before"][...]',
        "jnp.zeros_like(refs[name])",
    ),
    ("pallas_tpu", "gradients not home"): ("pallas_tpu", "-ring_pass.last)", "0)"),
    ("pallas_tpu", "dropped segment"): ("pallas_tpu", "kv_pos, segments,", f"kv_pos, {_ALIKE('segments')},"),
    ("pallas_tpu", "sent without room"): ("tpu_remote_dma", "pl.semaphore_wait(self.free, 1)", "pass"),
    ("pallas_tpu", "sums sent without room"): ("tpu_remote_dma", "pl.semaphore_wait(self.grads_free, 1)", "pass"),
    ("pallas_tpu", "not waited for"): ("tpu_remote_dma", "_wait(self._copies())", "pass"),
    ("pallas_tpu", "sums not waited for"): ("tpu_remote_dma", "_wait(self._grad_copies())", "pass"),
    ("pallas_tpu", "heads of another core"): ("pallas_tpu", "pl.ds(pl.program_id(0) * size, size)", "pl.ds(0, size)"),
    ("pallas_tpu", "wrong buffer"): (
        "tpu_remote_dma",
        "here, there = self.slot, 1 - self.slot",
        "here = there = self.slot",
    ),
    ("pallas_tpu", "sums of the wrong buffer"): (
        "tpu_remote_dma",
        "here, there = 1 - self.slot,",
        "here, there = self.slot,",
    ),
}
"""(implementation, mistake) -> (module of the package, text, text with the mistake)."""


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """Blocks of TPU kernels so small that a shard has several."""
    from pallas_kernels.flash_attention import tpu_grid

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu_grid, "LANES", 8)
        patch.setattr(config, "tpu_blocks", lambda *_: config.FlashTpuBlocks(rows=16, kv=8))
        yield


@contextlib.contextmanager
def of_cores(cores: int) -> Iterator[None]:
    """Devices of so many cores."""
    blocks = config.tpu_blocks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "tpu_blocks", lambda *given: dataclasses.replace(blocks(*given), cores=cores))
        yield


def draw(rng, case: Case, dtype=np.float64):
    """(q, k, v, gradient of the output) of the whole sequence in its natural order, and segments and sinks."""
    b, t, h, hv = case.b, case.shards * case.s, 4, case.v or 4
    shapes = (b, t, case.n, h), (b, t, case.k, h), (b, t, case.k, hv), (b, t, case.n, hv)
    arrays = [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]
    segments = np.sort(rng.integers(0, 4, (b, t)).astype(np.int32), axis=1) if case.packed else None
    sinks = jnp.asarray(rng.normal(size=case.n), dtype) if case.sinks else None
    return arrays, None if segments is None else jnp.asarray(segments), sinks


def options(case: Case) -> dict[str, Any]:
    return {"window": case.window, "softcap": case.softcap}


def whole(arrays, segments, sinks, case: Case):
    """Output and gradients on one device."""
    q, k, v, d_out = arrays

    def attend(q, k, v, sinks):
        ids = {"q_segment_ids": segments, "kv_segment_ids": segments}
        return flash_attention(q, k, v, sinks=sinks, **ids, **options(case), implementation="reference")

    @jax.jit
    def run(q, k, v, d_out, sinks):
        out, pull = jax.vjp(attend, q, k, v, sinks)
        return out, *pull(d_out)

    return run(q, k, v, d_out, sinks)


def split(arrays, segments, sinks, case: Case, layout: str, implementation: str):
    """The same over ``case.shards`` devices, twice and with equal bits, put back into the natural order."""
    there = order(layout, case.shards, arrays[0].shape[1])
    back = np.argsort(there)
    mesh = jax.make_mesh((case.rings, case.shards), ("data", "context"), axis_types=(AxisType.Explicit,) * 2)
    rows = P("data", "context")

    def attend(q, k, v, segments, sinks):
        return ring_attention(
            q,
            k,
            v,
            axis="context",
            layout=layout,
            segment_ids=segments,
            sinks=sinks,
            implementation=implementation,
            **options(case),
        )

    @jax.jit
    def run(q, k, v, d_out, segments, sinks):
        in_specs = (rows, rows, rows, rows if case.packed else None, P() if case.sinks else None)
        mapped = jax.shard_map(attend, in_specs=in_specs, out_specs=rows)
        out, pull = jax.vjp(lambda q, k, v, sinks: mapped(q, k, v, segments, sinks), q, k, v, sinks)
        return out, *pull(d_out)

    with jax.set_mesh(mesh):
        placed = [jax.reshard(x[:, there], rows) for x in arrays]
        ids = None if segments is None else jax.reshard(segments[:, there], rows)
        got, again = (jax.device_get(run(*placed, ids, sinks)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, got, again)
    return *(x[:, back] for x in got[:4]), got[4]


def error(got, want) -> float:
    a, b = (np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(y)]) for y in (got, want))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def check(implementation: str, case: Case, rng: np.random.Generator, bound: float = 2e-6) -> dict[str, float]:
    """Output and gradients in float32 against attention on one device in float64; Pallas kernels are interpreted."""
    arrays, segments, sinks = draw(rng, case, np.float32)
    with contextlib.ExitStack() as stack:
        if implementation.startswith("pallas"):
            stack.enter_context(interpreting())
            stack.enter_context(races.none_found())
            stack.enter_context(of_cores(case.cores))
        got = split(arrays, segments, sinks, case, case.layout, implementation)
    with environment.x64():
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        want = jax.device_get(whole(exact, segments, None if sinks is None else sinks.astype(np.float64), case))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    errors = {"out": error(got[0], want[0]), "gradients": error(got[1:], want[1:])}
    assert all(e <= bound for e in errors.values()), errors
    return errors


DOCUMENTS = ((6, 2, 5, -1, 3), (11, 3, 1, 2, 7), (1, 21, -2))
"""Lengths of documents, negative of padding, that rings of one, two and four devices with slots of six tokens hold."""


def check_rings(
    implementation: str, rng: np.random.Generator, bound: float = 2e-6, cases: Sequence[int] = (0, 1, 2)
) -> dict[str, float]:
    """Documents in slots, in rings of one, two or four devices of one program, against attention on one device.

    Args:
        cases: indices of ``DOCUMENTS``.
    """
    slots = ContextSlots(1, 4, 6, 24, 24)
    mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Explicit,))
    row, chosen = P(None, "context"), {"window": 9, "softcap": 1.3}

    def attend(q, k, v, ids, positions, ring):
        given = {"segment_ids": ids, "positions": positions, "ring_sizes": slots.sizes, "ring": ring}
        return ring_attention(q, k, v, axis="context", layout=None, implementation=implementation, **given, **chosen)

    @jax.jit
    def run(q, k, v, d_out, ids, positions, ring):
        mapped = jax.shard_map(attend, in_specs=(row,) * 5 + (P(),), out_specs=row)
        out, pull = jax.vjp(lambda q, k, v: mapped(q, k, v, ids, positions, ring), q, k, v)
        return out, *pull(d_out)

    errors = {"out": 0.0, "gradients": 0.0}
    for ring in cases:
        lengths = DOCUMENTS[ring]
        placed = slots.place(lengths)
        assert placed.rings == [slots.sizes[ring]]
        source, ids = placed.source[0], placed.document[0]
        starts = np.concatenate([[0], np.cumsum(np.abs(lengths))])
        positions = np.where(ids > 0, source - starts[np.maximum(ids - 1, 0)], 0).astype(np.int32)
        arrays, _, _ = draw(rng, Case(4, 6, b=1), np.float32)
        with contextlib.ExitStack() as stack:
            if implementation.startswith("pallas"):
                stack.enter_context(interpreting())
                stack.enter_context(races.none_found())
            stack.enter_context(jax.set_mesh(mesh))
            placed = (jax.reshard(jnp.asarray(x), row) for x in (*arrays, ids, positions))
            got = jax.device_get(run(*placed, jnp.int32(ring)))
        with environment.x64():
            mask = {"q_segment_ids": ids, "kv_segment_ids": ids, "q_positions": positions, "kv_positions": positions}
            mask = {name: jnp.asarray(x) for name, x in mask.items()}
            one = functools.partial(flash_attention, **mask, **chosen, implementation="reference")
            out, pull = jax.vjp(one, *(jnp.asarray(np.asarray(x, np.float64)) for x in arrays[:3]))
            want = jax.device_get((out, *pull(jnp.asarray(np.asarray(arrays[3], np.float64)))))
        assert all(np.isfinite(x).all() for x in got)
        errors = {"out": max(errors["out"], error(got[0], want[0]))} | {
            "gradients": max(errors["gradients"], error(got[1:], want[1:]))
        }
    assert all(e <= bound for e in errors.values()), errors
    return errors
