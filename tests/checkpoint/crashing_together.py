"""Processes that save one checkpoint together until one of them is killed at a chosen point."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoint import CheckpointConfig, Checkpointer, CheckpointError
from jaxllm.parallel.distributed import DistributedError, ProcessGroup
from tests.checkpoint.crashing import KEEP, arm, forking, promised
from tests.checkpoint.together import Made, leaves_of

POINTS = ("step", "say", "hear", "write", "sync", "time")
OF_FIRST = ("rename", "gc")
"""What only process 0 does."""
LIMIT = 120
"""Seconds in which every process has to end; it is a matter of one."""


class Board:
    """Key-value store like that of ``jax.distributed``, in a folder; reports a lost process as the heartbeat does."""

    def __init__(self, folder: Path, come: Callable[[str], None]):
        self._folder, self._come = folder, come

    def _at(self, key: str) -> Path:
        return self._folder / key.replace("/", "+")

    def key_value_set(self, key: str, value: str) -> None:
        self._come("say")
        part = self._folder / f"part.{os.getpid()}"
        part.write_text(value)
        os.link(part, self._at(key))  # refuses one that is there
        part.unlink()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        self._come("hear")
        for _ in range(timeout_in_ms // 2):
            with contextlib.suppress(FileNotFoundError):
                return self._at(key).read_text()
            with contextlib.suppress(FileNotFoundError):
                raise DistributedError(f"process {(self._folder / 'gone').read_text()} is gone")
            time.sleep(0.002)
        raise RuntimeError("DEADLINE_EXCEEDED: too late")

    def key_value_delete(self, key: str) -> None:
        for file in self._folder.glob(f"{key.replace('/', '+')}*"):
            file.unlink()


def state_at(seed: int, step: int) -> dict[str, np.ndarray]:
    """A small state, a pure function of its arguments."""
    rng = np.random.default_rng([seed, step])
    return {
        "params/w": rng.standard_normal((12, 10)),
        "opt_state/mu/w": rng.standard_normal((12, 10), np.float32),
        "gain": rng.standard_normal(5),
        "step": np.array(step),
    }


def save_on(folder: str, seed: int, rank: int, size: int, saving: Any, steps: int, point: str, number: int) -> None:
    """Resumes, checks the restored state, and saves step after step; dies at the `number`-th time at `point`."""
    life = Path(folder)
    come = arm(point, number)
    chunks = {"params/w": (12 // size, 5), "opt_state/mu/w": (12 // size, 10)}
    config = CheckpointConfig(keep_last=KEEP, saving=saving)
    try:
        with (
            open(life / f"told.{rank}", "a", buffering=1) as tell,
            Made(life.parent / "checkpoints", config, ProcessGroup(rank, size, Board(life, come))) as checkpointer,
        ):
            found = checkpointer.resume(None)
            first = 1 if found is None else 1 + found.step
            (life / f"found.{rank}").write_text(str(first - 1))
            if found is not None:
                same(found, seed)
            for step in itertools.islice(itertools.count(first), steps or None):
                come("step")
                state = leaves_of(state_at(seed, step), chunks, rank, size)
                assert checkpointer.save(step, state, {"cursor": step * 7})
                tell.write(f"{step - 1}\n")
    except (CheckpointError, DistributedError) as error:
        (life / f"said.{rank}").write_text(str(error))
        raise SystemExit(3) from error


def same(found: Any, seed: int) -> None:
    """Whether a resumed state is the one that was saved at that step."""
    want = state_at(seed, found.step)
    assert found.meta == {"cursor": found.step * 7}
    got = {
        "params/w": found.state["params"]["w"],
        "opt_state/mu/w": found.state["opt_state"]["mu"]["w"],
        "gain": found.state["gain"],
        "step": found.state["step"],
    }
    for path, array in want.items():
        assert got[path].dtype == array.dtype, path
        assert got[path].tobytes() == array.tobytes(), path


class Life:
    """Two or three processes from their start to their end."""

    def __init__(self, directory: Path, seed: int, rng: random.Random, steps: int, victim: int | None = None):
        self.folder = directory / f"life-{len(list(directory.glob('life-*')))}"
        self.folder.mkdir()
        self.size, saving = rng.choice((2, 3)), rng.choice(("lazy", "blocking"))
        self.victim = None if victim is None else victim % self.size
        self.point, self.number = "none", 0
        if self.victim is not None:
            self.point = rng.choice(POINTS + OF_FIRST if self.victim == 0 else POINTS)
            self.number = rng.randint(1, 40 if self.point in ("say", "hear", "write", "sync") else 6)
        self.running = []
        for rank in range(self.size):
            trap = (self.point, self.number) if rank == self.victim else ("none", 0)
            process = forking().Process(
                target=save_on, args=(str(self.folder), seed, rank, self.size, saving, steps, *trap)
            )
            process.start()
            self.running.append(process)

    def ended(self, rank: int) -> int | None:
        self.running[rank].join(LIMIT)
        return self.running[rank].exitcode

    def kill(self) -> None:
        for process in self.running:
            process.kill()
            process.join()

    def said(self) -> str:
        about = f"{self.size} processes, {self.victim} at {self.point} {self.number}: "
        return about + " | ".join(f"{file.name}: {file.read_text()}" for file in sorted(self.folder.glob("said.*")))


def trial(directory: Path, seed: int, deaths: int = 2) -> None:
    """Starts that end by the death of one process, and a last one that ends normally, in one directory.

    After each death the others end and name the one that is gone, or are killed too. Then every checkpoint that is
    listed is whole, and the next life, of as many processes or another number, finds in each of them the newest, with
    the bits that were saved; no older than any process had been told that it is on disk.
    """
    rng = random.Random(seed)
    place = directory / "checkpoints"
    least, newest = 0, 0
    for number in range(deaths + 1):
        last = number == deaths
        life = Life(directory, seed, rng, steps=2 if last else 0, victim=None if last else rng.randrange(6))
        try:
            if life.victim is not None:
                _one_dies(life, rng)
            else:
                assert [life.ended(rank) for rank in range(life.size)] == [0] * life.size, life.said()
        finally:
            life.kill()
        found = [int(file.read_text()) for file in life.folder.glob("found.*") if file.read_text()]
        assert set(found) <= {newest}, (found, newest, life.said())
        least = max(least, newest, *(promised(file) for file in life.folder.glob("told.*")))
        with Checkpointer(place, read_only=True) as reader:
            listed = reader.steps()
            for step in listed:
                reader.verify(step)
            if last:
                assert len(found) == life.size
                assert listed[-1] == newest + 2, (listed, newest)
                same((resumed := reader.resume(None)), seed)
                assert resumed is not None
                assert resumed.step == newest + 2
                left = [name for name in os.listdir(place) if not re.fullmatch(r"\.lock|step_\d{8}", name)]
                assert not left, left
            newest = max(listed, default=0)
        assert newest >= least, (listed, least, life.said())


def _one_dies(life: Life, rng: random.Random) -> None:
    """Waits for it, and for what becomes of the others."""
    assert life.victim is not None
    if life.point == "time":
        time.sleep(rng.uniform(0, 0.5))
        life.running[life.victim].kill()
    assert life.ended(life.victim) == -signal.SIGKILL, life.said()
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0, 0.05))
        return  # killed too, as by what started them
    part = life.folder / "part"
    part.write_text(str(life.victim))
    part.rename(life.folder / "gone")
    for rank in range(life.size):
        if rank == life.victim:
            continue
        assert life.ended(rank) == 3, (rank, life.said())
        said = (life.folder / f"said.{rank}").read_text()
        assert f"process {life.victim} is gone" in said, said
