"""`jaxllm train --mesh auto`: the first layout of the search, on devices that are known or named."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from jaxllm import cli
from jaxllm.plan import layout_search
from jaxllm.plan.automatic_layout import cluster_here
from jaxllm.plan.hardware import Cluster

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
    [("TPU v6 lite", "tpu", 8, "v6e:2x4"), ("NVIDIA H100 80GB HBM3", "gpu", 16, "h100:2x8"), ("cpu", "cpu", 8, None)],
)
def test_devices_are_known_by_their_kind(monkeypatch, kind, platform, count, name):
    device = SimpleNamespace(device_kind=kind, platform=platform)
    monkeypatch.setattr("jax.devices", lambda: [device])
    monkeypatch.setattr("jax.device_count", lambda: count)
    found = cluster_here()
    assert (found and found.name) == name
