"""Calibration from a profile reproduces the measured step; a profile of other devices is refused."""

from __future__ import annotations

import dataclasses
import gzip
import json

import pytest

from jaxllm import cli
from jaxllm.config import to_dict
from jaxllm.observe.profile_summary import ProfileSummary
from jaxllm.plan.formulas import step_time
from jaxllm.plan.formulas.calibration import DEFAULT
from jaxllm.plan.hardware import TABLE, Cluster
from jaxllm.plan.measured_calibration import fit_calibration
from recipes.llama3 import llama3_8b
from sharding import MeshSpec

CLUSTER, MESH = Cluster.parse("v6e:8x8"), MeshSpec.parse("fsdp=16,tensor=4")
STEPS = 3


def run():
    plan = dataclasses.replace(llama3_8b().parallel, sequence=True)
    return dataclasses.replace(llama3_8b(), mesh=str(MESH), parallel=plan)


def seen(step: step_time.StepTime, slower: float, links: float) -> ProfileSummary:
    """A profile of devices that compute ``slower`` and send ``links`` times as long as predicted."""
    computing = STEPS * slower * (step.compute + step.memory)
    sent = STEPS * links * sum(sum(part.values()) for part in (step.near, step.far, step.hidden))
    exposed = STEPS * links * sum(step.near.values())
    return ProfileSummary(("TPU:0",), computing + exposed, computing, sent, exposed, (), STEPS)


@pytest.mark.parametrize(("slower", "links"), [(1.0, 1.0), (1.3, 1.0), (1.0, 1.7), (1.2, 1.4)])
def test_what_was_seen_is_predicted(slower, links):
    before = step_time.predict(run(), CLUSTER, MESH)
    found = fit_calibration(seen(before, slower, links), before, DEFAULT)
    after = step_time.predict(run(), CLUSTER, MESH, found)
    assert after.compute + after.memory == pytest.approx(slower * (before.compute + before.memory), rel=0.01)
    sent = [sum(sum(part.values()) for part in (step.near, step.far, step.hidden)) for step in (before, after)]
    assert sent[1] == pytest.approx(links * sent[0], rel=0.01)
    assert found.link == pytest.approx(DEFAULT.link / links)


def test_no_share_is_more_than_the_data_sheet():
    before = step_time.predict(run(), CLUSTER, MESH)
    found = fit_calibration(seen(before, 0.1, 0.1), before, DEFAULT)
    assert max(dataclasses.asdict(found).values()) == 1.0


@pytest.fixture
def profiled(tmp_path):
    """A run on 64 chips with a profile of three steps, as its directory has it."""
    step = step_time.predict(run(), CLUSTER, MESH)
    (tmp_path / "config.json").write_text(json.dumps(to_dict(run())))
    (tmp_path / "metrics.jsonl").write_text("")
    started = {"event": "started", "time": 0.0, "devices": 64, "device_kind": "TPU v6 lite"}
    (tmp_path / "events.jsonl").write_text(json.dumps(started) + "\n")
    length = 1e6 * STEPS * 1.25 * (step.compute + step.memory)
    names = [
        {"ph": "M", "name": "process_name", "pid": p, "args": {"name": n}} for p, n in ((1, "/device:TPU:0"), (2, "h"))
    ]
    names += [{"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "XLA Ops"}}]
    marks = [
        {"ph": "X", "name": "train", "pid": 2, "tid": 1, "ts": n, "args": {"step_num": str(n)}} for n in (10, 11, 12)
    ]
    op = {"ph": "X", "name": "fusion.1", "pid": 1, "tid": 1, "ts": 0.0, "dur": length}
    folder = tmp_path / "profiles" / "step_10"
    folder.mkdir(parents=True)
    with gzip.open(folder / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": [*names, *marks, op]}, file)
    return tmp_path


def test_the_command_plans_by_a_runs_profile(profiled, capsys):
    argv = ["plan", "llama3_8b", "--on", "v6e:8x8", "--no-compile", "--as-is", "--calibrate", str(profiled)]
    assert cli.main(argv) == 0
    assert f"matmul {100 * DEFAULT.matmul / 1.25:.0f}%, attention {100 * DEFAULT.attention / 1.25:.0f}%" in (
        capsys.readouterr().out
    )


def test_a_profile_of_other_devices_is_refused(profiled, capsys):
    argv = ["plan", "llama3_8b", "--on", "v5p:4x4x4", "--no-compile", "--as-is", "--calibrate", str(profiled)]
    assert cli.main(argv) == 2
    assert "ran on TPU v6 lite, not on TPU v5 (v5p)" in capsys.readouterr().err


def test_clusters_of_a_number_of_devices():
    names = {"v6e": {64: "v6e:8x8", 8: "v6e:2x4"}, "v5p": {64: "v5p:4x4x4"}, "tpu7x": {64: "tpu7x:2x4x4"}}
    names |= {"h100": {64: "h100:8x8", 4: "h100:1x4"}}
    for kind, of in names.items():
        for devices, name in of.items():
            made = Cluster.sized(TABLE[kind], devices)
            assert made is not None
            assert (made.name, made.devices) == (name, devices)
    assert Cluster.sized(TABLE["v6e"], 7) is None
