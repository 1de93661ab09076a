"""Checkpoint settings: interval, saving mode, directory, retention, in-memory checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Literal

SavingMode = Literal["auto", "lazy", "overlapped", "eager", "blocking"]


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """In-memory (peer) checkpoints: snapshots in a separate process on each host, between two checkpoints on disk.

    Raises:
        ValueError: a count below one.
    """

    every: int | None = None
    """Steps between two snapshots. None: the interval of Young's and Daly's formula for the measured stall of a
    snapshot and the failures of this run so far."""

    parity: int = 1
    """Hosts that may be lost with all their memory, by Reed-Solomon erasure coding; 1 is XOR, as in RAID 5. Adds
    parity / (hosts - parity) of a snapshot's bytes in memory and traffic; with one host there is no parity."""

    linger: float = 3600.0
    """Seconds for which a peer server waits for its trainer to return."""

    def __post_init__(self):
        for name in ("every", "parity", "linger"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"checkpoint.memory.{name} is {value}: give 1 or more.")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoint settings of a run: when it saves, how, and which checkpoints are retained.

    Raises:
        ValueError: a count below one.
    """

    every: int = 500
    """Steps between two checkpoints."""

    keep_last: int = 3
    """Retention: number of newest checkpoints to keep. Those with missing or truncated files do not count."""

    keep_every: int | None = None
    """Retention: checkpoints whose step is a multiple of this are also kept, for ever. None: only the newest."""

    saving: SavingMode = "auto"
    """Saving mode: the part of a save that training waits for.
    lazy: the start of a copy inside device memory; it is transferred to the host and written during the next steps,
    at most `host_bytes` at a time. Meanwhile device memory has the state twice.
    overlapped: nothing; the state is copied to the host while the next step computes its gradients, which only read it,
    and the update waits if the copy is unfinished (DataStates-LLM, arXiv:2406.10707). Device memory has the state once,
    host memory all of it until it is written; a step is two programs, one for the gradients and one for the update.
    eager: the copy to host memory, which has the whole state until it is written.
    blocking: the whole save, until it is on disk.
    auto: lazy if the devices have had that much free memory so far, else eager.
    A save first waits for the previous one, if that is still being written."""

    host_bytes: int = 2**32
    """Limit of host memory, in bytes, for a lazy or blocking save; never less than one process's part of a leaf."""

    directory: str = ""
    """Directory of the checkpoints in place of the run's directory: a path, or a URL such as gs://bucket/run."""

    memory: MemoryConfig | None = None
    """In-memory checkpoints. None: only checkpoints on disk."""

    def __post_init__(self):
        for name in ("every", "keep_last", "keep_every", "host_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"CheckpointConfig.{name} is {value}: give 1 or more.")

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` finished steps."""
        return step > 0 and step % self.every == 0

    def retained(self, steps: list[int]) -> set[int]:
        """Steps among `steps` that retention keeps."""
        newest = sorted(steps)[-self.keep_last :]
        marked = [s for s in steps if self.keep_every is not None and s % self.keep_every == 0]
        return {*newest, *marked}
