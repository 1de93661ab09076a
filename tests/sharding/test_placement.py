"""Placements and their conversions: values on eight devices, collectives of the compiled programs, and their prices."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import pytest

from jaxllm.compiler import collectives
from sharding import MeshSpec, ShardingError
from sharding.placement import ArrayPlacement, conversion, convert

SIZES = {"data": 2, "tensor": 4}
SHAPE = (16, 8)
KINDS = ("S0", "S1", "B", "P")
PLACEMENTS = [f"data={one},tensor={other}" for one in KINDS for other in KINDS]
PLACEMENTS += ["tensor=S0,data=S0", "tensor=S1,data=S1"]


def parts(x: np.ndarray, placement: ArrayPlacement, rng: np.random.Generator) -> np.ndarray:
    """Each device's part of an array, [data, tensor, ...], by hand."""
    out = {}
    for place in np.ndindex(*SIZES.values()):
        at = dict(zip(SIZES, place, strict=True))
        part = x
        for axis, dimension in placement.splits:
            part = np.split(part, SIZES[axis], axis=dimension)[at[axis]]
        out[place] = part
    summands = {axis: rng.normal(size=SIZES[axis]) for axis in placement.partial}
    for shares in summands.values():
        shares /= shares.sum()
    found = np.zeros((*SIZES.values(), *placement.local_shape(SHAPE, SIZES)))
    for place, part in out.items():
        at = dict(zip(SIZES, place, strict=True))
        found[place] = part * math.prod(shares[at[axis]] for axis, shares in summands.items())
    return found


def joined(found: np.ndarray, placement: ArrayPlacement) -> np.ndarray:
    """The array that parts are of; whole copies are equal."""
    found = found.copy()
    for axis in reversed(range(2)):
        name = list(SIZES)[axis]
        pieces = np.moveaxis(found, axis, 0)
        kind = placement.on(name)
        if kind == "B":
            np.testing.assert_allclose(pieces, np.broadcast_to(pieces[:1], pieces.shape), rtol=1e-12)
    whole = np.zeros(SHAPE)
    for a, b in np.ndindex(*SIZES.values()):
        at = {"data": a, "tensor": b}
        if any(at[axis] for axis in SIZES if placement.on(axis) == "B"):
            continue
        begin, extent = [0, 0], list(SHAPE)
        for axis, d in placement.splits:
            extent[d] //= SIZES[axis]
            begin[d] += at[axis] * extent[d]
        here = tuple(slice(i, i + n) for i, n in zip(begin, extent, strict=True))
        whole[here] += found[a, b]
    return whole


def compiled(before: ArrayPlacement, after: ArrayPlacement, dtype: str):
    mesh = MeshSpec.parse("data=2,tensor=4").build(jax.devices()[:8])
    spec = jax.sharding.PartitionSpec("data", "tensor")

    def local(x):
        return convert(x[0, 0], before, after, SIZES)[None, None]

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    shape = (2, 4, *before.local_shape(SHAPE, SIZES))
    there = jax.NamedSharding(mesh, spec)
    return run.lower(jax.ShapeDtypeStruct(shape, dtype, sharding=there)).compile(), there


def conversion_error(before: ArrayPlacement, after: ArrayPlacement, rng: np.random.Generator) -> float:
    """Largest error of a conversion, whose program has the collectives of its steps and no others."""
    x = rng.normal(size=SHAPE)
    program, there = compiled(before, after, "float64")
    found = np.asarray(program(jax.device_put(parts(x, before, rng), there)))
    assert found.shape[2:] == after.local_shape(SHAPE, SIZES)
    steps = conversion(before, after, SHAPE, SIZES)
    own = [one for one in collectives.read(program.as_text()).collectives for _ in range(one.count)]
    assert sorted(one.kind for one in own) == sorted(s.collective for s in steps if s.collective != "none")
    assert sent(own) == sum(step.elements for step in steps) * 8
    return float(np.abs(joined(found, after) - x).max())


def sent(own: list[collectives.Collective]) -> int:
    """Bytes that a device sends in these collectives, by the ring algorithms."""
    share = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0, "all-to-all": 1.0}
    return sum(round(one.bytes * share[one.kind] * (one.group_size - 1) / one.group_size) for one in own)


@pytest.mark.parametrize("pair", [(b, a) for b in KINDS for a in KINDS])
def test_every_conversion_of_one_axis(pair, float64, rng):
    before, after = (ArrayPlacement.parse(f"tensor={kind}") for kind in pair)
    assert conversion_error(before, after, rng) < 1e-12


@pytest.mark.parametrize(("before", "after"), [
    ("data=S0,tensor=S1", "tensor=S0,data=S0"), ("data=S0,tensor=S0", "tensor=S0,data=S0"),
    ("data=S0,tensor=S0", "tensor=S0"), ("data=P,tensor=S1", "data=S1,tensor=P"),
    ("data=P,tensor=P", "data=S1,tensor=S1"),
])  # fmt: skip
def test_conversions_of_two_axes(before, after, float64, rng):
    """All pairs: `make proof layouts ONLY=conversions`."""
    assert conversion_error(ArrayPlacement.parse(before), ArrayPlacement.parse(after), rng) < 1e-12


@pytest.mark.parametrize(("before", "after", "names"), [
    ("tensor=P", "tensor=B", ["all-reduce"]),
    ("tensor=P", "tensor=S0", ["reduce-scatter"]),
    ("tensor=S0", "tensor=B", ["all-gather"]),
    ("tensor=S0", "tensor=S1", ["all-to-all"]),
    ("tensor=B", "tensor=S1", ["none"]),
    ("tensor=B", "tensor=P", ["none"]),
    ("tensor=S1", "tensor=P", ["none"]),
    ("tensor=P", "tensor=P", []),
    ("data=S0,tensor=S0", "tensor=S0", ["all-to-all", "all-gather", "all-to-all"]),
    ("data=P,tensor=P", "data=S0,tensor=S1", ["reduce-scatter", "reduce-scatter"]),
])  # fmt: skip
def test_collectives_of_the_table(before, after, names):
    steps = conversion(ArrayPlacement.parse(before), ArrayPlacement.parse(after), SHAPE, SIZES)
    assert [step.collective for step in steps] == names


def test_prices_are_those_of_the_paper():
    """Elements that all devices send together, over the array's: (p - 1) for S to B and P to S, and so on."""
    p, size = 4, math.prod(SHAPE)
    for before, after, share in (
        ("S0", "B", p - 1), ("S0", "S1", (p - 1) / p), ("P", "S0", p - 1), ("P", "B", 2 * (p - 1)), ("B", "S0", 0),
    ):  # fmt: skip
        steps = conversion(*(ArrayPlacement.parse(f"t={kind}") for kind in (before, after)), SHAPE, {"t": p})
        assert sum(step.elements for step in steps) * p == share * size


def test_the_cheapest_of_all_ways_is_found():
    """By brute force over sequences of up to three steps of the axes that change; the others stay as they are."""
    from sharding.placement import _canonical, _steps

    for before, after in itertools.product(("data=S0,tensor=P", "data=P,tensor=S1", "data=S0,tensor=S0"), PLACEMENTS):
        one, other = ArrayPlacement.parse(before), ArrayPlacement.parse(after)
        axes = {axis for axis in SIZES if one.on(axis) != other.on(axis)}
        best, ways = math.inf, [(0, one)]
        for _ in range(4):
            best = min([best, *(cost for cost, at in ways if _canonical(at) == _canonical(other))])
            ways = [
                (cost + s.elements, s.placement)
                for cost, at in ways
                for s in _steps(at, SHAPE, SIZES)
                if s.axis in axes
            ]
        found = conversion(one, other, SHAPE, SIZES)
        assert sum(step.elements for step in found) <= best


@pytest.mark.parametrize(("text", "match"), [
    ("data", r"'data'; give each axis once, as AXIS=S0"),
    ("data=S", "give each axis once"),
    ("data=S0,data=P", "'data=P'; give each axis once"),
])  # fmt: skip
def test_what_is_no_placement(text, match):
    with pytest.raises(ShardingError, match=match):
        ArrayPlacement.parse(text)


def test_what_does_not_fit():
    for text, match in (
        ("rows=S0", "no mesh axis 'rows'; there are data, tensor"),
        ("data=S2", "has no dimension 2"),
        ("tensor=S1", r"dimension 1 of \(16, 6\) does not divide over tensor = 4; pad it"),
    ):
        with pytest.raises(ShardingError, match=match):
            conversion(ArrayPlacement.parse(text), ArrayPlacement(), (16, 6), SIZES)


def test_a_text_of_each():
    assert str(ArrayPlacement.parse(" tensor=P, data=S1,")) == "data=S1,tensor=P"
    (step,) = conversion(ArrayPlacement.parse("tensor=P"), ArrayPlacement.parse("tensor=S1"), (64, 32), SIZES)
    assert str(step) == "reduce-scatter over tensor: P -> S1, 1,536 elements"
