"""Atomic saves: killed, failing and concurrent ones; retention; the writer's lock."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoint import CheckpointBusyError, CheckpointConfig, Checkpointer, CheckpointError, checkpoint_writer
from tests import environment
from tests.checkpoint.killing import kill_while_saving
from tests.checkpoint.states import assert_same, make_state

STATE = {"x": np.arange(4.0)}


@pytest.mark.drawn(0.5)
@pytest.mark.drawn(0.3)
def test_kill9_several_times_into_one_directory(tmp_path, rng):
    kill_while_saving(tmp_path, int(rng.integers(2**31)), kills=3)


def test_concurrent_readers_see_only_whole_checkpoints(tmp_path):
    """While one thread saves and deletes, another finds, at all times, a newest step that restores."""
    stop, seen = threading.Event(), []
    state = make_state(0, 0)

    def read():
        while not stop.is_set():
            with Checkpointer(tmp_path, read_only=True) as reader:
                step = reader.latest()
                if step is not None:
                    assert reader.restore(state, step)[1] == {"step": step}
                    seen.append(step)
            time.sleep(0.02)  # so that the writer has its share of the processor

    failures = []

    def guarded():
        try:
            read()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    with Checkpointer(tmp_path, CheckpointConfig(keep_last=4)) as checkpointer:
        for step in range(20):
            checkpointer.save(step, make_state(0, step), {"step": step})
    stop.set()
    thread.join()
    assert not failures
    assert seen == sorted(seen)
    assert len(set(seen)) > 1


def test_save_returns_before_the_write_and_the_next_one_waits(tmp_path, monkeypatch):
    entered, leave = threading.Event(), threading.Event()
    write = checkpoint_writer.write_chunks

    def slow(*arguments):
        entered.set()
        assert leave.wait(20)
        return write(*arguments)

    monkeypatch.setattr(checkpoint_writer, "write_chunks", slow)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, STATE, {})
        assert entered.wait(20)
        assert checkpointer.steps() == []
        assert checkpointer.latest() is None
        threading.Timer(0.2, leave.set).start()
        started = time.monotonic()
        checkpointer.save(2, STATE, {})
        assert time.monotonic() - started > 0.1
        assert checkpointer.steps() == [1]
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2]


def test_blocking_save(tmp_path):
    with Checkpointer(tmp_path, CheckpointConfig(saving="blocking")) as checkpointer:
        threads = set(threading.enumerate())
        checkpointer.save(1, STATE, {})
        assert checkpointer.steps() == [1]
        assert set(threading.enumerate()) <= threads


@pytest.mark.parametrize("saving", ["lazy", "eager", "blocking"])
def test_a_failing_disk_is_reported_once_and_harms_nothing(tmp_path, monkeypatch, saving):
    write = checkpoint_writer.write_chunks

    def full(*arguments):
        write(*arguments)
        raise OSError(28, "No space left on device")

    with Checkpointer(tmp_path, CheckpointConfig(saving=saving, keep_last=1)) as checkpointer:
        checkpointer.save(1, STATE, {})
        checkpointer.wait()
        monkeypatch.setattr(checkpoint_writer, "write_chunks", full)
        with pytest.raises(CheckpointError, match=r"saving step 2 .*No space left.* Step 1 is the newest on disk"):
            checkpointer.save(2, STATE, {}), checkpointer.wait()
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step_00000001"]
        monkeypatch.undo()
        assert checkpointer.save(2, STATE, {})
    assert Checkpointer(tmp_path, read_only=True).steps() == [2]


def test_read_only_directory(tmp_path):
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, STATE, {})
    (tmp_path / "run").chmod(0o500)
    with Checkpointer(tmp_path / "run", read_only=True) as reader:
        assert reader.restore()[0]["x"].tolist() == [0, 1, 2, 3]


def test_leftovers_of_dead_saves_are_removed(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(100, STATE, {})
    whole = tmp_path / "step_00000100"
    for name in ("saving_00000200", "deleting_00000050", "step_00000300"):
        shutil.copytree(whole, tmp_path / name)
    (tmp_path / "step_00000300" / "manifest.json").unlink()
    for name in ("notes.txt", "saving_private_ryan", "step_12"):
        (tmp_path / name).mkdir()
    with Checkpointer(tmp_path, read_only=True) as reader:
        assert reader.steps() == [100]
        assert (tmp_path / "saving_00000200").exists()
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [100]
        names = {p.name for p in tmp_path.iterdir()}
        assert names == {".lock", "step_00000100", "notes.txt", "saving_private_ryan", "step_12"}


def steps_after(directory, config, saves):
    with Checkpointer(directory, config) as checkpointer:
        for step in saves:
            checkpointer.save(step, STATE, {})
        checkpointer.wait()
        return checkpointer.steps()


def test_retention(tmp_path):
    assert steps_after(tmp_path / "a", CheckpointConfig(keep_last=2), range(10, 60, 10)) == [40, 50]
    assert steps_after(tmp_path / "b", CheckpointConfig(keep_last=1, keep_every=20), range(10, 60, 10)) == [20, 40, 50]
    assert steps_after(tmp_path / "c", CheckpointConfig(keep_last=1), [0]) == [0]


def test_retention_neither_counts_nor_deletes_broken_ones(tmp_path):
    config = CheckpointConfig(keep_last=2)
    assert steps_after(tmp_path, config, [1, 2]) == [1, 2]
    (tmp_path / "step_00000002" / "meta.json").unlink()
    assert steps_after(tmp_path, config, [3]) == [1, 2, 3]
    assert steps_after(tmp_path, config, [4]) == [2, 3, 4]


def test_one_writer_at_a_time(tmp_path):
    with Checkpointer(tmp_path) as first:
        with pytest.raises(CheckpointBusyError, match="already open for saving in this process"):
            Checkpointer(tmp_path)
        Checkpointer(tmp_path, read_only=True).close()
        code = f"from jaxllm.checkpoint import Checkpointer; Checkpointer({str(tmp_path)!r})"
        other = subprocess.run([sys.executable, "-c", code], cwd=environment.ROOT, capture_output=True, text=True)
        assert f"being written by another process (process {os.getpid()} on" in other.stderr
        first.save(1, STATE, {})
    Checkpointer(tmp_path).close()


def test_closed(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, STATE, {})
    checkpointer.close()
    checkpointer.close()
    assert checkpointer.steps() == [1]
    with pytest.raises(CheckpointError, match="was closed"):
        checkpointer.save(2, STATE, {})


def test_same_and_older_steps(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(10, STATE, {"first": 1})
        assert not checkpointer.save(10, {"x": np.zeros(4)}, {})
        assert checkpointer.read_meta(10) == {"first": 1}
        checkpointer.save(20, STATE, {})
        with pytest.raises(CheckpointError, match=r"has step 20, later than step 15.*set_aside_after"):
            checkpointer.save(15, STATE, {})
        assert [p.name for p in checkpointer.set_aside_after(10)] == ["aside_00000020"]
        checkpointer.save(15, STATE, {})
        checkpointer.save(20, STATE, {})
        assert [p.name for p in checkpointer.set_aside_after(15)] == ["aside_00000020_2"]
        checkpointer.wait()
        assert checkpointer.steps() == [10, 15]


@pytest.mark.parametrize(
    ("state", "meta", "message"),
    [
        ({"a": {"lr": 0.1}}, {}, "leaf a/lr is a float"),
        ({"a": "text"}, {}, "leaf a is a str"),
        ({"a": np.array(["text"])}, {}, "leaf a has dtype <U4"),
        (STATE, {"f": object()}, "meta is not JSON"),
        (STATE, {"f": (1, 2)}, r"meta\['f'\] is \(1, 2\), which JSON changes to \[1, 2\]"),
        (STATE, {"f": {1: 2}}, "use str keys"),
    ],
)
def test_unsavable(tmp_path, state, meta, message):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match=message):
            checkpointer.save(1, state, meta)
        assert checkpointer.steps() == []


@pytest.mark.parametrize("step", [-1, 1.5, True, "3"])
def test_bad_step(tmp_path, step):
    with Checkpointer(tmp_path) as checkpointer, pytest.raises((CheckpointError, TypeError), match=r"step"):
        checkpointer.save(step, STATE, {})


def test_donated_state_is_named(tmp_path):
    x = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError, match="leaf a/x was donated"):
        checkpointer.save(1, {"a": {"x": x}}, {})


def test_config():
    config = CheckpointConfig(every=100)
    assert [s for s in range(301) if config.due(s)] == [100, 200, 300]
    with pytest.raises(ValueError, match="keep_last is 0"):
        CheckpointConfig(keep_last=0)


def test_quiet(tmp_path, caplog, capfd):
    """Neither Orbax nor this package prints or logs during a normal run."""
    with caplog.at_level(logging.WARNING):
        assert steps_after(tmp_path, CheckpointConfig(), [1, 2]) == [1, 2]
        with Checkpointer(tmp_path) as checkpointer:
            assert_same(checkpointer.resume(STATE).state, STATE)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")
