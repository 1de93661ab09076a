"""Checkpoints of a run in an object store, state providers, snapshots in memory after a crash."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    MemoryConfig,
    StateFragment,
    StateFragments,
)
from jaxllm.checkpoint.memory.peer_storage import PeerClient
from jaxllm.parallel.distributed import ProcessGroup
from jaxllm.train import train
from jaxllm.train.records.live_view import LiveView
from jaxllm.train.recovery.saving import TIMED_STEPS, Saver
from tests.train.runs import STEPS, losses, run_config

pytestmark = pytest.mark.usefixtures("shared_programs")

PLACES = (f"memory://training-{n}" for n in itertools.count())


class Crash(Exception):
    pass


@contextlib.contextmanager
def crash_at(step: int):
    """Training ends by an exception when it shows ``step``."""
    show = LiveView.step

    def shown(self: LiveView, at: int, metrics: dict[str, float]) -> None:
        show(self, at, metrics)
        if at == step:
            raise Crash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LiveView, "step", shown)
        try:
            yield
        except Crash:
            return
    pytest.fail(f"step {step} was never shown")


class Counter:
    """A provider that counts its savings."""

    def __init__(self, name: str, start: int):
        self.name, self.saved, self.weights = name, start, jnp.full(3, float(start))

    def arrays(self) -> Any:
        return {"weights": self.weights}

    def facts(self) -> Any:
        self.saved += 1
        return {"saved": self.saved}

    def restore(self, arrays: Any, facts: Any) -> None:
        self.saved, self.weights = facts["saved"], arrays["weights"]


class Packed(Counter):
    """The same, in a file of fragments."""

    def arrays(self) -> Any:
        return StateFragments(weights=StateFragment(self.weights, memory="host"), more=StateFragment(np.arange(3)))


def test_an_object_store_and_the_state_of_others(tmp_path: Path) -> None:
    place = next(PLACES)
    config = run_config(tmp_path, directory=place)
    with crash_at(10):
        train(config, also=[Counter("one", 5), Packed("packed", 8)])
    with Checkpointer(place, read_only=True) as found:
        assert found.steps() == [4, 8]
        meta = found.read_meta()
        assert meta["also"] == {"one": {"saved": 7}, "packed": {"saved": 10}}
        assert found.manifest(8).leaves["also/packed/state"].shape == (3 * 4 + 3 * 8,)
        assert meta["metrics"]["loss"] == losses(tmp_path / "runs" / "tiny")[7][1]
    assert not (tmp_path / "runs" / "tiny" / "checkpoints").exists()
    other, packed = Counter("one", 0), Packed("packed", 0)
    assert train(config, also=[other, packed]).complete
    assert (other.saved, packed.saved) == (8, 11)
    assert isinstance(packed.weights, np.ndarray)
    np.testing.assert_array_equal(packed.weights, np.full(3, 8.0))
    np.testing.assert_array_equal(other.weights, np.full(3, 5.0))
    assert [step for step, _, _ in losses(tmp_path / "runs" / "tiny")] == list(range(1, STEPS + 1))
    with pytest.raises(CheckpointError, match="saved with the state of one, packed, but this run has two"):
        train(config, also=[Counter("two", 0)])
    with pytest.raises(CheckpointError, match="same name"):
        train(run_config(tmp_path, name="another", directory=next(PLACES)), also=[Counter("a", 0), Counter("a", 0)])


@pytest.mark.drawn(0.3)
def test_memory_survives_a_crash_and_the_disk_its_loss(tmp_path: Path) -> None:
    want = losses(train(run_config(tmp_path, name="unbroken")).directory)
    config = run_config(tmp_path, every=8, memory=MemoryConfig(every=1, linger=60))
    run = tmp_path / "runs" / "tiny"
    address = run / "holders" / "0.json"
    with crash_at(7):
        train(config)
    with crash_at(11):
        train(config)  # from memory: nothing is on disk before step 8
    pid = json.loads(address.read_text())["pid"]
    os.kill(pid, signal.SIGKILL)  # the host is lost: from the disk
    assert train(config).complete
    assert losses(run) == want
    assert [("ended" in one) for one in json.loads((run / "starts.json").read_text())] == [False, False, True]
    assert not PeerClient(0, address).alive()  # it ended with the run


def test_a_lost_memory_costs_snapshots_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The snapshot under way and the next one fail; a server is started again, and the one after is there."""
    config = CheckpointConfig(every=50, memory=MemoryConfig(every=1, linger=60))
    address = tmp_path / "holders" / "0.json"
    with Saver(tmp_path, config, ProcessGroup()) as saver:
        assert saver.memory is not None
        for step in range(1, 5):
            saver.save("memory", step, {"w": jnp.full(3, step)}, {})
            if step == 1:
                saver.memory.wait()
                lost = json.loads(address.read_text())["pid"]
                os.kill(lost, signal.SIGKILL)
        assert "a snapshot in memory failed" in caplog.text
        assert json.loads(address.read_text())["pid"] != lost
        saver.memory.wait()
        assert saver.latest() == 4
        os.kill(json.loads(address.read_text())["pid"], signal.SIGKILL)
        saver.save("memory", 5, {"w": jnp.full(3, 5)}, {})
    assert "the last snapshot in memory failed" in caplog.text  # and no error hides what ended the block


def test_the_interval_is_found_out(tmp_path: Path) -> None:
    config = CheckpointConfig(every=50, memory=MemoryConfig(linger=60))
    with Saver(tmp_path, config, ProcessGroup()) as saver:
        places = {}
        for step in range(1, 51):
            if place := saver.due(step, last=step == 50):
                places[step] = place
                saver.save(place, step, {"w": jnp.full(3, step)}, {})
        assert places[1 + TIMED_STEPS] == "memory"
        assert places[50] == "disk"
        saver.wait()
        assert saver.latest() == 50
        saver.finish()
    assert json.loads((tmp_path / "starts.json").read_text())[0]["ended"] > 0
