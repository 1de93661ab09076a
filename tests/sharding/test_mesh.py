"""Mesh specs: parsing, resolving, building, and refusals."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AxisType

from sharding import PRESETS, MeshSpec, ShardingError
from sharding.mesh import divisors


def test_a_text_becomes_axes_in_order():
    spec = MeshSpec.parse(" fsdp=4, tensor=2 ")
    assert spec.axes == (("fsdp", 4), ("tensor", 2))
    assert str(spec) == "fsdp=4,tensor=2"
    assert MeshSpec.parse(str(spec)) == spec


@pytest.mark.parametrize("name", PRESETS)
def test_presets_take_all_devices(name):
    for devices in (1, 2, 6, 7, 8, 64):
        sizes = [size for _, size in MeshSpec.parse(name).resolve(devices).axes]
        product = 1
        for size in sizes:
            product *= size
        assert product == devices
        assert all(size >= 1 for size in sizes)


@pytest.mark.parametrize(
    ("text", "devices", "sizes"),
    [
        ("data=-1", 8, {"data": 8}),
        ("data=2,fsdp=-1", 8, {"data": 2, "fsdp": 4}),
        ("fsdp=-1,tensor=-1", 8, {"fsdp": 4, "tensor": 2}),
        ("tensor=-1,fsdp=-1", 8, {"tensor": 4, "fsdp": 2}),
        ("fsdp=-1,tensor=-1", 64, {"fsdp": 8, "tensor": 8}),
        ("fsdp=-1,tensor=-1", 12, {"fsdp": 4, "tensor": 3}),
        ("fsdp=-1,tensor=-1", 7, {"fsdp": 7, "tensor": 1}),
        ("fsdp=-1,tensor=-1", 1, {"fsdp": 1, "tensor": 1}),
        ("data=2,fsdp=-1,tensor=-1", 16, {"data": 2, "fsdp": 4, "tensor": 2}),
    ],
)
def test_open_sizes_share_what_is_left(text, devices, sizes):
    assert dict(MeshSpec.parse(text).resolve(devices).axes) == sizes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fdsp=4", ["unknown mesh axis 'fdsp'", "fsdp", "tensor"]),
        ("fsdp=2,fsdp=4", ["'fsdp' is given twice"]),
        ("fsdp=0", ["fsdp=0", "positive"]),
        ("fsdp=-2", ["fsdp=-2", "positive"]),
        ("data=-1,fsdp=-1,tensor=-1", ["at most two"]),
        ("", ["cannot read the mesh ''", "fsdp=4,tensor=2", "fsdp_tp"]),
        ("fdsp", ["cannot read the mesh 'fdsp'", "presets"]),
        ("fsdp=4,", ["cannot read the mesh"]),
        ("fsdp=", ["cannot read the mesh"]),
        ("fsdp=four", ["cannot read the mesh"]),
        ("fsdp=--4", ["cannot read the mesh"]),
        ("fsdp=²", ["cannot read the mesh"]),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_can(text, words):
    with pytest.raises(ShardingError) as raised:
        MeshSpec.parse(text)
    for word in words:
        assert word.removesuffix("s") in str(raised.value)


@pytest.mark.parametrize(
    ("text", "devices", "needs"),
    [("fsdp=3", 8, "needs 3 devices"), ("fsdp=3,tensor=-1", 8, "needs a multiple of 3 devices"), ("data=4", 2, "4")],
)
def test_devices_that_do_not_fit_are_refused_with_the_legal_sizes(text, devices, needs):
    with pytest.raises(ShardingError, match=needs) as raised:
        MeshSpec.parse(text).resolve(devices)
    assert f"there are {devices}" in str(raised.value)
    assert str(divisors(devices)) in str(raised.value)


def test_a_mesh_and_its_abstract_twin_agree():
    spec = MeshSpec.parse("fsdp=4,tensor=2")
    mesh, twin = spec.build(), spec.abstract()
    assert mesh.axis_names == twin.axis_names == ("fsdp", "tensor")
    assert dict(mesh.shape) == dict(twin.shape) == {"fsdp": 4, "tensor": 2}
    assert mesh.axis_types == twin.axis_types == (AxisType.Explicit,) * 2
    assert MeshSpec.parse("fsdp_tp").abstract(8) == twin
    # 4,096 chips need no device.
    assert MeshSpec.parse("fsdp=256,tensor=16").abstract().size == 4096


def test_a_mesh_of_some_devices_and_one_too_many():
    assert MeshSpec.parse("tensor=2").build(jax.devices()[3:5]).devices.flatten().tolist() == jax.devices()[3:5]
    with pytest.raises(ShardingError, match="needs 16 devices, but there are 8"):
        MeshSpec.parse("data=16").build()


def test_an_abstract_mesh_with_an_open_size_needs_a_number():
    with pytest.raises(ShardingError, match="fsdp=-1 has an open size"):
        MeshSpec.parse("fsdp").abstract()


def test_divisors_of_odd_and_prime_numbers():
    assert divisors(1) == [1]
    assert divisors(7) == [1, 7]
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.parametrize(
    ("mesh", "slices", "factors"),
    [
        ("data=4,fsdp=4,tensor=2", 1, (1, 1, 1)),
        ("data=4,fsdp=4,tensor=2", 2, (2, 1, 1)),
        ("data=4,fsdp=4,tensor=2", 4, (4, 1, 1)),
        ("data=4,fsdp=4,tensor=2", 8, (4, 2, 1)),
        ("data=2,stage=3,fsdp=4", 6, (2, 3, 1)),
        ("fsdp=8,context=2,tensor=2", 16, (8, 2, 1)),
    ],
)
def test_the_outermost_axes_span_slices(mesh, slices, factors):
    """Their factors multiply to the slices: the data axis takes as much as it can, then the next ones."""
    assert MeshSpec.parse(mesh).between(slices) == factors


def test_slices_that_nothing_divides_over_are_refused():
    for mesh, slices in (("data=4,fsdp=4,tensor=2", 32), ("data=4,fsdp=4,tensor=2", 3), ("tensor=8", 2)):
        with pytest.raises(ShardingError, match=f"does not divide over {slices} slices"):
            MeshSpec.parse(mesh).between(slices)
