"""`jaxllm train --mesh auto`: the first layout of the search, on devices that are known or named."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from jaxllm import cli
from jaxllm.plan import layout_search
from jaxllm.plan.automatic_layout import cluster_here
from jaxllm.plan.hardware import Cluster, read

FINISHED = SimpleNamespace(complete=True, signal=None)


def test_mesh_auto_trains_with_the_first_layout_of_the_search(monkeypatch, capsys):
    taken = []
    monkeypatch.setattr("jaxllm.cli.recipe_arguments.start_training", lambda run: taken.append(run) or FINISHED)
    asked = ["train", "quickstart", "--mesh", "auto", "--on", "v6e:2x4", "--data.batch-size", "16"]
    assert cli.main(asked) == 0
    found = layout_search.search(dataclasses.replace(taken[0], mesh="dp"), Cluster.parse("v6e:2x4")).layouts[0]
    assert (taken[0].mesh, taken[0].accumulate) == (found.run.mesh, found.run.accumulate)
    assert taken[0].parallel == found.run.parallel
    assert f'mesh auto: --mesh "{found.mesh}"' in capsys.readouterr().out


@pytest.mark.parametrize("budget", [[], ["--within", "1GiB", "--host", "1GiB"]])
def test_mesh_auto_plans_by_the_rates_of_a_file(monkeypatch, tmp_path, capsys, budget):
    """Devices without a data sheet, with memory so slow that another layout is first; the budget has the file too."""
    taken, budgets = [], []
    monkeypatch.setattr("jaxllm.cli.recipe_arguments.start_training", lambda run: taken.append(run) or FINISHED)
    monkeypatch.setattr("jaxllm.cli.recipe_arguments.fitted_here", lambda run, own: budgets.append(own) or run)
    file = tmp_path / "ours.toml"
    asked = ["train", "quickstart", "--mesh", "auto", "--data.batch-size", "16", "--hardware", str(file), *budget]
    for bandwidth in (3e12, 1e9):
        file.write_text(f'[cpu]\nlike = "h100"\nbandwidth = {bandwidth}\n')
        assert cli.main(asked) == 0
        cluster = cluster_here(read(file))
        assert cluster is not None
        assert cluster.hardware.bandwidth == bandwidth
        found = layout_search.search(dataclasses.replace(taken[-1], mesh="dp"), cluster).layouts[0]
        assert (taken[-1].mesh, taken[-1].model.remat) == (found.run.mesh, found.run.model.remat)
        assert f"{found.time.seconds:.3g} s a step" in capsys.readouterr().out
    assert taken[0].model.remat != taken[1].model.remat
    assert [own.hardware for own in budgets] == [file, file] * bool(budget)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--mesh", "auto"], "name a mesh, or say which devices"),
        (["--mesh", "auto", "--on", "v6e:2x2"], "which is 4 devices, but there are 8"),
        (["--mesh", "dp", "--on", "v6e:2x4"], "--mesh auto plans for"),
        (["--mesh", "auto", "--on"], "give the topology"),
    ],
)
def test_mistakes_about_mesh_auto_say_what_to_do(words, says, capsys):
    assert cli.main(["train", "quickstart", *words]) != 0
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "platform", "count", "name"),
    [
        ("TPU v6 lite", "tpu", 8, "v6e:2x4"),
        ("NVIDIA H100 80GB HBM3", "gpu", 16, "h100:2x8"),
        ("NVIDIA A100-SXM4-80GB", "gpu", 8, "a100:1x8"),
        ("NVIDIA GeForce RTX 3090", "gpu", 2, "rtx3090:1x2"),
        ("NVIDIA GeForce RTX 4090", "gpu", 1, "rtx4090:1x1"),
        ("NVIDIA A10G", "gpu", 4, "a10g:1x4"),
        ("NVIDIA L4", "gpu", 1, "l4:1x1"),
        ("NVIDIA L40S", "gpu", 1, None),
        ("cpu", "cpu", 8, None),
    ],
)
def test_devices_are_known_by_their_kind(monkeypatch, kind, platform, count, name):
    device = SimpleNamespace(device_kind=kind, platform=platform)
    monkeypatch.setattr("jax.devices", lambda: [device])
    monkeypatch.setattr("jax.device_count", lambda: count)
    found = cluster_here()
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("kind", "file", "name", "host"),
    [
        ("cpu", '[cpu]\nlike = "h100"\nhost = 9e9\n', "cpu:1x8", 9e9),
        ("NVIDIA L40S", '["nvidia l40s"]\nlike = "l4"\nhost = 9e9\n[other]\nlike = "l4"\n', "nvidia l40s:1x8", 9e9),
        ("NVIDIA L40S", '[ours]\nlike = "l4"\nhost = 9e9\n', "ours:1x8", 9e9),
        ("NVIDIA L4", "[l4]\nhost = 9e9\n", "l4:1x8", 9e9),
        ("NVIDIA L4", '[one]\nlike = "l4"\nhost = 9e9\n[two]\nlike = "l4"\n', "l4:1x8", 32e9),
        ("NVIDIA L40S", '[one]\nlike = "l4"\n[two]\nlike = "l4"\n', None, None),
        ("NVIDIA L40S", "[l4]\nhost = 9e9\n", None, None),
    ],
)
def test_a_file_gives_the_rates_of_other_devices(monkeypatch, tmp_path, kind, file, name, host):
    monkeypatch.setattr("jax.devices", lambda: [SimpleNamespace(device_kind=kind, platform="any")])
    monkeypatch.setattr("jax.device_count", lambda: 8)
    (tmp_path / "ours.toml").write_text(file)
    found = cluster_here(read(tmp_path / "ours.toml"))
    assert (found and found.name) == name
    assert (found and found.hardware.host) == host
