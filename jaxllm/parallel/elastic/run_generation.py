"""Generation of an elastic run: one set of processes that trains until a process is lost or returns.

A slot is a place for a process, such as a host; it keeps its number for the whole run. The processes of a generation
have the ranks 0, 1, ... in the order of their slots. The supervisor starts every process of a generation with these
variables:

    JAXLLM_GENERATION   number of the generation, from 1
    JAXLLM_SLOTS        slots of the generation by rank, such as 0,1,3
    JAXLLM_ALL_SLOTS    number of slots of the run
    JAXLLM_ELASTIC_KEY  random word of the supervisor, which tells its generations from those of another one
    JAXLLM_MONITOR      HOST:PORT at which the supervisor receives the phases of the processes
    JAXLLM_EVENTS       JSON list of events since the generation before, for the run's event log
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REFORM = 65
"""Number that stands for "all processes form again" where loops are told a signal to stop; no signal has it."""
REFORMED = 128 + REFORM
"""Exit status of a process that has saved and ended so that all processes form again."""


@dataclass(frozen=True)
class ElasticConfig:
    """Elastic training: what a run does when one of its processes dies, hangs or slows down.

    Attributes:
        enabled: go on with the processes left; needs the supervisor of ``jaxllm launch local``. Also ``--elastic``.
        every: steps between two snapshots in memory, where ``checkpoint.memory`` is not set.
    """

    enabled: bool = False
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"elastic.every = {self.every}; give 1 step or more.")


@dataclass(frozen=True)
class RunGeneration:
    """Generation that this process belongs to.

    Attributes:
        number: from 1.
        slots: slots of its processes, by rank.
        total: number of slots of the run.
        key: random word of the supervisor.
        monitor: ``HOST:PORT`` of the supervisor.
        events: events since the generation before, each with ``event`` and ``time`` (seconds since 1970).
    """

    number: int
    slots: tuple[int, ...]
    total: int
    key: str
    monitor: str
    events: tuple[dict[str, Any], ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """Name that no other generation of any supervisor has."""
        return f"{self.key}.{self.number:05d}"

    def environment(self) -> dict[str, str]:
        """Variables that describe the generation to its processes."""
        return {
            "JAXLLM_GENERATION": str(self.number),
            "JAXLLM_SLOTS": ",".join(map(str, self.slots)),
            "JAXLLM_ALL_SLOTS": str(self.total),
            "JAXLLM_ELASTIC_KEY": self.key,
            "JAXLLM_MONITOR": self.monitor,
            "JAXLLM_EVENTS": json.dumps(self.events),
        }


def detect_generation(env: Mapping[str, str]) -> RunGeneration | None:
    """Generation that the variables describe; None where no elastic supervisor has started this process."""
    if "JAXLLM_GENERATION" not in env:
        return None
    return RunGeneration(
        number=int(env["JAXLLM_GENERATION"]),
        slots=tuple(map(int, env["JAXLLM_SLOTS"].split(","))),
        total=int(env["JAXLLM_ALL_SLOTS"]),
        key=env["JAXLLM_ELASTIC_KEY"],
        monitor=env["JAXLLM_MONITOR"],
        events=tuple(json.loads(env["JAXLLM_EVENTS"])),
    )
