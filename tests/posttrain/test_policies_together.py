"""Policies that are adapters of one base, trained at the same time; proofs compare each with one trained alone."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.recipe_arguments import run_recipe
from jaxllm.config import ConfigError
from jaxllm.peft.adapter_method import AdapterConfig
from jaxllm.posttrain import PolicyRunConfig, RewardError, train_policies_together, train_policy
from jaxllm.train.records.run_directory import RunDirectory
from tests import environment
from tests.posttrain.tiny_policy import MODEL, policy_run
from tests.train import runs

HERE = "tests.posttrain.tiny_policy:"
FLOAT64 = dataclasses.replace(MODEL, dtype="float64", param_dtype="float64")


def policies(folder: Path, base: Path, **fields: Any) -> list[PolicyRunConfig]:
    """Two policies of one base, which differ in seed and reward."""
    adapter = AdapterConfig("lora", rank=4, targets=("attention", "mlp"))
    shared = {"model": FLOAT64, "init_from": str(base), "adapter": adapter} | fields
    return [
        policy_run(folder, name="one", **shared),
        policy_run(folder, name="two", **(shared | {"seed": 5, "rewards": (f"{HERE}large_bytes",)})),
    ]


@pytest.fixture(scope="module", autouse=True)
def double() -> Iterator[None]:
    """Float64, in which a merged adapter and one beside its base sample the same tokens."""
    with environment.x64():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory, double: None) -> Path:
    return train_policy(policy_run(tmp_path_factory.mktemp("base"), name="base", model=FLOAT64, steps=1)).directory


@pytest.fixture(scope="module")
def together(tmp_path_factory, base: Path) -> Path:
    out = tmp_path_factory.mktemp("together")
    assert [one.complete for one in train_policies_together(policies(out, base))] == [True] * 2
    return out / "runs"


def rows(directory: Path) -> list[dict[str, Any]]:
    return [row for row in RunDirectory(directory).read_metrics() if "reward" in row]


def episodes(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "episodes.jsonl").read_text().splitlines()]


@pytest.mark.drawn(0.5)
def test_they_resume_with_the_same_curves(base: Path, together: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        runs.signal_at(patch, 1)
        assert [one.complete for one in train_policies_together(policies(tmp_path, base))] == [False] * 2
    assert all(one.complete for one in train_policies_together(policies(tmp_path, base)))
    for name in ("one", "two"):
        assert episodes(tmp_path / "runs" / name) == episodes(together / name)
        assert [row["loss"] for row in rows(tmp_path / "runs" / name)] == [row["loss"] for row in rows(together / name)]
    first, second = (episodes(together / name) for name in ("one", "two"))
    assert [row["completion"] for row in first] != [row["completion"] for row in second]


@pytest.mark.drawn(1)
def test_what_does_not_go_together_is_refused(base: Path, tmp_path: Path) -> None:
    def configs(**fields: Any) -> list[PolicyRunConfig]:
        return [dataclasses.replace(one, **fields) for one in policies(tmp_path, base)]

    with pytest.raises(ConfigError, match=r'does not serve adapter.kind = "dora" beside others\. Choose .*rslora'):
        train_policies_together(configs(adapter=AdapterConfig("dora", rank=2)))
    with pytest.raises(ConfigError, match="does not serve trainable"):
        train_policies_together(configs(trainable=("*norm*",)))
    with pytest.raises(ValueError, match=r'adapter.kind = "lora_ga" starts from the gradient of the first batch'):
        configs(adapter=AdapterConfig("lora_ga", rank=2))
    one, two = configs()
    wider = dataclasses.replace(two, rollout=dataclasses.replace(two.rollout, group=5))
    with pytest.raises(ConfigError, match=r"differ in rollout.group: 4 -> 5"):
        train_policies_together([one, wider])
    twice = dataclasses.replace(one, rollout=dataclasses.replace(one.rollout, updates=2))
    with pytest.raises(ConfigError, match=r"rollout.updates = 2: several policies are updated once"):
        train_policies_together([one, twice])
    with pytest.raises(RewardError, match=r"two: step 1: .*raises raised KeyError"):
        train_policies_together([one, dataclasses.replace(two, rewards=(f"{HERE}raises",))])


@pytest.mark.drawn(2)
def test_from_the_command_line(base: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(policies(tmp_path, base)[0], name="both", steps=1)
    file = tmp_path / "runs.toml"
    file.write_text(f'[small]\n[large]\nrewards = ["{HERE}large_bytes"]\n')
    assert run_recipe(lambda: config, ["--together", str(file)]) == 0
    for name in ("both-small", "both-large"):
        assert len(episodes(tmp_path / "runs" / name)) == 16
    assert math.isfinite(rows(tmp_path / "runs/both-large")[0]["loss"])
