"""Topologies by name, and the compilers behind them."""

from __future__ import annotations

import math

import pytest

from sharding.isolate import OutOfDeviceMemory, run_isolated
from sharding.mesh import ShardingError
from sharding.topology import GENERATIONS, CompilerMissing, Topology
from tests.environment import DEVICES

TPUS = ["v4:2x2x4", "v5e:4x4", "v5e:1x1", "v5p:4x4x4", "v6e:8x8", "v6e:2x4", "tpu7x:2x2x1"]
GPUS = ["h100:8x8", "h200:1x8", "b200:2x4"]


def test_a_name_becomes_numbers():
    topology = Topology.parse(" V6e:8x8 ")
    assert (topology.name, str(topology)) == ("v6e:8x8", "v6e:8x8")
    assert (topology.platform, topology.device_kind) == ("tpu", "TPU v6 lite")
    assert (topology.shape, topology.num_devices) == ((8, 8), 64)
    assert 31 * 2**30 < topology.hbm_bytes < 32 * 2**30
    assert Topology.parse("tpu7x:4x4x4").num_devices == 128  # two devices a chip
    assert Topology.parse("h100:8x4").num_devices == 32
    assert Topology.parse("cpu:3").hbm_bytes is None


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation_has_a_legal_example(generation):
    example = f"{generation}:{GENERATIONS[generation].example}"
    assert Topology.parse(example).num_devices > 1


@pytest.mark.parametrize(
    ("name", "closest"),
    [("v6:8x8", "v6e:8x8"), ("v7x:4x4x4", "tpu7x:4x4x4"), ("h10:8x8", "h100:8x8"), ("gpu:8", "cpu:8"), ("", "v")],
)
def test_unknown_names_list_the_known_ones(name, closest):
    with pytest.raises(ShardingError) as raised:
        Topology.parse(name)
    message = str(raised.value)
    assert all(f"{generation}:" in message for generation in GENERATIONS)
    assert f"The closest is {closest}" in message


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("v6e:3x5", "v6e:4x4"),
        ("v6e:8x4", "v6e:4x8"),
        ("v5e:32x32", "v5e:16x16"),
        ("v6e:8x8x2", "v6e:8x16"),
        ("v5p:4x4x6", "v5p:4x4x8"),
        ("v5p:1x1x1", "v5p:2x2x1"),
        ("v4:16x16x24", "v4:16x16x16"),
        ("h100:3x5", "h100:3x4"),
        ("h100:8", "h100:1x8"),
        ("cpu:0", "cpu:1"),
        ("cpu:2x4", "cpu:8"),
    ],
)
def test_illegal_shapes_name_the_nearest(name, nearest):
    with pytest.raises(ShardingError, match=r"there is no topology .* The nearest: .*" + nearest):
        Topology.parse(name)
    assert math.prod(Topology.parse(nearest).shape) >= 1  # and that one is legal


@pytest.mark.parametrize("name", ["v6e", "v6e:", "v6e:8by8", "v6e:-1x2", "h100:8x"])
def test_a_missing_shape_shows_an_example(name):
    with pytest.raises(ShardingError, match="comes its shape, such as"):
        Topology.parse(name)


def test_simulated_devices_are_this_process_own():
    assert len(Topology.parse(f"cpu:{DEVICES}").devices()) == DEVICES
    assert len(Topology.parse("cpu:2").devices()) == 2
    with pytest.raises(CompilerMissing, match=r"needs 4096 CPU devices, but JAX has started with"):
        Topology.parse("cpu:4096").devices()


def test_devices_of_two_calls_are_the_same():
    assert Topology.parse("cpu:4").devices() == Topology.parse("cpu:4").devices()


@pytest.mark.parametrize("name", ["v6e:8x8", "h100:8x8"])
def test_a_process_without_the_environment_is_told_what_to_do(name, monkeypatch):
    for variable in Topology.parse(name).environment():
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(CompilerMissing, match=r"run_isolated, or start python with JAX_PLATFORMS=cpu"):
        Topology.parse(name).devices()


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("names", [TPUS, GPUS, ["cpu:16"]], ids=["tpu", "gpu", "cpu"])
def test_a_sharded_program_compiles_for_every_generation(names):
    found = run_isolated("tests.sharding.targets:compile_all", names[0], {"names": names})
    for name in names:
        topology = Topology.parse(name)
        assert found[name] == [topology.num_devices, topology.platform, topology.device_kind, topology.num_devices > 1]


@pytest.mark.drawn(0.3)
def test_a_program_too_large_for_a_device_says_by_how_much():
    with pytest.raises(OutOfDeviceMemory, match=r"128\.00 GiB on each device of v6e:2x2.* 31\.2\d GiB") as raised:
        run_isolated("tests.sharding.targets:too_large", "v6e:2x2")
    assert raised.value.topology == "v6e:2x2"
    assert raised.value.need == 128 * 2**30
    # What the compiler says is there is what the table says, in hundredths of a GiB.
    assert abs(raised.value.limit - Topology.parse("v6e:2x2").hbm_bytes) <= 0.011 * 2**30


@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        ("the total memory required for HLO temporaries (1.50T) exceeds available HBM (31.25G)", (1.5 * 2**40, 31.25)),
        ("E1000: CompileTimeHbmOom: ... (155.04G) exceeds available HBM (15.75G). HLO module: jit_f", (155.04, 15.75)),
        ("Ran out of memory in memory space hbm. Used 17.63G of 15.75G hbm. Exceeded by 1.88G.", (17.63, 15.75)),
        ("Ran out of memory in memory space vmem. Used 20.00M of 16.00M vmem.", None),
        ("INVALID_ARGUMENT: something else", None),
    ],
)
def test_the_compilers_messages_are_read(message, sizes):
    error = OutOfDeviceMemory.from_message(message, "v5e:2x2")
    if sizes is None:
        assert error is None
    else:
        need, limit = (round(size if size > 1e6 else size * 2**30) for size in sizes)
        assert (error.need, error.limit) == (need, limit)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(("name", "extra"), [("v6e:8x8", "tpu"), ("h100:8x8", "aot-gpu")])
def test_a_missing_compiler_names_its_extra(name, extra):
    with pytest.raises(CompilerMissing, match=rf"compiling for {name} .* pip install 'jaxllm\[{extra}\]'"):
        run_isolated("tests.sharding.targets:without_compilers", name)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("v6e:8x8", "fsdp=16,tensor=4"), ("v5p:4x4x4", "fsdp=8,tensor=8"), ("h100:2x8", "data=2,fsdp=2,tensor=4")],
)
def test_a_mesh_may_split_an_axis_of_the_slice(name, mesh):
    shape = run_isolated("tests.sharding.targets:mesh_shape", name, {"mesh": mesh})
    assert ",".join(f"{axis}={size}" for axis, size in shape.items()) == mesh
