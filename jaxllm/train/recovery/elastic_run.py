"""Elastic runs: what a run does differently where an elastic supervisor has started it.

The mesh is made for the devices that are there (``elastic_mesh``). The global batch stays the same, with rows of
padding if it does not divide (``jaxllm.train.run_rows``).

    ElasWave (arXiv:2510.00606): global batch and gradient scale are kept on the devices left, from in-memory snapshots.
"""

from __future__ import annotations

import dataclasses
import os

from jaxllm.checkpoint import CheckpointConfig, MemoryConfig
from jaxllm.config import ConfigError
from jaxllm.observe.event_log import FAILURES
from jaxllm.parallel.elastic.run_generation import RunGeneration, detect_generation
from jaxllm.train.config import RunConfig


def elastic_generation(config: RunConfig) -> RunGeneration | None:
    """Generation of this process; None for runs that are not elastic.

    Raises:
        ConfigError: the run is elastic, and no elastic supervisor has started this process.
    """
    if not config.elastic.enabled:
        return None
    found = detect_generation(os.environ)
    if found is None:
        raise ConfigError(
            "--elastic: nothing would start the processes that are left again. Start the run by a supervisor: "
            "`jaxllm launch local -n PROCESSES -- train RECIPE --elastic`, or leave --elastic out."
        )
    return found


def elastic_checkpoint(config: RunConfig) -> CheckpointConfig:
    """Checkpoint settings of a run: with snapshots in memory if it is elastic."""
    if not config.elastic.enabled or config.checkpoint.memory is not None:
        return config.checkpoint
    return dataclasses.replace(config.checkpoint, memory=MemoryConfig(every=config.elastic.every))


def failed_at(generation: RunGeneration | None) -> float | None:
    """Time of the first failure before a generation, in seconds since 1970; None if there was none."""
    events = generation.events if generation is not None else ()
    return min((event["time"] for event in events if event["event"] in FAILURES), default=None)
