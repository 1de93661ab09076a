"""Overlapped saves: the state is copied to the host beside the next gradients, and the update waits for the copy."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpointer, CheckpointError, snapshot
from jaxllm.config import ConfigError
from jaxllm.optim import OptimConfig
from jaxllm.train import train
from jaxllm.train.run import Run, StepPrograms
from tests.train.runs import losses, run_config


def buffers() -> set[int]:
    """Addresses of all buffers in device memory."""
    found = [one for one in jax.live_arrays() if not jax.numpy.issubdtype(one.dtype, jax.dtypes.prng_key)]
    return {shard.data.unsafe_buffer_pointer() for one in found for shard in one.addressable_shards}


@pytest.mark.drawn(2)
def test_every_checkpoint_is_the_state_of_its_step(tmp_path, monkeypatch):
    """Saved after each step, with a slow copy: the gradients are dispatched before it is done, the update after."""
    states: dict[int, Any] = {}
    order: list[str] = []
    saved, fetch, called = Run.save, snapshot.fetch, StepPrograms.__call__

    def save(self, saver, place, step, state, metrics):
        states[step] = jax.device_get(state)
        before = buffers()
        saved(self, saver, place, step, state, metrics)
        assert buffers() <= before, "a second copy on the devices"

    def slow(leaves):
        time.sleep(0.1)
        made = fetch(leaves)
        order.append("copied")
        return made

    def step(self, state, batch, wait=lambda: None):
        def waiting():
            order.append("gradients")
            wait()
            order.append("update")

        return called(self, state, batch, waiting)

    monkeypatch.setattr(Run, "save", save)
    monkeypatch.setattr(snapshot, "fetch", slow)
    monkeypatch.setattr(StepPrograms, "__call__", step)
    run = run_config(tmp_path, steps=4, every=1, keep_last=9, saving="overlapped")
    done = train(run)
    assert order == ["gradients", "update", *["gradients", "copied", "update"] * 3, "copied"]
    prepared = Run(run)
    with Checkpointer(done.directory / "checkpoints", read_only=True) as checkpointer:
        assert checkpointer.steps() == [1, 2, 3, 4]
        for number, state in states.items():
            found, _ = checkpointer.restore(prepared.abstract, number)
            same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), *_data(found, state))
            assert all(jax.tree.leaves(same)), number
    whole = train(run_config(tmp_path, steps=4, out=tmp_path / "whole"))
    for one, other in zip(losses(done.directory), losses(whole.directory), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def _data(*states: Any) -> list[Any]:
    """Parameters and optimizer states on the host."""
    return [jax.device_get((state.params, state.opt_state, state.step)) for state in states]


def test_a_copy_that_fails_is_reported_and_nothing_waits_for_ever(tmp_path, monkeypatch):
    def fails(leaves):
        raise MemoryError("no room")

    monkeypatch.setattr(snapshot, "fetch", fails)
    config = run_config(tmp_path, saving="overlapped").checkpoint
    with Checkpointer(tmp_path / "here", config) as checkpointer:
        checkpointer.save(1, {"x": jax.numpy.arange(3)}, {})
        checkpointer.wait_copied()
        with pytest.raises(CheckpointError, match="step 1 cannot be copied to the host: no room"):
            checkpointer.wait()
        assert checkpointer.steps() == []


def test_layerwise_optimizers_are_refused(tmp_path):
    run = run_config(tmp_path, saving="overlapped")
    run = replace(run, optim=OptimConfig(kind="lomo", clip_norm=None), model=replace(run.model, remat="full"))
    with pytest.raises(ConfigError, match=r'"lomo" does not go with checkpoint.saving = "overlapped"'):
        Run(run)
