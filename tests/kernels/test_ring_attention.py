"""Ring attention: the shared test body for every implementation and layout, against attention on one device.

The TPU kernels run here on one case, another with every seed; `make proof kernels` runs them on all.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import explain
from pallas_kernels._compat import interpreting
from pallas_kernels.flash_attention import config
from pallas_kernels.ring_attention import order, places, ring_attention
from pallas_kernels.ring_attention.layout import LAYOUTS
from sharding.isolate import run_isolated
from tests import environment
from tests.kernels import ring_aot
from tests.kernels.ring_body import CASES, Case, check_rings, draw, error, of_cores, split, whole
from tests.models.jaxprs import equations

implementations = pytest.mark.parametrize("implementation", ["xla", "reference"])
layouts = pytest.mark.parametrize("layout", LAYOUTS)
NAMES = [name for name, case in CASES.items() if "three shards" not in name and case.cores == 1]
cases = pytest.mark.parametrize("case", [CASES[name] for name in NAMES], ids=NAMES)


@pytest.mark.drawn(0.3)
@cases
def test_is_attention_on_one_device(case, rng, float64):
    """Every layout gives the numbers of one device; a single shard has only one layout."""
    inputs = draw(rng, case)
    want = whole(*inputs, case)
    for layout in LAYOUTS if case.shards > 1 else LAYOUTS[:1]:
        got = split(*inputs, case, layout, "xla")
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(got)), layout
        assert error(got[0], want[0]) <= 1e-14, layout
        assert error(got, want) <= 1e-14, layout


@pytest.mark.drawn(0.3)
def test_rings_of_a_part_of_the_axis(rng):
    check_rings("xla", rng)


@layouts
def test_the_reference_gathers(layout, rng, float64):
    case = CASES["everything"]
    inputs = draw(rng, case)
    assert error(split(*inputs, case, layout, "reference"), whole(*inputs, case)) <= 1e-14


@pytest.mark.drawn(0.3)
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


@pytest.mark.drawn(0.3)
@layouts
def test_bytes_of_a_device_fall_with_the_number_of_devices(layout):
    two, eight = (
        lowered(n, 512, layout).lower().compile(environment.AS_EVER).memory_analysis().temp_size_in_bytes
        for n in (2, 8)
    )
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


def test_on_a_tpu_none_chooses_the_kernels_that_send():
    assert explain("ring_attention", platform="tpu").startswith("ring_attention on tpu: pallas_tpu")
    assert explain("ring_attention", platform="gpu").startswith("ring_attention on gpu: xla")


@pytest.mark.parametrize(("kv_heads", "cores"), [(2, 2), (1, 1), (3, 1)])
def test_both_cores_of_a_device_share_the_kv_heads(kv_heads, cores):
    """Grids of the kernels, forward and backward: cores, then steps."""
    mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Explicit,))
    rows = P(None, "context")
    attend = functools.partial(ring_attention, axis="context", implementation="pallas_tpu")

    def loss(q, k, v):
        return jax.shard_map(attend, in_specs=(rows,) * 3, out_specs=rows)(q, k, v).sum()

    with jax.set_mesh(mesh), interpreting(), of_cores(2):
        sharding = jax.NamedSharding(mesh, rows)
        sizes = [(1, 32, heads, 8) for heads in (6, kv_heads, kv_heads)]
        args = [jax.ShapeDtypeStruct(size, jnp.float32, sharding=sharding) for size in sizes]
        jaxpr = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*args).jaxpr
    grids = [e.params["grid_mapping"].grid for e in equations(jaxpr) if e.primitive.name == "pallas_call"]
    assert grids == [(cores, 4)] * 2


def test_which_tpus_have_two_cores():
    cores = {
        kind: config.tpu_blocks(kind, 2).cores for kind in ("TPU v4", "TPU v5", "TPU v5 lite", "TPU v6 lite", "TPU7x")
    }
    assert [kind for kind, count in cores.items() if count == 2] == ["TPU v4", "TPU v5"]
    assert set(cores.values()) == {1, 2}


@pytest.mark.drawn(0.5)
def test_compiles_for_devices_of_two_cores():
    """Forward and backward, beside a second mesh axis."""
    shape = dataclasses.asdict(ring_aot.Shape(256, 4, 2, 128, packed=True))
    arguments = {"shape": shape, "implementation": "pallas_tpu", "shards": 2}
    found = run_isolated("tests.kernels.ring_aot:compile_on", "v5p:2x2x1", arguments)
    assert found["temp_bytes"] <= ring_aot.TEMPORARIES * found["bytes"]


def test_the_kernels_of_a_tpu_are_refused_elsewhere():
    mesh = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Explicit,))
    rows = P(None, "context")
    attend = functools.partial(ring_attention, axis="context", implementation="pallas_tpu")
    with jax.set_mesh(mesh):
        q = jax.reshard(jnp.zeros((1, 8, 2, 4)), rows)
        with pytest.raises(NotImplementedError, match="pallas_tpu needs a TPU, not cpu"):
            jax.shard_map(attend, in_specs=(rows,) * 3, out_specs=rows)(q, q, q)
