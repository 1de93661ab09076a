"""When to save, how, where, and what to keep."""

from __future__ import annotations

import dataclasses
from typing import Literal

SavingMode = Literal["auto", "lazy", "eager", "blocking"]


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
    """Snapshots in the memory of a separate process on each host, between two checkpoints on disk.

    Raises:
        ValueError: a count below one.
    """

    every: int | None = None
    """Steps between two snapshots. None: what Young's and Daly's formula gives for the measured stall of a snapshot
    and the failures of this run so far."""

    parity: int = 1
    """Hosts whose loss, with all that they hold, the others make good: Reed-Solomon; 1 is XOR, as in RAID 5. Costs
    parity / (hosts - parity) of a snapshot's bytes more memory and traffic; with one host there is no parity."""

    linger: float = 3600.0
    """Seconds that a holder waits for its trainer to come back."""

    def __post_init__(self):
        for name in ("every", "parity", "linger"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"checkpoint.memory.{name} is {value}: give 1 or more.")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When a run saves, and which of its checkpoints stay.

    Raises:
        ValueError: a count below one.
    """

    every: int = 500
    """Steps between two checkpoints."""

    keep_last: int = 3
    """The newest checkpoints that stay. Those that fail a check of their files do not count."""

    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this stay for ever, besides the newest ones. None: no such ones."""

    saving: SavingMode = "auto"
    """What training waits for.
    lazy: the start of a copy inside the devices' memory; from there to host and disk it goes during the next steps,
    at most `host_bytes` at a time (DataStates-LLM, arXiv:2406.10707). The state is in device memory twice meanwhile.
    eager: the copy to host memory, which holds the whole state while it is written.
    blocking: until everything is on disk.
    auto: lazy where the devices have had that much memory to spare, else eager.
    A save that finds the one before still being written waits for it first."""

    host_bytes: int = 2**32
    """The most of a lazy or blocking save that is in host memory at a time; never less than one leaf's part."""

    directory: str = ""
    """Where checkpoints go instead of the run's directory: a path, or a URL such as gs://bucket/run."""

    memory: MemoryConfig | None = None
    """Snapshots in memory. None: only checkpoints on disk."""

    def __post_init__(self):
        for name in ("every", "keep_last", "keep_every", "host_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"CheckpointConfig.{name} is {value}: give 1 or more.")

    def due(self, step: int) -> bool:
        """Whether a checkpoint belongs after `step` finished steps."""
        return step > 0 and step % self.every == 0

    def retained(self, steps: list[int]) -> set[int]:
        """Those of `steps` that retention leaves on disk."""
        newest = sorted(steps)[-self.keep_last :]
        marked = [s for s in steps if self.keep_every is not None and s % self.keep_every == 0]
        return {*newest, *marked}
