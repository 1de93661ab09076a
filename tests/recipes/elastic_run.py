"""Elastic run in float64 that eight, six, four and two devices fit; says which process is in which slot.

ELASTIC='{"steps": 30, "pids": FOLDER}'    number of steps; FOLDER gets a file GENERATION.SLOT with each process's id
ELASTIC='{"memory": false}'                no snapshots in memory
ELASTIC='{"layers": 8, "width": 24}'       for a pipeline: four micro-batches, and nothing on disk before the end
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from jaxllm.checkpoint import CheckpointConfig, MemoryConfig
from jaxllm.parallel.elastic.run_generation import detect_generation
from jaxllm.train import RunConfig
from tests.recipes.together_run import together_run


def elastic_run() -> RunConfig:
    """Small steps, each with a snapshot in memory that two lost hosts are rebuilt from; disk every twelve."""
    told = json.loads(os.environ.get("ELASTIC", "{}"))
    generation = detect_generation(os.environ)
    if generation is not None:
        slot = generation.slots[int(os.environ.get("JAXLLM_PROCESS_ID", "0"))]
        part = Path(told["pids"]) / f"part.{os.getpid()}"
        part.write_text(str(os.getpid()))
        part.rename(Path(told["pids"]) / f"{generation.number}.{slot}")
    run = together_run()
    if "layers" in told:
        model = dataclasses.replace(run.model, layers=told["layers"], embed_dim=told.get("width", 24))
        run = dataclasses.replace(run, model=model, accumulate=4)
    return dataclasses.replace(
        run,
        name="elastic",
        steps=told.get("steps", 30),
        checkpoint=CheckpointConfig(
            every=10**6 if "layers" in told else 12,
            memory=MemoryConfig(every=1, parity=2, linger=300) if told.get("memory", True) else None,
        ),
    )
