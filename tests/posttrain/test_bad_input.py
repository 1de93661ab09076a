"""What goes wrong in a run of reinforcement learning is named, and the run goes on or stops as documented.

Rewards that raise, return NaN or take forever are in ``test_policy`` and, as whole runs, in the proof
``failing_rewards``; environments that raise or take too long in ``test_environments``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.data import ByteTokenizer
from jaxllm.files import DataError
from jaxllm.posttrain import train_policy
from jaxllm.posttrain.policy_training import open_policy_data
from jaxllm.train import ObjectiveConfig, reference
from jaxllm.train.records.run_directory import RunDirectory
from tests.posttrain.tiny_policy import MODEL, policy_run

HERE = "tests.posttrain.test_bad_input:"


def always_one(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """The same reward for every completion."""
    return 1.0


def fails_for_some(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Fails for all completions of one prompt, which then has a group without a reward."""
    if prompt == "ab":
        raise LookupError("no answer to ab")
    return float(len(completion) % 3)


def rows_of(directory: Path, file: str) -> list[dict[str, Any]]:
    """Rows of a run's log."""
    return [json.loads(line) for line in (directory / file).read_text().splitlines()]


def file_of(folder: Path, rows: list[dict[str, Any]]) -> str:
    """File of prompts."""
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "own.jsonl")


@pytest.mark.drawn(1)
def test_environments_may_end_before_others(tmp_path):
    """An environment that ends after its first turn, beside one that goes on: each episode has its own turns."""
    prompts = file_of(tmp_path, [{"prompt": "ab", "turns": 1}, {"prompt": "cd", "turns": 3}])
    config = policy_run(
        tmp_path, prompts=prompts, environment="tests.posttrain.environments:Short", rewards=(), max_tokens=24, steps=1
    )
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=16))
    result = train_policy(config)
    assert result.complete
    rows = rows_of(result.directory, "episodes.jsonl")
    assert len(rows) == 16
    assert all(row["reward"] is not None for row in rows)
    assert {row["turns"] for row in rows if row["prompt"] == "ab"} == {1}
    assert max(row["turns"] for row in rows if row["prompt"] == "cd") > 1
    for row in rows:
        if row["prompt"] == "ab":
            assert row["written_tokens"] == row["tokens"], "an observation that nothing answers is not in the episode"


def test_prompts_longer_than_the_model(tmp_path):
    short = dataclasses.replace(MODEL, learned_positions=16)
    with pytest.raises(ValueError, match=r"data.seq_len = 32, but the model has learned 16 positions"):
        policy_run(tmp_path, model=short)
    config = policy_run(tmp_path, prompts=file_of(tmp_path, [{"prompt": "ok"}, {"prompt": "x" * 40}]))
    with pytest.raises(DataError, match=r"own.jsonl:2: the prompt has 4\d tokens; .* leaves 27"):
        open_policy_data(config)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("algorithm", ["dapo", "ppo"])
def test_steps_without_an_informative_group_go_on(tmp_path, algorithm):
    """DAPO drops every group of equal rewards, so that the step's batch is empty; the update is none."""
    config = policy_run(tmp_path, algorithm=algorithm, rewards=(f"{HERE}always_one",), steps=2, group=2, attempts=2)
    result = train_policy(config)
    assert result.complete
    rows = [row for row in RunDirectory(result.directory).read_metrics() if "reward" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(np.isfinite(row["loss"]) and np.isfinite(row["grad_norm"]) for row in rows)
    if algorithm == "dapo":
        # Overlong completions are punished, so that groups may differ by their lengths; the others are dropped.
        assert all(row["dropped_groups"] > 0 for row in rows)


@pytest.mark.drawn(3)
def test_a_group_without_a_reward_has_no_part(tmp_path):
    result = train_policy(policy_run(tmp_path, rewards=(f"{HERE}fails_for_some",), steps=2))
    assert result.complete
    rows = rows_of(result.directory, "episodes.jsonl")
    failed = [row for row in rows if row["prompt"] == "ab"]
    assert len(failed) == 8
    assert all(row["reward"] is None and row["advantage"] == 0 for row in failed)
    assert all("raised LookupError: no answer to ab" in row["failure"] for row in failed)
    metrics = [row for row in RunDirectory(result.directory).read_metrics() if "reward" in row]
    assert [row["failed_rewards"] for row in metrics] == [4, 4]


def test_references_of_another_tokenizer_are_refused(tmp_path, monkeypatch):
    """Log-probabilities of a reference that reads other tokens by the same ids mean nothing."""
    base = train_policy(policy_run(tmp_path, name="base", steps=1)).directory
    config = policy_run(tmp_path, steps=1, reference=str(base), objective=ObjectiveConfig("policy", ("kl=0.1",)))
    opened = reference.open_initial_model

    class Other(ByteTokenizer):
        """Bytes in another order."""

        @property
        def token_bytes(self) -> list[bytes]:
            return super().token_bytes[::-1]

    with monkeypatch.context() as patched:
        patched.setattr(
            reference, "open_initial_model", lambda *given: dataclasses.replace(opened(*given), tokenizer=Other())
        )
        with pytest.raises(ConfigError, match=rf"reference = '{base}' has another tokenizer than the run"):
            train_policy(config)
    assert not (tmp_path / "runs" / "policy" / "metrics.jsonl").exists(), "refused before training"
