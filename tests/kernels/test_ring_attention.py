"""One body for every implementation of ring attention and every layout, against attention on one device.

Legend: B batch, S tokens of a shard, N query heads, K kv heads, H head dim of keys, V of values.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.ring_attention import order, places, ring_attention
from pallas_kernels.ring_attention.api import IMPLEMENTATIONS
from pallas_kernels.ring_attention.layout import LAYOUTS
from tests.models.jaxprs import equations

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
layouts = pytest.mark.parametrize("layout", LAYOUTS)


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


CASES = {
    "one shard": Case(1, 6),
    "two tokens a shard": Case(4, 2, packed=True),
    "eight shards": Case(8, 4, 2, 1),
    "packed": Case(4, 6, packed=True),
    "window within a shard": Case(4, 6, window=3),
    "window of one": Case(2, 4, window=1),
    "window over shards, packed": Case(4, 4, packed=True, window=7),
    "everything": Case(4, 6, 6, 2, 3, True, 9, 1.3, True),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def draw(rng, case: Case, dtype=np.float64):
    """(q, k, v, gradient of the output) of the whole sequence in its natural order, and segments and sinks."""
    b, t, h, hv = 2, case.shards * case.s, 4, case.v or 4
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
    """The same over ``case.shards`` devices, put back into the natural order."""
    there = order(layout, case.shards, arrays[0].shape[1])
    back = np.argsort(there)
    mesh = jax.make_mesh((case.shards,), ("context",), axis_types=(AxisType.Explicit,))
    rows = P(None, "context")

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
        got = jax.device_get(run(*placed, ids, sinks))
    return *(x[:, back] for x in got[:4]), got[4]


def error(got, want) -> float:
    a, b = (np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(y)]) for y in (got, want))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@layouts
@cases
def test_is_attention_on_one_device(case, layout, rng, float64):
    inputs = draw(rng, case)
    got, want = split(*inputs, case, layout, "xla"), whole(*inputs, case)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    assert all(error(a, b) <= 1e-14 for a, b in zip(got[:1], want[:1], strict=True))
    assert error(got, want) <= 1e-14


@layouts
def test_the_reference_gathers(layout, rng, float64):
    case = CASES["everything"]
    inputs = draw(rng, case)
    assert error(split(*inputs, case, layout, "reference"), whole(*inputs, case)) <= 1e-14


@implementations
@pytest.mark.parametrize(("dtype", "bound"), [(np.float32, 1e-6), (jnp.bfloat16, 2**-6)], ids=["float32", "bfloat16"])
def test_lower_precision(implementation, dtype, bound, rng):
    case = CASES["everything"]
    arrays, segments, sinks = draw(rng, case, np.float32)
    low = [x.astype(dtype) for x in arrays]
    got = split(low, segments, sinks, case, "zigzag", implementation)
    assert all(x.dtype == dtype for x in got[:4])
    exact = whole([x.astype(np.float32) for x in low], segments, sinks, case)
    assert error(got, exact) <= bound


@layouts
def test_same_twice(layout, rng):
    inputs = draw(rng, CASES["packed"], np.float32)
    first, second = (split(*inputs, CASES["packed"], layout, "xla") for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@layouts
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_every_place_is_somewhere(layout, shards):
    there = order(layout, shards, 4 * shards)
    assert sorted(there.tolist()) == list(range(4 * shards))
    assert np.asarray(places(layout, shards - 1, shards, 4)).tolist() == there[-4:].tolist()


def test_zigzag_gives_every_shard_the_same_work():
    """Pairs of query and visible key, by shard."""
    work = [sum(1 + int(p) for p in places("zigzag", r, 4, 6)) for r in range(4)]
    assert len(set(work)) == 1


def test_lengths_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="zigzag: a sequence of 12 does not divide into 8 parts"):
        order("zigzag", 4, 12)
    with pytest.raises(ValueError, match="contiguous: a sequence of 5 does not divide into 2"):
        order("contiguous", 2, 5)


def lowered(shards: int, length: int, layout: str, window: int | None = None) -> Any:
    """Loss and gradients, traced and lowered."""
    mesh = jax.make_mesh((shards,), ("context",), axis_types=(AxisType.Explicit,))
    rows = P(None, "context")
    attend = functools.partial(ring_attention, axis="context", layout=layout, window=window, implementation="xla")

    def loss(q, k, v):
        return jax.shard_map(attend, in_specs=(rows,) * 3, out_specs=rows)(q, k, v).sum()

    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, rows)
        args = [jax.ShapeDtypeStruct((1, length, heads, 8), jnp.float32, sharding=sharding) for heads in (4, 2, 2)]
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*args)


@layouts
def test_bytes_of_a_device_fall_with_the_number_of_devices(layout):
    two, eight = (lowered(n, 512, layout).lower().compile().memory_analysis().temp_size_in_bytes for n in (2, 8))
    assert eight < two / 3


@pytest.mark.parametrize(("window", "steps"), [(None, 7), (1, 0), (2, 1), (9, 1), (10, 2), (63, 7)])
def test_a_window_shortens_the_ring(window, steps):
    """Keys are passed on as far as a window reaches: loops of so many steps, one forward and one back."""
    jaxpr = lowered(8, 64, "contiguous", window).jaxpr
    loops = [e.params["length"] for e in equations(jaxpr) if e.primitive.name == "scan"]
    assert loops == [steps, steps]


def test_what_cannot_be_is_refused(rng):
    (q, k, v, _), _, _ = draw(rng, Case(1, 5), np.float32)
    with pytest.raises(ValueError, match="layout = 'spiral'; choose from contiguous, zigzag, striped"):
        ring_attention.__wrapped__(q, k, v, axis="context", layout="spiral")
    with pytest.raises(ValueError, match="zigzag cannot halve a shard of 5 tokens"):
        ring_attention(q, k, v, axis="context")
    with pytest.raises(ValueError, match="q does not vary over the axis 'context'"):
        ring_attention(q, k, v, axis="context", layout="striped")
