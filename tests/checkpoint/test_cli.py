"""`jaxllm checkpoint` on a real run: list, verify, diff, convert, remove; its results are used."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxllm.checkpoint import Checkpointer
from jaxllm.cli import main
from jaxllm.train import train
from tests.train.runs import run_config

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return train(run_config(folder, keep_last=3)).directory


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def say(capsys: pytest.CaptureFixture, *argv: object) -> tuple[int, str]:
    capsys.readouterr()
    status = main(["checkpoint", *map(str, argv)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def flip(run: Path, pattern: str) -> None:
    (file,) = run.glob(pattern)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


@pytest.mark.drawn(0.3)
def test_ls_and_verify(run: Path, capsys: pytest.CaptureFixture) -> None:
    status, text = say(capsys, "ls", run)
    assert status == 0
    assert [line.split()[0] for line in text.splitlines()] == ["4", "8", "12"]
    assert all("loss" in line and "params, opt_state, step, rng" in line for line in text.splitlines())
    assert "params/embedding/table" in say(capsys, "ls", run, "--leaves")[1]
    assert say(capsys, "verify", run / "checkpoints")[0] == 0
    flip(run, "checkpoints/step_00000008/state/params.embedding.table/0.0")
    status, text = say(capsys, "verify", run)
    assert status == 1
    assert "step 8: DAMAGED" in text
    assert "leaf params/embedding/table" in text
    assert "step 12: good" in text
    assert say(capsys, "verify", run, "--step", 12)[0] == 0
    flip(run, "checkpoints/step_00000008/manifest.json")
    assert "8  DAMAGED" in say(capsys, "ls", run)[1]


def test_places_that_are_not(run: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    for command in ("ls", "verify"):
        status, text = say(capsys, command, tmp_path / "nowhere")
        assert status == 2
        assert "there is no directory" in text
    assert say(capsys, "vrify", run) == (2, say(capsys, "vrify", run)[1])
    assert "verify" in say(capsys, "vrify", run)[1]
    assert "ls" in say(capsys)[1]


def test_diff(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert say(capsys, "diff", run, run)[0] == 0
    status, text = say(capsys, "diff", run, run, "--first-step", 4)
    assert status == 1
    assert "|a-b|/|a|" in text
    assert "meta cursor: differs" in text
    assert "step: 4 and 12" in text


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("extra", [[], ["--dtype", "bfloat16"]])
def test_parameters_alone_are_served_directly(
    run: Path, capsys: pytest.CaptureFixture, tmp_path: Path, extra: list[str]
) -> None:
    out = tmp_path / "out"
    assert say(capsys, "reshard", run, out, "--only", "params", *extra)[0] == 0
    with Checkpointer(out / "checkpoints", read_only=True) as found:
        leaves = found.manifest().leaves
        assert all(path.startswith("params/") for path in leaves)
        assert {leaf.dtype for leaf in leaves.values()} == {extra[1] if extra else "float32"}
    assert main(["generate", str(out), "--prompt", "the", "--max-tokens", "4"]) == 0
    if not extra:
        assert main(["eval", str(out)]) in (0, 1)
        capsys.readouterr()
        assert say(capsys, "diff", run, out, "--only", "params")[1].count("params/") == 0
    assert "exists" in say(capsys, "reshard", run, out)[1]


def test_layers_alone_and_stacked_again(run: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert say(capsys, "reshard", run, tmp_path / "single", "--layers", "single")[0] == 0
    listed = say(capsys, "ls", tmp_path / "single", "--leaves")[1]
    assert "params/layers/0/0/0/" in listed
    assert "mu/layers/0/0/0/" in listed
    assert "segments" not in listed
    assert say(capsys, "reshard", tmp_path / "single", tmp_path / "stacked", "--layers", "stacked")[0] == 0
    status, text = say(capsys, "diff", run, tmp_path / "stacked")
    assert (status, text.splitlines()[0]) == (0, "equal")


def test_names_of_the_family_and_back(run: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    status, text = say(capsys, "reshard", run, tmp_path / "hf", "--only", "params", "--names", "hf")
    assert status == 0, text
    listed = say(capsys, "ls", tmp_path / "hf", "--leaves")[1]
    assert "params/model.layers.0.self_attn.q_proj.weight" in listed
    assert say(capsys, "reshard", tmp_path / "hf", tmp_path / "back", "--only", "params", "--names", "jaxllm")[0] == 0
    text = say(capsys, "diff", run, tmp_path / "back", "--only", "params")[1]
    assert "params/" not in text
    assert "give --only params" in say(capsys, "reshard", run, tmp_path / "x", "--names", "hf")[1]


def test_gc_keeps_the_newest_good_one(run: Path, capsys: pytest.CaptureFixture) -> None:
    flip(run, "checkpoints/step_00000012/state/params.embedding.table/0.0")
    status, text = say(capsys, "gc", run, "--keep-last", 1, "--dry-run")
    assert (status, text.split(";")[0]) == (0, "would remove: step_00000004")
    assert say(capsys, "gc", run, "--keep-last", 1)[0] == 0
    with Checkpointer(run / "checkpoints", read_only=True) as found:
        assert found.steps() == [8, 12]
        assert found.latest_good() == 8
    with Checkpointer(run / "checkpoints") as found:
        assert found.latest_good() == 8  # and sets the damaged one aside
    assert "set aside" in say(capsys, "ls", run)[1]
    assert "corrupt_00000012" in say(capsys, "gc", run, "--set-aside")[1]
    assert "set aside" not in say(capsys, "ls", run)[1]


def test_values_of_a_part(run: Path) -> None:
    with Checkpointer(run / "checkpoints", read_only=True) as found:
        leaf = found.open_leaves()["params/embedding/table"]
        np.testing.assert_array_equal(leaf.read((slice(3, 5), slice(2, 9))), leaf.read()[3:5, 2:9])
