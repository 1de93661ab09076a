"""Runs with adapters of one base that are trained in one step: each is as if it had been trained alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.cli.recipe_arguments import run_recipe, without_together
from jaxllm.config import ConfigError
from jaxllm.convert.load import load_model
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.peft import AdapterConfig
from jaxllm.train import ResumeError, read_runs, train, train_together
from jaxllm.train.combinations import REFUSALS, refused
from jaxllm.train.run_features import FEATURES, TOGETHER
from jaxllm.train.together.runs_file import check_alike
from tests.train import runs

ADAPTER = AdapterConfig("lora", rank=2, alpha=8.0, targets=("q,v", "mlp"))


def members(base: Path, out: Path, steps: int = 6, **fields: Any) -> list[Any]:
    """Three runs of one base: they differ in seed, data and optimizer."""
    config = runs.run_config(
        base, init_from=str(base / "runs/tiny"), adapter=ADAPTER, steps=steps, out=out, eval_every=3, **fields
    )
    other = base / "other"
    if not (other / "text.txt").exists():
        runs.write_text(other, documents=30)
    return [
        dataclasses.replace(config, name="one"),
        dataclasses.replace(
            config,
            name="two",
            seed=3,
            optim=OptimConfig(ScheduleConfig("constant", 3e-3), kind="lion", clip_norm=0.5),
        ),
        dataclasses.replace(
            config, name="three", data=dataclasses.replace(config.data, source=str(other / "text.txt"), seed=4)
        ),
    ]


@pytest.fixture(scope="module")
def together(finished: Path) -> Path:
    """Directory of three runs that were trained together."""
    out = finished / "together"
    with runs.shared_programs():
        results = train_together(members(finished, out))
    assert [result.complete for result in results] == [True] * 3
    return out


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("number", range(3))
def test_each_run_is_as_trained_alone(finished: Path, together: Path, number: int) -> None:
    """Losses, gradient norms, evaluations and the merged model; float32 sums in another order, over 6 steps."""
    config = members(finished, finished / f"alone{number}")[number]
    with runs.shared_programs():
        alone = train(config)
    own = together / config.name
    got, wanted = rows(own), rows(alone.directory)
    assert [row.keys() for row in got] == [row.keys() for row in wanted]
    for name in ("loss", "grad_norm", "update_norm", "param_norm", "learning_rate", "tokens", "heldout_nll"):
        pairs = [(one[name], other[name]) for one, other in zip(got, wanted, strict=True) if name in other]
        assert pairs
        np.testing.assert_allclose(*zip(*pairs, strict=True), rtol=1e-4, err_msg=name)
    for one, other in zip(*(jax.tree.leaves(load_model(path).params) for path in (own, alone.directory)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)  # Lion moves each value by 0.003, whatever its gradient
    assert {path.name for path in own.iterdir()} == {path.name for path in alone.directory.iterdir()}


def test_runs_differ(together: Path) -> None:
    last = [rows(together / name)[-2]["loss"] for name in ("one", "two", "three")]
    assert len(set(last)) == 3


@pytest.mark.drawn(1)
def test_they_resume_bitwise(finished: Path, together: Path) -> None:
    """Stopped by a signal after four of six steps; one run lacks its last checkpoint, as after a kill between saves."""
    out = finished / "halted_together"
    with runs.shared_programs():
        with pytest.MonkeyPatch.context() as patch:
            runs.signal_at(patch, 3)
            results = train_together(members(finished, out, every=2))
        assert [(result.complete, result.steps) for result in results] == [(False, 4)] * 3
        last = max((out / "two" / "checkpoints").glob("*4"), key=lambda path: path.name)
        last.rename(out / "lost")
        again = train_together(members(finished, out, every=2))
    assert all(result.complete for result in again)
    for name in ("one", "two", "three"):
        assert runs.losses(out / name) == runs.losses(together / name)
        for one, other in zip(
            *(jax.tree.leaves(load_model(path / name).params) for path in (out, together)), strict=True
        ):
            np.testing.assert_array_equal(one, other)
    assert list((out / "one" / "checkpoints").glob("aside*"))


def test_a_run_resumes_alone(finished: Path, together: Path) -> None:
    """Its directory is that of any run: complete, so that nothing is left to do."""
    config = members(finished, together)[0]
    result = train(config)
    assert (result.complete, result.steps) == (True, 6)


@pytest.mark.drawn(3)
def test_one_that_diverges_stops_by_itself(finished: Path, together: Path) -> None:
    """A learning rate of 1e30 makes the second loss infinite; the other runs end as they do beside a sound one."""
    configs = members(finished, finished / "diverged")
    configs[1] = dataclasses.replace(configs[1], optim=OptimConfig(ScheduleConfig("constant", 1e30), clip_norm=None))
    with runs.shared_programs():
        results = train_together(configs)
    assert [result.complete for result in results] == [True, False, True]
    assert [result.signal for result in results] == [None] * 3
    for name in ("one", "three"):
        np.testing.assert_allclose(runs.losses(finished / "diverged" / name), runs.losses(together / name), rtol=1e-4)
    events = (finished / "diverged/two/events.jsonl").read_text()
    assert "failed" in events
    assert "finished" not in events


def test_what_runs_share_is_checked(finished: Path, tmp_path: Path) -> None:
    config = runs.run_config(finished, init_from=str(finished / "runs/tiny"), adapter=ADAPTER, out=tmp_path)
    for text, says in (
        ("[a]\nseed = 1\n[b]\nsteps = 3\n", r"differ in steps: 12 -> 3.*may differ in .*optim"),
        ("[a]\n[b]\ndata.seq_len = 8\n", "data.seq_len"),
        ("[a]\n[b]\nadapter.rank = 8\n", "adapter.rank"),
        ("[a]\n[b]\noptim.schedule.peek = 1\n", "peek"),
        ("[a]\n[b]\noptim.schedule.peak = -1.0\n", "peak"),
        ("[a]\n", "1 run is given"),
        ("seed = 1\n", "seed belongs to no run"),
        ("[a]\n[b]\nname = 'c'\n", "leave out name"),
        ("[a\n", "cannot be read"),
    ):
        file = tmp_path / "runs.toml"
        file.write_text(text)
        with pytest.raises(ValueError, match=says):
            read_runs(config, file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_runs(config, tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="names"):
        check_alike([config, config])


def test_what_does_not_go_together_is_refused(finished: Path, tmp_path: Path) -> None:
    """By the table of combinations; and runs of which some have checkpoints and others none."""
    configs = members(finished, tmp_path)
    plain = [dataclasses.replace(one, adapter=AdapterConfig()) for one in configs]
    with pytest.raises(ConfigError, match="does not go with"):
        train_together(plain)
    layerwise = OptimConfig(kind="lomo", clip_norm=None)
    with pytest.raises(ConfigError, match=r"joint step of one and other runs does not go with optim\.kind"):
        train_together(
            [
                dataclasses.replace(one, optim=layerwise, model=dataclasses.replace(one.model, remat="full"))
                for one in configs
            ]
        )
    with pytest.raises(ConfigError, match="init_from"):
        train_together([dataclasses.replace(one, init_from="") for one in configs])
    with runs.shared_programs():
        train(dataclasses.replace(configs[0], steps=6))
    with pytest.raises(ResumeError, match=r"one: \[.*6\]; two: none"):
        train_together(configs)


def test_rows_of_the_table_are_met_with_a_joint_step_alone() -> None:
    config = runs.RunConfig()
    rows = [row for row in REFUSALS if row.one == TOGETHER]
    assert len(rows) > 5
    assert not FEATURES[TOGETHER].on(config, {})
    assert [row.other for row in refused(config, {}, also=(TOGETHER,)) if row.one == TOGETHER] == ["no adapter"]


@pytest.mark.drawn(3)
def test_from_the_command_line(finished: Path, tmp_path: Path) -> None:
    """Names are the recipe's with the table's; the exit status is 1 where a run has stopped by itself."""
    assert without_together(["--steps", "2", "--together", "a.toml"]) == (["--steps", "2"], Path("a.toml"))
    assert without_together(["--together=a.toml"]) == ([], Path("a.toml"))
    config = runs.run_config(finished, init_from=str(finished / "runs/tiny"), steps=2, out=tmp_path)
    file = tmp_path / "runs.toml"
    file.write_text("[slow]\noptim.schedule.peak = 1e-4\n[fast]\noptim.schedule.peak = 1e30\noptim.clip_norm = 1e30\n")
    adapter = ["--adapter", "lora", "--adapter.rank", "2", "--together", str(file)]
    assert run_recipe(lambda: config, adapter) == 1
    assert (tmp_path / "tiny-slow/receipt.json").exists()
    assert (tmp_path / "tiny-fast/config.json").exists()
    assert run_recipe(lambda: config, ["--together"]) == 2
