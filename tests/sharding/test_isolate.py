"""Functions in a child process: results, errors, ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sharding.isolate import IsolatedError, run_isolated, stage
from sharding.mesh import ShardingError
from sharding.topology import Topology
from tests.environment import ROOT

TARGETS = "tests.sharding.targets"


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process ends in time (a zombie has ended)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def wait_for(path: Path, seconds: float = 60.0) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


def test_data_goes_there_and_back_whatever_is_printed():
    kwargs = {"numbers": [1, 2.5, None], "text": "ünï\n", "nested": {"a": True}}
    stages = []
    found = run_isolated(f"{TARGETS}:echo", "cpu:2", kwargs, progress=lambda seconds, text: stages.append(text))
    assert found == {"topology": "cpu:2", "kwargs": kwargs}
    assert stages[0] == "starting"
    assert stages[-2:] == ["echoing", "done"]


def test_the_environment_is_the_compilers_own(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_this_flag_kills_every_compiler=1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a-real-pod")
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "4")
    names = ["XLA_FLAGS", "MEGASCALE_NUM_SLICES", "LIBTPU_INIT_ARGS", *Topology.parse("v6e:8x8").environment()]
    found = run_isolated(
        f"{TARGETS}:environment", "v6e:8x8", {"names": names}, env={"LIBTPU_INIT_ARGS": "--xla_of_mine=1"}
    )
    assert found == {
        "XLA_FLAGS": None,
        "MEGASCALE_NUM_SLICES": None,
        "LIBTPU_INIT_ARGS": "--xla_of_mine=1",
        **Topology.parse("v6e:8x8").environment(),
    }
    assert os.environ["TPU_WORKER_HOSTNAMES"] == "a-real-pod"


def test_an_exception_arrives_as_one_sentence_with_its_place():
    with pytest.raises(IsolatedError, match=r"ValueError: the heads do not divide \(at .*targets\.py:\d+") as raised:
        run_isolated(f"{TARGETS}:raise_value_error", "cpu:1")
    assert raised.value.error == "ValueError"
    assert "Traceback" in raised.value.traceback


def test_an_illegal_mesh_stays_the_error_it_is():
    with pytest.raises(ShardingError, match=r"the mesh fsdp=3 needs 3 devices, but there are 4"):
        run_isolated(f"{TARGETS}:misplace", "cpu:4")


def test_a_missing_target_is_an_error_of_the_child():
    with pytest.raises(IsolatedError, match=r"AttributeError: .*no_such_function"):
        run_isolated(f"{TARGETS}:no_such_function", "cpu:1")


def test_only_json_passes():
    with pytest.raises(IsolatedError, match=r"TypeError: .*set is not JSON serializable"):
        run_isolated(f"{TARGETS}:return_unspeakable", "cpu:1")
    with pytest.raises(TypeError, match="not JSON serializable"):
        run_isolated(f"{TARGETS}:echo", "cpu:1", {"array": object()})


@pytest.mark.parametrize("target", ["tests.sharding.targets", "__main__:main", ":echo"])
def test_a_target_must_be_importable_by_name(target):
    with pytest.raises(ValueError, match=r"package\.module:function"):
        run_isolated(target, "cpu:1")


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(("signal_number", "how"), [(0, "exit status 7"), (int(signal.SIGSEGV), "signal 11")])
def test_a_child_that_dies_says_its_last_words(signal_number, how):
    with pytest.raises(IsolatedError, match=rf"the child process died \({how}\): .*last words") as raised:
        run_isolated(f"{TARGETS}:end", "cpu:1", {"signal": signal_number}, env={"PYTHONFAULTHANDLER": ""})
    assert raised.value.error == ""


@pytest.mark.drawn(0.3)
def test_a_timeout_kills_the_child(tmp_path):
    note, timeout = tmp_path / "pid", 4
    while not (note.exists() and note.read_text()):  # a busy machine may take longer to start the child
        with pytest.raises(TimeoutError, match=rf"not done after {timeout} s \(it was ") as raised:
            run_isolated(f"{TARGETS}:sleep", "cpu:1", {"note": str(note)}, timeout=float(timeout))
        timeout *= 2
    assert "(it was sleeping)" in str(raised.value)
    assert gone(int(note.read_text()))


@pytest.mark.drawn(0.3)
def test_an_interrupt_kills_the_child(tmp_path):
    note = tmp_path / "pid"

    def interrupt(seconds: float, text: str) -> None:
        if note.exists() and note.read_text() and text != "done":  # the file is there before its text is
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_isolated(f"{TARGETS}:sleep", "cpu:1", {"note": str(note)}, progress=interrupt)
    assert gone(int(note.read_text()))


@pytest.mark.drawn(0.3)
def test_the_child_does_not_outlive_its_caller(tmp_path):
    note = tmp_path / "pid"
    script = (
        "from sharding.isolate import run_isolated\n"
        f"run_isolated('{TARGETS}:sleep', 'cpu:1', {{'note': {str(note)!r}}})\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) as caller:
        child = int(wait_for(note))
        assert child != caller.pid
        caller.kill()
    assert gone(child)


def test_stages_outside_a_child_go_nowhere():
    stage("nobody listens")
