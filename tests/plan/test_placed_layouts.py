"""`jaxllm plan --host --disk`: layouts whose states and activations are on the host or on disk, by the same search."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path

import pytest

from jaxllm import cli
from jaxllm.cli.errors import UsageError
from jaxllm.cli.recipe_arguments import find_recipe
from jaxllm.config import ConfigError
from jaxllm.models.remat import saves_names_alone
from jaxllm.plan import layout_search
from jaxllm.plan.capacity_table import PLACEMENTS, FileTraffic, disk_seconds, file_traffic, run_bytes, with_windows
from jaxllm.plan.formulas.tier_bytes import TierBytes
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.placed_layouts import _predicted, search_places, values_within
from jaxllm.train import RunConfig
from jaxllm.train.disk.config import DiskConfig
from jaxllm.train.host_offload import HostConfig
from sharding import MeshSpec
from tests import environment

LLAMA = f"{environment.ROOT / 'recipes' / 'llama2.py'}:llama2_7b"
FOREVER = TierBytes(2**60, 2**60, 2**60)


def small(**changes: object) -> RunConfig:
    run = find_recipe("quickstart")()
    data = dataclasses.replace(run.data, batch_size=8, seq_len=256)
    model = dataclasses.replace(run.model, layers=8, embed_dim=512)
    return dataclasses.replace(run, model=model, data=data, **changes)


@pytest.mark.parametrize("mib", [200, 120, 90, 60])
@pytest.mark.parametrize("there", [(0, 0), (96, 0), (0, 600), (96, 600), (20, 600)])
def test_the_search_finds_the_fastest_place(mib, there):
    """Against all layouts, places and windows, one after the other."""
    run, cluster = small(), Cluster.parse("h100:1x2")
    available = TierBytes(mib * 2**20, *(size * 2**20 for size in there))
    cluster = dataclasses.replace(cluster, hardware=dataclasses.replace(cluster.hardware, hbm_bytes=mib * 2**20))
    available = available._replace(device=layout_search.memory_limit(cluster))
    found = search_places(run, cluster, available, "/nvme")
    every = []
    for mesh in layout_search.meshes(run, cluster):
        staged = dict(mesh.axes).get("stage", 1) > 1
        for laid, place in itertools.product(layout_search.legal_layouts(run, mesh), PLACEMENTS):
            if place == PLACEMENTS[0] or staged:
                if place == PLACEMENTS[0]:
                    every.append(layout_search.predict_layout(laid, mesh, cluster))
                continue
            if laid.model.remat != "full" and (place.placement.parameters == "disk" or place.remat != "full"):
                continue
            placed = place.of(laid)
            if place.remat == "full":
                placed = dataclasses.replace(placed, model=laid.model)
            for one in with_windows(placed):
                if not layout_search.is_supported(one, mesh):
                    continue
                if not run_bytes(one, mesh, cluster).lacking(available):
                    every.append(predicted(one, mesh, cluster, int(available.device)))
                if place == PLACEMENTS[4] and (choice := values_within(one, mesh, cluster, available)):
                    every.append(predicted(choice.of(one), mesh, cluster, int(available.device)))
    best: dict[MeshSpec, float] = {}
    for one in every:
        if one.fits and one.time.seconds < best.get(one.mesh, math.inf):
            best[one.mesh] = one.time.seconds
    assert {layout.mesh: layout.time.seconds for layout in found.layouts} == pytest.approx(best, rel=1e-9)
    assert [layout.time.seconds for layout in found.layouts] == sorted(layout.time.seconds for layout in found.layouts)
    assert (found.nearest is None) == bool(best)


def predicted(run: RunConfig, mesh: MeshSpec, cluster: Cluster, limit: int) -> layout_search.ParallelLayout:
    from jaxllm.plan.capacity_table import run_kinds
    from jaxllm.plan.formulas.calibration import DEFAULT

    return _predicted(run, mesh, run_kinds(run, mesh, cluster), cluster, DEFAULT, limit)


def test_traffic_and_seconds_of_files_by_hand():
    """Llama 2 7B on one GPU: layers twice but for the window, states once; with clipping a backward pass more."""
    run, cluster, mesh = find_recipe(LLAMA)(), Cluster.parse("h100:1x1"), MeshSpec.parse("data=1")
    layer = 4 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096)
    ends, hidden = 4 * (2 * 32_000 * 4096 + 4096), 2 * 2048 * 4096
    alone = dataclasses.replace(run, disk=DiskConfig("/nvme"))
    state = 2 * (32 * layer + ends)
    assert file_traffic(alone, mesh, cluster) == pytest.approx((0, state - 8 * layer, 0, state, 0, 0))
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, remat="full"))
    streamed = dataclasses.replace(run, disk=DiskConfig("/nvme", window=2, parameters=True))
    expected = (30 * layer, 30 * layer + state, 0, 32 * layer + state, 30 * layer, 256 * hidden)
    assert file_traffic(streamed, mesh, cluster) == pytest.approx(expected)
    free = dataclasses.replace(
        streamed,
        disk=dataclasses.replace(streamed.disk, activations=True),
        optim=dataclasses.replace(run.optim, clip_norm=None),
    )
    expected = (30 * layer, 30 * layer + state, 256 * hidden, 32 * layer + state, 0, 256 * hidden)
    assert file_traffic(free, mesh, cluster) == pytest.approx(expected)
    values = 2 * 2048 * (3 * 4096 + 2 * 11_008 + 4096)  # queries, keys, values, gate, up, residual
    more = dataclasses.replace(free, model=dataclasses.replace(run.model, remat="attention=1,full=31"))
    saved = 256 * hidden + 8 * values
    assert file_traffic(more, mesh, cluster) == pytest.approx((*expected[:2], saved, expected[3], 0, saved))

    hardware = dataclasses.replace(cluster.hardware, disk=10.0, host=100.0)
    assert disk_seconds(FileTraffic(0, 40, 0, 60, 0), hardware, 100, 100) == 6
    moved = FileTraffic(50, 90, 20, 80, 0)
    assert disk_seconds(moved, hardware, 3, 8) == pytest.approx(2 + 3)
    assert disk_seconds(moved, hardware, 30, 80) == 0
    assert disk_seconds(moved._replace(again=100), hardware, 3, 8) == pytest.approx(2 + 3 + 10)
    assert disk_seconds(moved._replace(again=1), hardware, 30, 80) == 80
    assert disk_seconds(FileTraffic(0, 40, 0, 60, 0), dataclasses.replace(hardware, host=5.0), 1, 1) == 12
    assert disk_seconds(moved._replace(away=900), hardware, 3, 8) == pytest.approx(6 + 3), "of the link"
    assert disk_seconds(moved._replace(away=2000), hardware, 3, 8) == pytest.approx(17 + 12.9)


def test_streamed_layers_save_what_makes_the_step_fastest():
    """Of a mesh the layout with named values is faster than any with the layers' inputs alone, and fits."""
    run, cluster = find_recipe("llama3_70b")(), Cluster.parse("h100:1x8")
    available = TierBytes(layout_search.memory_limit(cluster), 128 * 2**30, 2**40)
    best = search_places(run, cluster, available, "/nvme").layouts[0]
    assert best.run.disk.parameters
    assert saves_names_alone(best.run.model.remat)
    assert best.run.model.remat != "full"
    assert not run_bytes(best.run, best.mesh, cluster).lacking(available)
    for place in PLACEMENTS[4:]:
        for one in with_windows(place.of(best.run)):
            assert predicted(one, best.mesh, cluster, best.limit).time.seconds > best.time.seconds


def test_plans_with_files_are_shown_and_saved(tmp_path, capsys):
    """What trains nowhere in memory is planned with layers on disk; the saved recipe has the place."""
    file, table = tmp_path / "planned.py", tmp_path / "plan.json"
    asked = ["plan", "llama3_70b", "--on", "h100:1x8", "--no-compile", "--top", "1", "--explain", "1"]
    assert cli.main(asked) == 1
    capsys.readouterr()
    tiers = ["--host", "128GiB", "--disk", "/mnt/nvme:1TiB"]
    assert cli.main([*asked, *tiers, "--save", str(file), "--json", str(table)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"inputs and values of \d+ layers, layers, state on disk, window \d", said)
    assert "files, beside the passes" in said
    assert "on disk" in said
    (row,) = json.loads(table.read_text())
    memory = row["predicted"]["memory"]
    assert 0 < memory["total"] <= row["predicted"]["limit"]
    assert 0 < memory["host"] <= 128 * 2**30
    assert 0 < memory["disk"] <= 2**40
    run = find_recipe(f"{file}:llama3_70b_h100_1x8")()
    assert (run.disk.directory, run.disk.bytes, run.disk.parameters) == ("/mnt/nvme", 8 * 2**40, True), "of a process"
    assert saves_names_alone(run.model.remat)
    assert run_bytes(run, MeshSpec.parse(run.mesh), Cluster.parse("h100:1x8")).disk == pytest.approx(memory["disk"])
    slow = Path(tmp_path / "slow.toml")
    slow.write_text("[h100]\ndisk = 3e8\n")
    assert cli.main([*asked, *tiers, "--hardware", str(slow), "--json", str(table)]) == 0
    (slower,) = json.loads(table.read_text())
    assert slower["predicted"]["time"]["disk"] > 5 * row["predicted"]["time"]["disk"]


@pytest.mark.drawn(3)
def test_layouts_with_files_are_compiled(tmp_path, capsys):
    table, small = tmp_path / "plan.json", tmp_path / "small.toml"
    small.write_text("[h100]\nhbm_bytes = 25340307046\n")
    tiers = ["--host", "40GiB", "--disk", "/mnt/nvme:400GiB", "--json", str(table), "--hardware", str(small)]
    assert cli.main(["plan", LLAMA, "--on", "h100:1x1", "--top", "1", *tiers]) == 0
    (row,) = json.loads(table.read_text())
    compiled, predicted = row["compiled"], row["predicted"]["memory"]
    assert compiled["device"] == pytest.approx(predicted["total"], rel=0.1)
    assert "forward 0" in compiled["programs"]
    assert f"{len(compiled['programs'])} programs" in capsys.readouterr().out


def test_what_does_not_go_with_places_is_refused():
    cluster = Cluster.parse("h100:1x2")
    for run in (small(host=HostConfig(optimizer=True)), small(disk=DiskConfig("/nvme"))):
        with pytest.raises(ConfigError, match="says where its states are"):
            search_places(run, cluster, FOREVER, "/nvme")
    for words, message in (
        (["--as-is"], "leave --as-is and --documents out"),
        (["--disk", "/nvme"], "give DIR:SIZE"),
        (["--host", "much"], "--host much: give a size"),
    ):
        with pytest.raises(UsageError, match=message):
            cli.COMMANDS["plan"](["quickstart", "--on", "h100:1x2", "--no-compile", "--host", "1", *words])
