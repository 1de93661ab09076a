"""Saver: when and where a run is saved: checkpoints on disk, and snapshots in memory between them."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from jaxllm.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    MemoryCheckpointer,
    MultihostCheckpointer,
    RestoredCheckpoint,
)
from jaxllm.checkpoint.memory.snapshot_generations import SnapshotGeneration
from jaxllm.checkpoint.save_interval import interval_steps, mean_time_between_failures
from jaxllm.parallel.distributed import ProcessGroup
from jaxllm.parallel.elastic.run_generation import RunGeneration

Place = Literal["disk", "memory"]
_log = logging.getLogger("jaxllm.train")
TIMED_STEPS = 3
"""Steps before the first snapshot where its interval is derived: their duration is measured."""


class Saver:
    """Saves and restores one run, in every process of it: checkpoints on disk, snapshots in host memory.

    Args:
        directory: the run's directory.
        config: when, where and how to save.
        group: the processes of the run.
        generation: of the processes of an elastic run; None for others.

    Attributes:
        restored: in process 0, after ``resume`` from memory: bytes of arrays that all processes have read,
            ``own_bytes`` from their own host's peer server and ``peer_bytes`` from those of other hosts.
    """

    def __init__(
        self, directory: Path, config: CheckpointConfig, group: ProcessGroup, generation: RunGeneration | None = None
    ):
        self._config, self._group = config, group
        self._history = directory / "starts.json"
        where = config.directory or directory / "checkpoints"
        self.disk = Checkpointer(where, config) if group.size == 1 else MultihostCheckpointer(where, config, group)
        self.memory: MemoryCheckpointer | None = None
        self.restored: dict[str, int] = {}
        self._next: int | None = None
        self._clock: tuple[int, float] | None = None
        if config.memory is not None:
            hosts = generation and SnapshotGeneration(generation.name, generation.slots, config.memory.parity)
            options: dict[str, Any] = {"saving": config.saving, "host_bytes": config.host_bytes, "generation": hosts}
            try:
                self.memory = MemoryCheckpointer(directory / "holders", config.memory, group, **options)
            except BaseException:
                self.disk.close()
                raise

    def __enter__(self) -> Saver:
        self._record_start()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.disk.close()
        finally:
            if self.memory is not None:
                try:
                    self.memory.close()
                except CheckpointError as error:  # raised, it would hide why the run ends
                    _log.error("the last snapshot in memory failed: %s", error)

    # Resume

    def latest(self) -> int | None:
        """Newest step saved on disk or in memory, or None; its contents are not verified."""
        return max((step for step in self._newest().values() if step is not None), default=None)

    def read_meta(self) -> dict[str, Any]:
        """Metadata of the newest saved step."""
        return self._source().read_meta()

    def resume(self, abstract_state: Any) -> RestoredCheckpoint | None:
        """Newest intact state: from the memory of this host or its peers if newer than the disk's, else from disk.

        Args:
            abstract_state: shapes, dtypes and shardings to restore to.
        """
        if self._source() is self.memory and self.memory is not None:
            found, problem = None, ""
            try:
                found = self.memory.resume(abstract_state)
            except (CheckpointError, OSError) as error:
                problem = str(error)
            problems = [one for one in self._group.gather("saver/resume", problem) if one]
            if not (problem := self._group.broadcast("saver/resume", "; ".join(problems))) and found is not None:
                read = [json.loads(one) for one in self._group.gather("saver/read", json.dumps(self.memory.bytes_read))]
                self.restored = {"own_bytes": sum(own for own, _ in read), "peer_bytes": sum(more for _, more in read)}
                return found
            _log.error("the snapshot in memory cannot be restored; restoring the checkpoint on disk: %s", problem)
        return self.disk.resume(abstract_state)

    # Save

    def due(self, step: int, last: bool) -> Place | None:
        """Place to save the state after ``step`` steps: disk, memory, or None for nowhere.

        Args:
            last: whether this is the last step of this start, which is always saved to disk.
        """
        now = time.monotonic()
        if self._clock is None:
            self._clock = step, now
        if last or self._config.due(step):
            return "disk"
        if self.memory is None or self._config.memory is None:
            return None
        if self._config.memory.every is not None:
            return "memory" if step % self._config.memory.every == 0 else None
        if self._next is None:
            self._next = step + TIMED_STEPS
        return "memory" if step >= self._next else None

    def save(self, place: Place, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Saves the state. A failed snapshot in memory is logged and ignored; a failed checkpoint on disk is raised."""
        if place == "disk":
            self.disk.save(step, state, meta)
            return
        assert self.memory is not None
        with self._forgiving(self.memory):
            self.memory.save(step, state, meta)
        if self._config.memory is not None and self._config.memory.every is None:
            self._next = step + int(self._group.broadcast("saver/interval", str(self._steps_to_next_snapshot(step))))

    def wait_copied(self) -> None:
        """Blocks until the arrays of the last save may be donated; only an overlapped save is not done before."""
        for one in (self.disk, self.memory):
            if one is not None:
                one.wait_copied()

    @contextlib.contextmanager
    def _forgiving(self, memory: MemoryCheckpointer) -> Iterator[None]:
        """Context manager that logs a failed snapshot, and starts this host's server again if that was lost."""
        try:
            yield
        except CheckpointError as error:
            _log.error("a snapshot in memory failed: %s", error)
            with contextlib.suppress(CheckpointError):  # then the next snapshot fails too, and tries again
                memory.ensure_server()

    def wait(self) -> None:
        """Blocks until all checkpoints are on disk."""
        self.disk.wait()

    def finish(self) -> None:
        """Ends a run that stopped in order: waits for the disk and releases the snapshots in memory."""
        self.wait()
        if self.memory is not None:
            try:
                self.memory.stop_server()
            except CheckpointError as error:
                _log.error("the last snapshot in memory failed: %s", error)
        self._record_end()

    def newest(self, step: int) -> int | None:
        """Newest checkpoint on disk at or before ``step``, as process 0 sees it; not verified. None without one."""
        self.wait()
        found = max((one for one in self.disk.steps() if one <= step), default=None)
        return json.loads(self._group.broadcast("saver/newest", json.dumps(found)))

    def oldest(self) -> int | None:
        """Oldest checkpoint on disk, as process 0 sees it, or None."""
        return json.loads(self._group.broadcast("saver/oldest", json.dumps(min(self.disk.steps(), default=None))))

    def set_aside_after(self, step: int) -> list[Any]:
        """Sets aside the checkpoints after ``step`` (see ``Checkpointer``), and releases snapshots in memory."""
        if self.memory is not None:
            self.memory.stop_server()
            self.memory.close()
            self.memory = None
        return self.disk.set_aside_after(step)

    # Internal

    def _newest(self) -> dict[Place, int | None]:
        return {"disk": self.disk.latest(), "memory": None if self.memory is None else self.memory.latest()}

    def _source(self) -> Checkpointer:
        newest = self._newest()
        memory, disk = newest["memory"], newest["disk"]
        return self.memory if self.memory is not None and memory is not None and memory > (disk or -1) else self.disk

    def _steps_to_next_snapshot(self, step: int) -> int:
        """Steps to the next snapshot, from the measured stall of a snapshot, the step time and the failure rate."""
        assert self.memory is not None
        assert self._clock is not None
        first, began = self._clock
        stalls = list(self.memory.stalls.values()) or [0.0]
        each = (time.monotonic() - began - sum(stalls)) / max(1, step - first)
        return interval_steps(sum(stalls) / len(stalls), each, self._mean_time_between_failures())

    def _mean_time_between_failures(self) -> float:
        """Mean seconds between failures, from the run's history: starts without a recorded end."""
        starts = self._starts()
        failures = sum(1 for one in starts[:-1] if "ended" not in one)
        lived = time.time() - starts[0]["began"] if starts else 0.0
        return mean_time_between_failures(lived, failures, self._group.size)

    def _starts(self) -> list[dict[str, float]]:
        try:
            return json.loads(self._history.read_text())
        except (OSError, ValueError):
            return []

    def _record_start(self) -> None:
        self._write_history([*self._starts(), {"began": time.time()}])

    def _record_end(self) -> None:
        starts = self._starts()
        self._write_history([*starts[:-1], {**starts[-1], "ended": time.time()}] if starts else [])

    def _write_history(self, starts: list[dict[str, float]]) -> None:
        if self._group.rank == 0 and self._config.memory is not None:
            from jaxllm.files import write_json

            write_json(self._history, starts)
