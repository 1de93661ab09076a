"""The watchdog names the step that does not come back, and no other."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from jaxllm.observe.config import ObserveConfig
from jaxllm.train import loop
from jaxllm.train.recovery.step_watchdog import StepWatchdog
from tests.parallel.test_distributed import in_each


def test_a_stalled_step_is_named_and_named_again_later():
    said: list[str] = []
    second = threading.Event()

    def report(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            second.set()

    with StepWatchdog(0.05, report) as watchdog:
        with watchdog.waiting_for(3):
            pass
        time.sleep(0.15)  # between two steps nothing is awaited
        assert said == []
        with watchdog.waiting_for(7):
            assert second.wait(10)
    assert all("step 7 has not come back" in text for text in said)
    assert "resumes from its newest checkpoint" in said[0]


def test_none_is_watched_for_zero_seconds():
    said: list[str] = []
    with StepWatchdog(0, said.append) as watchdog, watchdog.waiting_for(1):
        time.sleep(0.02)
    assert not said
    with pytest.raises(ValueError, match=r"observe.stalled_after = -1"):
        ObserveConfig(stalled_after=-1)


@pytest.mark.drawn(1)
def test_the_loop_names_its_step(tmp_path, monkeypatch, capfd, shared_programs):
    """A step that takes longer than allowed is named on stderr, and the run goes on."""
    from tests.train.runs import run_config

    compile_step = loop.Run.compile_step

    def slow(self):
        step, seconds = compile_step(self)

        def delayed(state, batch):
            if int(state.step) == 1:
                time.sleep(0.5)
            return step(state, batch)

        return delayed, seconds

    monkeypatch.setattr(loop.Run, "compile_step", slow)
    run = run_config(tmp_path, steps=3)
    assert loop.train(dataclasses.replace(run, observe=ObserveConfig(stalled_after=0.2))).complete
    said = capfd.readouterr().err
    assert "step 2 has not come back" in said
    assert "step 1 " not in said
    assert "step 3 " not in said


def test_a_batch_that_does_not_come_is_named_with_its_source():
    said: list[str] = []
    first = threading.Event()

    def report(text: str) -> None:
        said.append(text)
        first.set()

    def slow_source():
        yield 4, "a"
        first.wait(10)
        yield 5, "b"

    with StepWatchdog(0.05, report) as watchdog:
        assert list(watchdog.batches(slow_source(), 4)) == [(4, "a"), (5, "b")]
        time.sleep(0.15)
    assert len(said) >= 1
    assert all("step 6 has waited 0 s for its batch" in text for text in said)
    assert "slow_source" in said[0]


@pytest.mark.parametrize("stuck", [None, 2])
def test_processes_that_are_behind_are_named(stuck):
    """Of three processes in step 7, one waits for its batch: the others name it. Where none is behind, none is."""
    said: dict[int, list[str]] = {rank: [] for rank in range(3)}
    told = threading.Barrier(3)

    def act(group):
        first = threading.Event()

        def report(text: str) -> None:
            said[group.rank].append(text)
            first.set()

        def late_batches():
            told.wait(60)  # until the others have said it
            yield 6, None

        with StepWatchdog(0.2, report, group) as watchdog:
            if group.rank == stuck:
                next(watchdog.batches(late_batches(), 6))
                return
            with watchdog.waiting_for(7):
                assert first.wait(20)
                # The first warning may come before the others have posted a phase.
                seen = len(said[group.rank])
                while len(said[group.rank]) == seen:
                    time.sleep(0.01)
                told.wait(60)

    assert in_each(3, act) == [None] * 3
    for rank in {0, 1, 2} - {stuck}:
        last = said[rank][-1]
        if stuck is None:
            assert "All processes wait for their devices" in last
        else:
            assert "Behind this process: process 2 (on " in last
            assert "waits for its batch for step 7" in last


@pytest.mark.parametrize("slow", [None, 1])
def test_a_slow_process_is_named_by_process_0(slow):
    """Of three processes, one makes the others wait in each step: process 0 names it. Where none does, nobody is."""
    said: dict[int, list[str]] = {rank: [] for rank in range(3)}
    meeting = threading.Barrier(3)

    def act(group):
        with StepWatchdog(1.0, said[group.rank].append, group) as watchdog:
            for number, _ in watchdog.batches(iter([(step, None) for step in range(8)]), 0):
                if group.rank == slow and number > 2:
                    time.sleep(0.3)  # work of the host
                with watchdog.waiting_for(number + 1):
                    meeting.wait(60)
                    time.sleep(0.02)
            time.sleep(0.8)

    assert in_each(3, act) == [None] * 3
    assert not said[1]
    assert not said[2]
    assert bool(said[0]) == (slow is not None)
    for line in said[0]:
        assert "process 1 was 0.3" in line
        assert "each of 3 steps up to " in line
        assert "its host is busy" in line
