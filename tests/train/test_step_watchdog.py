"""The watchdog names the step that does not come back, and no other."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from jaxllm.observe.config import ObserveConfig
from jaxllm.train import loop
from jaxllm.train.recovery.step_watchdog import StepWatchdog


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
