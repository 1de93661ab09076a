"""Phases of reinforcement learning: shares of wall time that add up, the log after a kill, and the report."""

from __future__ import annotations

import dataclasses
import itertools
import time

import pytest

from jaxllm.observe.html_report import html_report, text_report
from jaxllm.observe.policy_phases import SHARES, TIMELINE, Phase, PhaseLog, phase_seconds, read_phases
from jaxllm.observe.run_record import read_record
from jaxllm.posttrain import train_policy
from jaxllm.posttrain.rollout_queue import RolloutQueue
from jaxllm.svg import histogram, lanes
from tests.posttrain.tiny_policy import policy_run


def test_shares_by_hand():
    on_policy = [
        Phase("swap", 1, 0.0, 1.0), Phase("rollout", 1, 1.0, 5.0), Phase("train", 1, 5.5, 8.0),
        Phase("swap", 2, 8.0, 9.0), Phase("rollout", 2, 9.0, 10.0),
    ]  # fmt: skip
    assert phase_seconds([on_policy]) == {
        "rollout": 5.0, "rollout and train": 0.0, "train": 2.5, "swap": 2.0, "idle": 0.5,
    }  # fmt: skip
    ahead = [Phase("rollout", 2, 0.0, 6.0), Phase("train", 1, 2.0, 4.0), Phase("swap", 3, 6.0, 6.5)]
    assert phase_seconds([ahead, on_policy]) == {
        "rollout": 9.0, "rollout and train": 2.0, "train": 2.5, "swap": 2.5, "idle": 0.5,
    }  # fmt: skip
    assert sum(phase_seconds([ahead]).values()) == 6.5
    assert phase_seconds([]) == dict.fromkeys(SHARES, 0.0)


def test_a_log_of_two_starts_whose_end_is_cut(tmp_path):
    file = tmp_path / TIMELINE
    PhaseLog(file).write([Phase("swap", 1, 0.0, 1.0)])
    PhaseLog(file).write([Phase("swap", 1, 5.0, 6.0), Phase("rollout", 1, 6.0, 7.0)])
    with file.open("a") as out:
        out.write('{"start": 1.0, "na')
    assert [[one.name for one in start] for start in read_phases(file)] == [["swap"], ["swap", "rollout"]]
    PhaseLog(None).write([Phase("swap", 1, 0.0, 1.0)])
    assert read_phases(tmp_path / "nothing") == []


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_queue_says_what_it_did_when(ahead):
    def slowly(seconds: float) -> None:
        time.sleep(seconds)

    phases = []
    with RolloutQueue(lambda step: slowly(0.02), lambda step: slowly(0.05), ahead, 4, lambda: slowly(0.04)) as queue:
        for step in range(4):
            phases += queue.next(step).phases
    assert [one.step for one in phases if one.name == "rollout"] == [1, 2, 3, 4]
    assert [one.step for one in phases if one.name == "swap"] == [1, 2, 3, 4]
    assert [one.step for one in phases if one.name == "train"] == [1, 2, 3]
    least = {"rollout": 0.05, "swap": 0.02, "train": 0.04}
    assert all(one.seconds >= least[one.name] for one in phases)
    found = phase_seconds([phases])
    assert (found["rollout and train"] > 0.03) == bool(ahead), "the next rollouts run beside an update, if ahead"


@pytest.mark.drawn(0.3)
def test_reports_show_the_phases(tmp_path):
    config = policy_run(tmp_path, steps=2, algorithm="ppo", group=2)
    record = read_record(train_policy(config).directory)
    (start,) = record.phases
    names = [(one.name, one.step) for one in start]
    assert names == [("swap", 1), ("rollout", 1), ("train", 1), ("swap", 2), ("rollout", 2)]
    assert all(before.end <= after.begin for before, after in itertools.pairwise(start)), "on-policy"
    html, text = html_report(record), text_report(record)
    for title in ("Rollouts and updates", "last steps", "advantages", "staleness", "explained variance", "mismatch"):
        assert title in html
    for title in ("KL", "entropy", "clipped", "reward", "length", "weight swap", "value loss"):
        assert f">{title}<" in html
    assert "step 2: rollout" in html
    assert "rollouts and updates" in text
    assert "%" in text
    assert "Rollouts and updates" not in html_report(dataclasses.replace(record, phases=[]))


def test_drawings():
    drawn = lanes([("engine", [(0.0, 1.0, 0, "a < b")]), ("trainer", [])], title="x")
    assert "a &lt; b" in drawn
    assert drawn.count("<rect") == 1
    bars = histogram([0.0, 0.0, 1.0], title="x", bins=2)
    assert "0 to 0.5: 2" in bars
    assert "0.5 to 1: 1" in bars
    assert "<rect" in histogram([1.0], title="one value")
    assert "<rect" in histogram([], title="none")
