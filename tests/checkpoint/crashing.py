"""Forked process that saves until it is killed at a chosen point, or whose disk fails; forked, so trials are short."""

from __future__ import annotations

import contextlib
import errno
import itertools
import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

POINTS = ("step", "snapshot", "write", "sync", "rename", "gc", "time", "slow disk")
FAULTS = {"disk full": errno.ENOSPC, "read-only": errno.EROFS}
KEEP = 2


def state_at(seed: int, step: int) -> dict[str, Any]:
    """A small state, a pure function of its arguments."""
    rng = np.random.default_rng([seed, step])
    return {
        "params": {"w": rng.standard_normal((8, 6), np.float32), "gain": rng.standard_normal(5)},
        "mu": {"w": rng.standard_normal((8, 6), np.float32)},
        "step": np.int32(step),
    }


def forking() -> Any:
    """Forks processes from a server that has imported everything and started nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.checkpoint.crashing_together", "orbax.checkpoint"])
    return context


def start(directory: Path, told: Path, seed: int, first: int, point: str, number: int, fault: str | None) -> Any:
    """The process of `save_on`."""
    process = forking().Process(target=save_on, args=(str(directory), str(told), seed, first, point, number, fault))
    process.start()
    return process


def promised(told: Path) -> int:
    """Last step that the process knew to be on disk."""
    return max((int(line) for line in told.read_text().split()), default=0) if told.exists() else 0


def arm(point: str, number: int, fault: str | None = None) -> Callable[[str], None]:
    """Sets a trap in this process: it dies at the `number`-th time that it reaches `point`.

    Returns:
        What to call where there is no trap: it says that this process has come to a point.
    """
    from jaxllm.checkpoint import snapshot
    from jaxllm.checkpoint.storage.file_systems import LocalFiles

    count = itertools.count(1)

    def here(name: str) -> bool:
        """Whether to die now."""
        return name == point and next(count) == number

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    faulty = itertools.count(1)
    error = FAULTS.get(fault or "")

    def refuses() -> bool:
        return error is not None and next(faulty) == number

    create, rename, remove, sync, capture = (
        LocalFiles.create,
        LocalFiles.rename,
        LocalFiles.remove,
        os.fsync,
        snapshot.capture,
    )

    class Disk:
        def __init__(self, file: Any):
            self.file = file

        def write(self, data: Any) -> int:
            if point == "slow disk":
                time.sleep(0.003)
            half = memoryview(data)[: len(data) // 2]
            if here("write"):
                self.file.write(half)
                die()
            if fault == "disk full" and refuses():
                self.file.write(half)
                raise OSError(error, os.strerror(error or 0))
            return self.file.write(data)

    @contextlib.contextmanager
    def creating(self: LocalFiles, name: str) -> Iterator[Any]:
        if fault == "read-only" and refuses():
            raise OSError(error, os.strerror(error or 0))
        with create(self, name) as file:
            yield Disk(file)

    def renaming(self: LocalFiles, name: str, to: str) -> None:
        if here("rename"):
            if number % 2:
                rename(self, name, to)
            die()
        rename(self, name, to)

    def removing(self: LocalFiles, name: str) -> None:
        if "deleting" in name and here("gc"):
            files = sorted(self.walk(name))
            for file in files[: number % (len(files) + 1)]:
                os.unlink(self.path / name / file)
            die()
        remove(self, name)

    def syncing(handle: int) -> None:
        if here("sync"):
            die()
        sync(handle)

    def capturing(state: Any, **how: Any) -> Any:
        found = capture(state, **how)
        if here("snapshot"):
            die()
        return found

    LocalFiles.create, LocalFiles.rename, LocalFiles.remove = creating, renaming, removing  # type: ignore[method-assign]
    os.fsync = syncing
    snapshot.capture = capturing

    def come(name: str) -> None:
        if here(name):
            die()

    return come


def save_on(directory: str, told: str, seed: int, first: int, point: str, number: int, fault: str | None) -> None:
    """Saves step after step; dies at the `number`-th time that it reaches `point`."""
    import jax.numpy as jnp

    from jaxllm.checkpoint import CheckpointConfig, Checkpointer, CheckpointError

    come, error = arm(point, number, fault), FAULTS.get(fault or "")
    with (
        open(told, "a", buffering=1) as tell,
        Checkpointer(directory, CheckpointConfig(keep_last=KEEP)) as checkpointer,
    ):
        for step in itertools.count(first):
            come("step")
            state = state_at(seed, step) | {"rows": jnp.full((4, 4), step, jnp.float32)}
            try:
                if checkpointer.save(step, state, {"cursor": step * 7}) and step > first:
                    tell.write(f"{max(checkpointer.steps(), default=0)}\n")
            except CheckpointError as refused:  # the disk did; it is reported once, by the save after
                if error is None or os.strerror(error) not in str(refused):
                    raise
                error = None


def trial(directory: Path, seed: int, rounds: int = 2) -> None:
    """Kills a saving process at random points, one start after the other in one directory.

    After each death: what was promised is there, the newest checkpoint is the one that resuming selects, with the bits
    that were saved, all that are listed are whole, nothing half remains.
    """
    from jaxllm.checkpoint import Checkpointer

    rng = random.Random(seed)
    told, first = directory / "told", 1
    place = directory / "checkpoints"
    for _ in range(rounds):
        point = rng.choice(POINTS)
        fault = rng.choice(sorted(FAULTS)) if rng.random() < 0.3 else None
        number = rng.randint(1, 40 if point in ("write", "sync") else 8)
        process = start(place, told, seed, first, point, number, fault)
        if point in ("time", "slow disk"):
            time.sleep(rng.uniform(0, 0.5))
            process.kill()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL, f"{point} {number} {fault}: {process.exitcode}"
        with Checkpointer(place, read_only=True) as reader:
            listed = reader.steps()
            for step in listed:
                reader.verify(step)
        with Checkpointer(place) as checkpointer:
            assert checkpointer.steps() == listed
            left = [name for name in os.listdir(place) if not re.fullmatch(r"\.lock|step_\d{8}", name)]
            assert not left, left
            found = checkpointer.resume(None)
            least = promised(told)
            if found is None:
                assert least == 0, f"{point} {number}: step {least} was on disk"
                continue
            assert found.step == listed[-1] >= least, (found.step, least)
            want = state_at(seed, found.step) | {"rows": np.full((4, 4), found.step, np.float32)}
            assert found.meta == {"cursor": found.step * 7}
            for name in ("step", "rows"):
                assert found.state[name].tobytes() == want[name].tobytes()
            assert found.state["params"]["w"].tobytes() == want["params"]["w"].tobytes()
            assert found.state["params"]["gain"].tobytes() == want["params"]["gain"].tobytes()
            assert found.state["mu"]["w"].tobytes() == want["mu"]["w"].tobytes()
            first = found.step + 1


def snapshot_on(folder: str, told: str, seed: int, first: int) -> None:
    """Snapshots in memory, step after step, until it is killed."""
    import jax.numpy as jnp

    from jaxllm.checkpoint import MemoryCheckpointer, MemoryConfig
    from jaxllm.parallel.distributed import ProcessGroup

    with (
        open(told, "a", buffering=1) as tell,
        MemoryCheckpointer(Path(folder), MemoryConfig(linger=60), ProcessGroup()) as snapshots,
    ):
        for step in itertools.count(first):
            state = state_at(seed, step) | {"rows": jnp.full((4, 4), step, jnp.float32)}
            snapshots.save(step, state, {"cursor": step * 7})
            if step > first:
                tell.write(f"{step - 1}\n")


def memory_trial(directory: Path, seed: int, rounds: int = 3) -> None:
    """A trainer that dies while it makes snapshots in memory: the peer server has a complete, recent one."""
    from jaxllm.checkpoint import MemoryCheckpointer, MemoryConfig
    from jaxllm.parallel.distributed import ProcessGroup

    rng = random.Random(seed)
    told, first = directory / "told", 1
    context = forking()
    try:
        for _ in range(rounds):
            least = promised(told)
            process = context.Process(target=snapshot_on, args=(str(directory / "holders"), str(told), seed, first))
            process.start()
            while process.is_alive() and promised(told) <= least:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.05))
            process.kill()
            process.join(60)
            assert process.exitcode == -signal.SIGKILL
            with MemoryCheckpointer(directory / "holders", MemoryConfig(linger=60), ProcessGroup()) as snapshots:
                snapshots.verify()
                found = snapshots.resume(None)
            assert found is not None
            assert found.step >= promised(told) > least
            want = state_at(seed, found.step)
            assert found.meta == {"cursor": found.step * 7}
            assert found.state["params"]["w"].tobytes() == want["params"]["w"].tobytes()
            assert found.state["mu"]["w"].tobytes() == want["mu"]["w"].tobytes()
            first = found.step + 1
    finally:
        with MemoryCheckpointer(directory / "holders", MemoryConfig(linger=60), ProcessGroup()) as snapshots:
            snapshots.stop_server()
