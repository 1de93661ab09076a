"""Checkpoints alone: damage on disk and killed saves. Real training under SIGKILL is a proof of its own."""

from __future__ import annotations

import functools
import logging
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxllm.checkpoint import CheckpointConfig, CheckpointCorruptError, Checkpointer, RestoredCheckpoint
from tests.checkpoint.killing import kill_while_saving
from tests.checkpoint.states import assert_same, make_state
from tests.proofs.harness import proof


@proof("first_run", name="checkpoint_damage", count=300, sample=10)
def damage(seed: int) -> None:
    """One file of the newest checkpoint gets a bit flipped, is cut short or deleted: restoring says so and names it,
    resuming goes back to the one before, bit for bit."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        shutil.copytree(_template(), directory)
        newest = directory / "step_00000002"
        file = rng.choice(sorted(p for p in newest.rglob("*") if p.is_file()))
        name = file.relative_to(newest).as_posix()
        data = bytearray(file.read_bytes())
        kind = rng.choice(["flip", "cut", "delete"])
        if kind == "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if kind == "cut":
            del data[rng.randrange(len(data)) :]
        file.unlink()
        if kind != "delete":
            file.write_bytes(data)

        target = make_state(0, 1)
        with Checkpointer(directory) as checkpointer:
            if kind == "delete" and name == "manifest.json":
                assert checkpointer.steps() == [1]  # no manifest, no checkpoint: opening removed the rest
                return
            with pytest.raises(CheckpointCorruptError) as caught:
                checkpointer.restore(target, 2)
            assert caught.value.step == 2
            leaf = name.split("/")[1].replace(".", "/") if name.count("/") > 1 else None
            assert (leaf or name) in str(caught.value)
            assert leaf is None or caught.value.leaf == leaf
            assert "restore(step=1)" in str(caught.value)
            found = _quietly(lambda: checkpointer.resume(target))
            assert found is not None
            assert found.step == 1
            assert_same(found.state, make_state(0, 1))
            assert checkpointer.steps() == [1]


@proof("first_run", name="checkpoint_kill9", count=50, sample=1)
def kill9(seed: int) -> None:
    """A process that saves as fast as it can is killed: no promised checkpoint is lost, no half one is seen."""
    with tempfile.TemporaryDirectory() as folder:
        kill_while_saving(Path(folder), seed)


def _quietly(resume: Callable[[], RestoredCheckpoint | None]) -> RestoredCheckpoint | None:
    """Without the loud message: the damage is deliberate."""
    logger = logging.getLogger("jaxllm.checkpoint")
    logger.disabled = True
    try:
        return resume()
    finally:
        logger.disabled = False


@functools.cache
def _template() -> Path:
    """Two good checkpoints to copy."""
    directory = Path(tempfile.mkdtemp(prefix="jaxllm-damage-"))
    with Checkpointer(directory, CheckpointConfig(saving="blocking")) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, make_state(0, step), {"cursor": step})
    return directory
