"""Hardware table, files that override it, and times of collectives by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxllm.compiler.device_peaks import peak_of
from jaxllm.infer.streaming.tier_rates import TierRates
from jaxllm.plan.capacity_table import FileTraffic, disk_seconds
from jaxllm.plan.formulas.collective_time import Network
from jaxllm.plan.hardware import TABLE, UNCOMPILED, Cluster, HardwareError, devices_of_host, read
from sharding import MeshSpec, ShardingError
from sharding.topology import GENERATIONS


def test_every_generation_with_a_compiler_is_in_the_table_with_its_peaks():
    assert {name for name, kind in GENERATIONS.items() if kind.platform != "cpu"} == {*TABLE} - {*UNCOMPILED}
    for name, hardware in TABLE.items():
        if name in GENERATIONS:
            peak = peak_of(GENERATIONS[name].device_kind)
            assert peak is not None
            assert (hardware.flops, hardware.bandwidth) == peak
            assert hardware.hbm_bytes == GENERATIONS[name].hbm_bytes


def test_kinds_without_a_compiler_have_their_peaks():
    for name, kind in UNCOMPILED.items():
        assert (TABLE[name].flops, TABLE[name].bandwidth) == peak_of(kind)
        assert TABLE[name].like == ""


def test_a_file_changes_and_adds(tmp_path):
    file = tmp_path / "ours.toml"
    file.write_text('[v6e]\nlink = 88e9\n[h800]\nlike = "h100"\nlink = 200e9\nwatts = 650\n')
    table = read(file)
    assert table["v6e"].link == 88e9
    assert table["v6e"].flops == TABLE["v6e"].flops
    cluster = Cluster.parse("h800:2x8", table)
    assert (cluster.hardware.link, cluster.hardware.watts) == (200e9, 650)
    assert cluster.devices == 16
    assert TABLE["v6e"].link == 100e9
    as_json = tmp_path / "ours.json"
    as_json.write_text(json.dumps({"v6e": {"link": 88e9}}))
    assert read(as_json)["v6e"] == table["v6e"]


def test_a_file_takes_measured_rates(tmp_path):
    """Those of `jaxllm bench MODEL --tiers FILE`, beside the hardware file; what is given by hand goes first."""
    rates = TierRates("gpu", (1,), (1.0,), (0.1,), 21e9, (5e9, 6e9), (1e9, 2e9))
    rates.write(tmp_path / "rates.json")
    (tmp_path / "ours.toml").write_text('[rtx4090]\ntiers = "rates.json"\n[h100]\ntiers = "rates.json"\ndisk = 7e9\n')
    table = read(tmp_path / "ours.toml")
    assert (table["rtx4090"].host, table["rtx4090"].host_disk) == (21e9, 2e9)
    assert [Cluster.parse(f"rtx4090:{nodes}x4", table).hardware.disk for nodes in (1, 2)] == [2e9 / 4, 2e9 / 4]
    assert Cluster.parse("rtx4090:1x1", table).hardware.disk == 2e9
    grown = Cluster.parse("rtx4090:1x1", table).resized(8)
    assert grown is not None
    assert grown.hardware.disk == 2e9
    sized = Cluster.sized(table["rtx4090"], 8)
    assert sized is not None
    assert sized.hardware.disk == 2e9 / 8
    assert (table["h100"].host, Cluster.parse("h100:1x8", table).hardware.disk) == (21e9, 7e9)
    dataclasses.replace(rates, disk_cold=()).write(tmp_path / "rates.json")
    assert read(tmp_path / "ours.toml")["rtx4090"].host_disk == 6e9
    for text in ("{}", "[", '{"host": 1, "disk": [], "disk_cold": []}'):
        (tmp_path / "rates.json").write_text(text)
        with pytest.raises(HardwareError, match=r"rates.json has no measured rates.*--tiers FILE"):
            read(tmp_path / "ours.toml")


def test_the_devices_of_a_host_share_its_disks(tmp_path):
    """GPUs of a node; TPUs of four chips, or of a whole slice of up to eight; a TPU7x chip is two devices."""
    kinds = {"h100": ("2x8", 8), "v6e": ("2x4", 8), "v5e": ("4x4", 4), "v5p": ("2x2x2", 4), "tpu7x": ("2x2x1", 8)}
    file = tmp_path / "ours.toml"
    file.write_text("".join(f"[{kind}]\nhost_disk = 8e9\n" for kind in kinds))
    table = read(file)
    for kind, (shape, devices) in kinds.items():
        assert devices_of_host(Cluster.parse(f"{kind}:{shape}").topology) == devices
        assert Cluster.parse(f"{kind}:{shape}", table).hardware.disk == 8e9 / devices


def test_writes_take_their_own_rate(tmp_path):
    """Files are read and written at the same time: the slower one counts."""
    file = tmp_path / "ours.toml"
    file.write_text("[h100]\ndisk = 6e9\ndisk_write = 2e9\n")
    ours = read(file)["h100"]
    traffic = FileTraffic(0, 6e9, 0, 6e9, 0)
    assert disk_seconds(traffic, ours, 0, 0) == 3.0
    assert disk_seconds(traffic, dataclasses.replace(ours, disk_write=None), 0, 0) == 1.0
    streamed = FileTraffic(12e9, 18e9, 4e9, 6e9, 6e9)
    assert disk_seconds(streamed, ours, 1.0, 2.0) == (2.0 - 1.0) + (22 / 6 - 2.0) + 2.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[h800]\nlink = 1e9\n", "name the device kind"),
        ("[v6e]\nlinks = 1e9\n", "Did you mean 'link'?"),
        ('[v6e]\ntier = "rates.json"\n', "Did you mean 'tiers'? Legal: like, tiers, flops"),
        ("[v6e]\ndisk_write = -1\n", "disk_write = -1; give a positive number"),
        ('[v6e]\nlink = "fast"\n', "give a number"),
        ("[v6e]\nlink = 0\n", "give a positive number"),
        ("[v6e\n", "is not valid TOML"),
        ("v6e = 3\n", "is not a table"),
    ],
)
def test_mistakes_in_a_file_say_what_is_legal(tmp_path, text, says):
    file = tmp_path / "ours.toml"
    file.write_text(text)
    with pytest.raises(HardwareError, match=says.replace("?", r"\?")):
        read(file)


def test_an_unknown_topology_lists_the_known():
    with pytest.raises(ShardingError, match="v6e:8x8"):
        Cluster.parse("v9:2x2")
    with pytest.raises(HardwareError, match="a100"):
        Cluster.parse("cpu:8")


MB = 10**6
CASES = [
    # A closed ring of 16: two ways. 100 MB x 15/16 over 200 GB/s, and 15 hops.
    ("v6e:16x16", "data=16,fsdp=16", "fsdp", "all-gather", 100 * MB * 15 / 16 / 200e9 + 15e-6, 0.0),
    # Half a side is a line: one way.
    ("v6e:8x8", "data=16,fsdp=4", "fsdp", "all-gather", 100 * MB * 3 / 4 / 100e9 + 3e-6, 0.0),
    # Both dimensions of 8 x 8, lines: bandwidths add up.
    ("v6e:8x8", "fsdp=64", "fsdp", "all-gather", 100 * MB * 63 / 64 / 200e9 + 14e-6, 0.0),
    ("v6e:8x8", "fsdp=64", "fsdp", "all-reduce", 2 * (100 * MB * 63 / 64 / 200e9 + 14e-6), 0.0),
    # Three closed rings of a cube.
    ("v5p:4x4x4", "fsdp=64", "fsdp", "reduce-scatter", 100 * MB * 63 / 64 / 600e9 + 9e-6, 0.0),
    # A node of eight.
    ("h100:8x8", "fsdp=8,tensor=8", "tensor", "all-gather", 100 * MB * 7 / 8 / 450e9 + 15e-6, 0.0),
    # Eight nodes, one device of each.
    ("h100:8x8", "fsdp=8,tensor=8", "fsdp", "all-gather", 0.0, 100 * MB * 7 / 8 / 50e9 + 150e-6),
    # All to all on a switch, and along a line of four.
    ("h100:1x8", "expert=8", "expert", "ragged-all-to-all", 100 * MB * 7 / 8 / 450e9 + 15e-6, 0.0),
    ("v6e:8x8", "fsdp=16,expert=4", "expert", "ragged-all-to-all", 100 * MB * 4 / 4 / 100e9 + 3e-6, 0.0),
]


@pytest.mark.parametrize(("on", "mesh", "axis", "kind", "near", "far"), CASES)
def test_collectives_take_what_links_allow(on, mesh, axis, kind, near, far):
    found = Network(Cluster.parse(on), MeshSpec.parse(mesh)).time(kind, (axis,), 100 * MB)
    assert found.near == pytest.approx(near)
    assert found.far == pytest.approx(far)


def test_two_levels_overlap():
    network = Network(Cluster.parse("h100:8x8"), MeshSpec.parse("fsdp=64"))
    found = network.time("all-gather", ("fsdp",), 100 * MB)
    assert found.far == pytest.approx(100 * MB / 8 * 7 / 8 / 50e9)
    assert found.seconds == max(found.near, found.far)
