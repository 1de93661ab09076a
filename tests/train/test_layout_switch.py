"""Layout switches: the curve of one mesh, resumes on either side, and meshes that a run does not go with."""

from __future__ import annotations

import dataclasses

import pytest

from jaxllm import cli
from jaxllm.config import ConfigError
from jaxllm.train import train
from jaxllm.train.outer.config import OuterConfig
from jaxllm.train.recovery.layout_switch import LayoutSwitch, switched_train
from tests.train.runs import losses, run_config, stopped_at

pytestmark = pytest.mark.usefixtures("shared_programs")
SWITCHES = [LayoutSwitch(3, "fsdp=4,tensor=2"), LayoutSwitch(5, "fsdp=2,data=2,context=2")]


def same(config):
    """A layout as it is; data parallelism for one that is to be planned."""
    return dataclasses.replace(config, mesh="dp") if config.mesh == "auto" else config


def meshes(said: str) -> list[str]:
    """Meshes of the starts that were announced."""
    return [line.partition("(")[2].rstrip(")") for line in said.splitlines() if " parameters on " in line]


@pytest.mark.drawn(0.6)
def test_a_switched_run_has_the_curve_of_one_mesh(tmp_path, capfd):
    fields = {"steps": 7, "mesh": "dp"}
    whole = train(run_config(tmp_path, name="whole", **fields))
    capfd.readouterr()
    done = switched_train(run_config(tmp_path, name="switched", **fields), SWITCHES, same)
    assert meshes(capfd.readouterr().out) == ["data=8", "fsdp=4, tensor=2", "fsdp=2, data=2, context=2"]
    assert done.complete
    assert len(losses(done.directory)) == 7
    for ours, theirs in zip(losses(done.directory), losses(whole.directory), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.drawn(0.6)
def test_a_stopped_run_goes_on_with_the_mesh_of_its_step(tmp_path, capfd):
    fields = {"steps": 7, "mesh": "auto", "name": "switched"}
    stopped = stopped_at(tmp_path, 4, **{**fields, "mesh": "fsdp=4,tensor=2"})
    capfd.readouterr()
    done = switched_train(run_config(tmp_path, **fields), SWITCHES, same)
    assert (done.directory, done.complete) == (stopped, True)
    assert meshes(capfd.readouterr().out) == ["fsdp=4, tensor=2", "fsdp=2, data=2, context=2"]
    assert [step for step, *_ in losses(stopped)] == [1, 2, 3, 4, 5, 6, 7]


def test_what_does_not_go_with_a_run_is_refused_before_its_first_step(tmp_path):
    run = run_config(tmp_path, steps=7, mesh="dp")
    for switches, said in (
        ([LayoutSwitch(7, "fsdp")], "from 1 to 6"),
        ([LayoutSwitch(4, "fsdp"), LayoutSwitch(4, "dp")], "ascending"),
        ([LayoutSwitch(2, "fsdp=3")], "8 devices"),
        ([LayoutSwitch(2, "pipes=2")], "pipes"),
    ):
        with pytest.raises((ConfigError, ValueError), match=said):
            switched_train(run, switches, same)
    replicas = run_config(tmp_path, steps=7, mesh="replica=2,fsdp=4", outer=OuterConfig("diloco", every=2))
    with pytest.raises(ConfigError, match=r"4 replicas.* it replica=2"):
        switched_train(replicas, [LayoutSwitch(2, "replica=4,fsdp=2")], same)
    assert not (tmp_path / "runs").exists()


def test_the_command_line(tmp_path, capfd):
    assert [LayoutSwitch.parse(text) for text in ("4", "4:fsdp=8")] == [LayoutSwitch(4), LayoutSwitch(4, "fsdp=8")]
    for text in ("", "x", "4:", "fsdp=8", "-1"):
        assert cli.main(["train", "quickstart", "--replan", text]) == 2
        assert "give STEP or STEP:MESH" in capfd.readouterr().err
    assert cli.main(["train", "draft_smollm2", "--replan", "4:fsdp=8", "--out", str(tmp_path)]) == 2
    assert "keep their mesh" in capfd.readouterr().err
