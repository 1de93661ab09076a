"""Held-out loss of replicas with outer steps beside data parallelism: docs/train/low_communication.json.

    python -m benchmarks.replicas.outer_losses [STEPS [SEEDS]]    four replicas of a tiny model on the bundled text

Every run sees the same batches in the same order: four replicas have a quarter of each. Bytes are those that a device
sends between replicas in all its steps, by the formula that the tests compare with compiled programs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[2] / "docs/train/low_communication.json"
REPLICAS, EVERY = 4, 30
SETTINGS: dict[str, dict[str, Any]] = {
    "data parallelism": {},
    "diloco": {"kind": "diloco"},
    "diloco, int8": {"kind": "diloco", "compress": "int8"},
    "diloco, momentum 0.8": {"kind": "diloco", "momentum": 0.8},
    "diloco, momentum 0.8, int8": {"kind": "diloco", "momentum": 0.8, "compress": "int8"},
    "sparseloco, topk:0.02,int8": {"kind": "sparseloco", "compress": "topk:0.02,int8"},
    "sparseloco, topk:0.02,int2": {"kind": "sparseloco", "compress": "topk:0.02,int2"},
    "sparseloco, topk:0.03,int8, every 5": {
        "kind": "sparseloco",
        "compress": "topk:0.03,int8",
        "every": 5,
        "feedback": 1.0,
        "rate": 1.3,
    },
    "co2": {"kind": "co2"},
}
"""Outer steps by name."""


def run(name: str, setting: dict[str, Any], steps: int, seed: int, folder: Path) -> dict[str, Any]:
    """Trains one of the settings; its held-out loss and the bytes that a device sent between replicas."""
    import jax

    from jaxllm.data import DataConfig
    from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
    from jaxllm.optim import OptimConfig, ScheduleConfig
    from jaxllm.train import RunConfig, train
    from jaxllm.train.outer.config import OuterConfig
    from jaxllm.train.outer.outer_step import sent_bytes
    from jaxllm.train.run_model import run_model
    from jaxllm.train.step.step_builder import build_optimizer, run_state
    from sharding import MeshSpec

    fields: dict[str, Any] = {"every": EVERY, **setting}
    stages = fields.pop("stages", 1)
    outer = OuterConfig(**fields) if setting else OuterConfig()
    axis = "data" if outer.kind == "none" else "replica"
    config = RunConfig(
        name=f"{name.replace(', ', '-').replace(':', '')}-{seed}-{steps}",
        model=DecoderConfig(
            vocab_size=280,
            embed_dim=64,
            layers=2,
            pattern=(BlockConfig(AttentionConfig(heads=4, kv_heads=2, head_dim=16), MlpConfig(hidden=128)),),
            dtype="float32",
            remat="none",
        ),
        data=DataConfig(source="shakespeare", tokenizer="byte", seq_len=64, batch_size=16),
        optim=OptimConfig(ScheduleConfig(peak=3e-3)),
        steps=steps,
        seed=seed,
        mesh=f"{axis}={REPLICAS},stage={stages}",
        outer=outer,
        log_every=500,
        out=str(folder),
    )
    found = train(config).evaluation
    assert found is not None
    model = run_model(config)
    mesh = MeshSpec.parse(config.mesh).build(jax.devices()[: REPLICAS * stages])
    params = run_state(config, model, build_optimizer(config, model), mesh).params
    rounds = steps if outer.kind == "none" else steps // outer.every
    plain = OuterConfig("diloco", every=EVERY) if outer.kind == "none" else outer
    return {"heldout_nll": found.nll, "sent_bytes": sent_bytes(plain, params, REPLICAS) * rounds}


def compare(settings: dict[str, dict[str, Any]], file: Path, steps: int, seeds: int, devices: int) -> None:
    """Runs all settings with all seeds; writes the file after each, and goes on where it was stopped."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    found: dict[str, Any] = {"steps": steps, "every": EVERY, "replicas": REPLICAS, "settings": settings}
    before = json.loads(file.read_text()) if file.exists() else {}
    known = before if all(before.get(name) == value for name, value in json.loads(json.dumps(found)).items()) else {}
    found["runs"] = known.get("runs", {})
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            for name, setting in settings.items():
                runs = found["runs"].setdefault(name, [])
                if seed < len(runs):
                    continue
                runs.append(run(name, setting, steps, seed, Path(folder)))
                file.write_text(json.dumps(found, indent=1) + "\n")
                print(name, seed, runs[-1], flush=True)


def main(steps: int = 2000, seeds: int = 3) -> None:
    """Compares ``SETTINGS``."""
    compare(SETTINGS, FILE, steps, seeds, REPLICAS)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
