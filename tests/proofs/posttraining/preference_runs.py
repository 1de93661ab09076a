"""Runs on preference pairs: they learn, resume, are evaluated, and an adapter's reference is its base."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.convert.load import load_model
from jaxllm.data import DataConfig, load_dataset
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.peft.adapter_method import AdapterConfig
from jaxllm.train import ObjectiveConfig, Run, RunConfig, train
from jaxllm.train.evaluate import evaluate_loaded
from jaxllm.train.records.run_directory import RunDirectory
from tests.proofs.harness import proof
from tests.train import runs

STEPS = 24


def pairs_file(folder: Path, count: int = 80) -> Path:
    """Pairs whose chosen completion repeats the prompt's letter, and whose rejected one repeats another."""
    rng, letters = np.random.default_rng(0), "abcdefgh"
    rows = []
    for _ in range(count):
        one, other = rng.choice(list(letters), 2, replace=False)
        prompt = "".join(rng.choice(list("xyz"), 3)) + str(one)
        rows.append({"prompt": prompt, "chosen": str(one) * 3, "rejected": str(other) * 3})
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def pair_run(folder: Path, name: str, **fields: Any) -> RunConfig:
    """A run of a tiny model on the pairs."""
    shared: dict[str, Any] = {
        "name": name,
        "model": DecoderConfig(
            vocab_size=280, embed_dim=32, layers=1,
            pattern=(BlockConfig(AttentionConfig(heads=2, kv_heads=1, head_dim=16), MlpConfig(hidden=32)),),
        ),
        "data": DataConfig(
            str(folder / "pairs.jsonl"), content="preference", packing="documents", tokenizer="byte", seq_len=32,
            batch_size=8, heldout_fraction=0.2,
        ),
        "objective": ObjectiveConfig("dpo", ("beta=0.5",)),
        "reference": "start",
        "optim": OptimConfig(ScheduleConfig("constant", peak=1e-2, warmup=0.0)),
        "steps": STEPS,
        "accumulate": 2,
        "mesh": "fsdp=2,tensor=2,data=2",
        "out": str(folder / "runs"),
    }  # fmt: skip
    return RunConfig(**(shared | fields))


def objective_losses(directory: Path) -> list[float]:
    """The objective's loss at every step."""
    return [row["loss"] for row in RunDirectory(directory).read_metrics() if "loss" in row]


def check_evaluation(config: RunConfig, accuracy: float) -> None:
    """The evaluation of the loaded run is the one that the run recorded, and its accuracy is at least so high."""
    directory = Path(config.out) / config.name
    recorded = json.loads((directory / "receipt.json").read_text())["result"]
    loaded = load_model(directory)
    heldout = load_dataset(config.data, loaded.tokenizer, loaded.template).heldout
    found = evaluate_loaded(config, loaded.model, loaded.params, loaded.mesh, heldout)
    assert found.metrics["accuracy"] >= accuracy
    for name, value in found.metrics.items():
        assert value == pytest.approx(recorded[f"heldout_{name}"], rel=1e-4, abs=1e-5)


@proof("posttraining", cases=["whole", "adapter"], sample=1)
def runs_of_pairs(case: str) -> None:
    """DPO of all parameters, stopped and resumed; or of an adapter, whose base is the reference."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs_file(folder)
        whole = pair_run(folder, "whole")
        train(whole)
        losses = objective_losses(folder / "runs" / "whole")
        assert abs(losses[0] - np.log(2)) < 1e-6, "the policy starts as its reference"
        check_evaluation(whole, 0.8)
        if case == "whole":
            parts = dataclasses.replace(whole, name="parts")
            with pytest.MonkeyPatch.context() as monkeypatch:
                runs.signal_at(monkeypatch, 5)
                assert not train(parts).complete
            assert train(parts).complete
            assert objective_losses(folder / "runs" / "parts") == losses
            return
        adapter = AdapterConfig("lora", rank=4, targets=("attention", "mlp"))
        tuned = pair_run(folder, "tuned", init_from=str(folder / "runs" / "whole"), adapter=adapter, steps=12)
        run = Run(tuned)
        assert run.reference is not None
        assert run.reference.is_base
        train(tuned)
        after = objective_losses(folder / "runs" / "tuned")
        assert abs(after[0] - np.log(2)) < 1e-6
        assert after[5] < after[0]
        check_evaluation(tuned, 0.6)
        also = dataclasses.replace(tuned, trainable=("gain",))
        other = Run(also).reference
        assert other is not None
        assert not other.is_base, "gains are trained too, so the base does not stay"
        assert jax.tree.leaves(other.params)
