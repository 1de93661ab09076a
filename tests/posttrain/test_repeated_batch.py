"""Several updates with each batch of rollouts: ratios move away from 1, and a run that stops in between resumes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.posttrain import train_policy
from jaxllm.train.records.run_directory import RunDirectory
from tests.posttrain.tiny_policy import policy_run
from tests.train import runs


def curves(directory: Path) -> list[Any]:
    """Rows without clocks."""
    rows = [row for row in RunDirectory(directory).read_metrics() if "mismatch" in row]
    return [{k: v for k, v in row.items() if not any(x in k for x in ("second", "wait", "memory"))} for row in rows]


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(("algorithm", "stale"), [("grpo", 0), ("ppo", 0), ("grpo", 1)])
def test_each_batch_is_used_so_many_times(tmp_path, monkeypatch, algorithm, stale):
    whole = policy_run(tmp_path, algorithm=algorithm, steps=6, group=2, updates=3, max_staleness=stale)
    whole = dataclasses.replace(whole, checkpoint=dataclasses.replace(whole.checkpoint, every=4))
    directory = train_policy(whole).directory
    rows = curves(directory)
    assert [row["step"] for row in rows if "reward" in row] == [1, 4], "two batches of rollouts"
    behind = [row["mismatch"] for row in rows]
    assert behind[0] < 1e-5 < 1e-3 < behind[1] < behind[2], "the log-probabilities stay those of the rollouts"
    assert (behind[3] < 1e-5) == (stale == 0)
    assert max(row["clipped"] for row in rows[1:3]) > 0 == rows[0]["clipped"]
    episodes = [json.loads(line) for line in (directory / "episodes.jsonl").read_text().splitlines()]
    assert {row["step"] for row in episodes} == {1, 4}
    assert {version for row in episodes for version in row["versions"]} == ({1, 4} if stale == 0 else {1})
    if stale:
        assert rows[3]["staleness"] == 3, "in updates"
        return
    parts = dataclasses.replace(whole, name="parts")
    with monkeypatch.context() as patched:
        runs.signal_at(patched, 4)
        assert not train_policy(parts).complete
    again = train_policy(parts)
    assert again.complete
    assert curves(again.directory) == rows
    assert (again.directory / "episodes.jsonl").read_bytes() == (directory / "episodes.jsonl").read_bytes()


def test_no_update_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"rollout.updates = 0; give 1 or more"):
        policy_run(tmp_path, updates=0)
