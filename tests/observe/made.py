"""Hand-written run directories, as a run of some hours leaves them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any


def write_run(folder: Path, name: str = "made", *, steps: int = 60, seed: int = 0, **changes: Any) -> Path:
    """A run of ``steps`` steps that was killed after 40 of them, went on after 30, and finished."""
    rng = random.Random(seed)
    path = folder / name
    path.mkdir(parents=True)
    config = {"name": name, "steps": steps, "mesh": "fsdp=4", "model": {"layers": 3, "dtype": "bfloat16"}} | changes
    (path / "config.json").write_text(json.dumps(config))
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        rows.append(
            {
                "step": step, "loss": 2 + 3 * math.exp(-step / 15) + 0.1 * rng.random(), "grad_norm": 9 / step,
                "nll": 2 + 3 * math.exp(-step / 15) + 0.1 * rng.random(), "learning_rate": 1e-3 * (1 - step / steps),
                "param_norm": 50 + step / 9, "update_norm": 0.5 / step, "tokens": 2048.0, "mfu": 0.4, "hfu": 0.52,
                "tokens_per_second": 9000 + 500 * rng.random(), "step_seconds": 0.23, "data_wait": 0.01 * rng.random(),
                "memory_bytes": 3 << 30, "seconds": 0.23 * step,
            }
        )  # fmt: skip
    rows.append({"step": steps, "heldout_nll": 2.2, "heldout_bits_per_byte": 1.23})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events(steps)))
    return path


def events(steps: int = 60) -> list[dict[str, Any]]:
    """Its events; the seconds are round, so that an account of them can be written down."""
    facts = {
        "devices": 4,
        "device_kind": "TPU v6 lite",
        "parameters": 1_234_567,
        "flops_per_token": 6e6,
        "peak_flops": 1e15,
        "versions": {"jax": "0.10.2", "python": "3.11.7"},
        "commit": "0123456789abcdef",
    }
    return [
        {"time": 1010.0, "event": "started", "began": 1000.0, **facts},
        {"time": 1014.0, "event": "initialised"},
        {"time": 1034.0, "event": "compiled"},
        {"time": 1094.0, "event": "steps", "first": 1, "last": 20, "waited": 2.0},
        {"time": 1096.0, "event": "saved", "step": 20, "place": "disk"},
        {"time": 1156.0, "event": "steps", "first": 21, "last": 40, "waited": 4.0},
        # killed here; the checkpoint of step 30 was in the making
        {"time": 1190.0, "event": "started", "began": 1180.0, **facts},
        {"time": 1196.0, "event": "restored", "step": 30},
        {"time": 1201.0, "event": "compiled"},
        {"time": 1291.0, "event": "steps", "first": 31, "last": steps, "waited": 0.0},
        {"time": 1295.0, "event": "saved", "step": steps, "place": "disk"},
        {"time": 1299.0, "event": "evaluated", "step": steps},
        {"time": 1300.0, "event": "finished", "step": steps},
    ]
