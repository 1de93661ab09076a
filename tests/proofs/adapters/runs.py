"""Runs with adapters: stopped and resumed bitwise, and made into models."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax
import numpy as np

from jaxllm.convert.convert import convert
from jaxllm.convert.load import load_model
from jaxllm.peft import AdapterConfig
from jaxllm.train import train
from tests.proofs.harness import proof
from tests.train import runs

KINDS = ("rslora", "dora", "lora_ga")
"""Methods beside LoRA, which ``tests/peft/test_adapter_runs.py`` stops and resumes."""


@proof("adapters", cases=KINDS, sample=1)
def a_run_resumes_bitwise(kind: str) -> None:
    """Losses, and merged parameters, of a run that a signal stopped; the run starts another, and is exported."""
    with tempfile.TemporaryDirectory() as name, runs.shared_programs():
        folder = Path(name)
        train(runs.run_config(folder))
        fields = {
            "init_from": str(folder / "runs/tiny"),
            "adapter": AdapterConfig(kind, rank=2, alpha=8.0, targets=("*",)),  # type: ignore[arg-type]
            "steps": 6,
        }
        whole = train(runs.run_config(folder, out=folder / "whole", **fields)).directory
        runs.stopped_at(folder, 4, out=folder / "parts", **fields)
        parts = train(runs.run_config(folder, out=folder / "parts", **fields)).directory
        assert runs.losses(whole) == runs.losses(parts)
        one, other, base = (load_model(path).params for path in (whole, parts, folder / "runs/tiny"))
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(x, y)
        assert any((x != y).any() for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(base), strict=True))
        assert convert(whole, folder / "adapter", None).tensors > 0
        assert train(runs.run_config(folder, out=folder / "next", init_from=str(whole), steps=2)).complete
