"""Runs with adapters: stopped and resumed bitwise, and made into models."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm.convert.convert import convert
from jaxllm.convert.load import load_model
from jaxllm.hub.families.config_json import config_json
from jaxllm.infer import LLM, EngineConfig, SamplingParams
from jaxllm.peft import AdapterConfig, AdapterError, read_peft, with_adapter
from jaxllm.train import RoutingConfig, train
from tests.proofs.harness import proof
from tests.train import runs

KINDS = ("rslora", "dora", "lora_ga")
"""Methods beside LoRA, which ``tests/peft/test_adapter_runs.py`` stops and resumes."""


@proof("adapters", cases=KINDS, sample=1)
def a_run_resumes_bitwise(kind: str) -> None:
    """Losses, and merged parameters, of a run that a signal stopped; the run starts another, and is exported."""
    adapter = AdapterConfig(kind, rank=2, alpha=8.0, targets=("*",))  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as name, runs.shared_programs():
        folder = Path(name)
        whole = trained_and_resumed(folder, adapter)
        assert convert(whole, folder / "adapter", None).tensors > 0
        assert train(runs.run_config(folder, out=folder / "next", init_from=str(whole), steps=2)).complete


SMALL = {
    "prefix": AdapterConfig("prefix", tokens=4),
    "prompt": AdapterConfig("prompt", tokens=4),
    "mixlora": AdapterConfig("mixlora", rank=2, alpha=8.0, experts=4),
    "pesc": AdapterConfig("pesc", rank=2, alpha=8.0, experts=4, width=4),
}
"""Methods whose models have another architecture than their base."""


@proof("adapters", cases=tuple(SMALL), sample=1)
def other_architectures_resume_bitwise(kind: str) -> None:
    """The same; the run generates, and is refused as another one's start; virtual tokens are exported and read."""
    with tempfile.TemporaryDirectory() as name, runs.shared_programs():
        folder, adapter = Path(name), SMALL[kind]
        whole = trained_and_resumed(folder, adapter)
        loaded, base = load_model(whole), load_model(folder / "runs/tiny")
        if adapter.virtual_tokens:
            assert convert(whole, folder / "adapter", None).tensors > 0
            read = read_peft(folder / "adapter", base.model, config_json(base.model.config, None, {}))
            with jax.set_mesh(base.mesh):
                _, params = with_adapter(base.model, base.params, read)
            for one, other in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(params), strict=True):
                np.testing.assert_array_equal(one, other)
        else:
            with pytest.raises(AdapterError, match="has no files"):
                convert(whole, folder / "adapter", None)
        engine = EngineConfig(max_sequences=1, max_batched_tokens=8, pages=12, page_size=4, max_len=24)
        sampling = SamplingParams(max_tokens=5, temperature=0.0, logprobs=0)
        ours, plain = (LLM(one, engine).generate([3, 4, 5], sampling)[0].outputs[0] for one in (loaded, base))
        assert len(ours.tokens) == 5
        assert ours.logprobs != plain.logprobs
        with pytest.raises(AdapterError, match="cannot be merged"):
            train(runs.run_config(folder, out=folder / "next", init_from=str(whole), steps=2))


@proof("adapters", cases=("mixlora", "pesc"), sample=1, bound={"load": 0.7})
def the_balance_loss_evens_loads(kind: str) -> dict[str, float]:
    """Excess of the fullest expert's load over an even one after training with the loss, over that without it."""
    excess = []
    with tempfile.TemporaryDirectory() as name, runs.shared_programs():
        folder = Path(name)
        train(runs.run_config(folder))
        for weight in (0.0, 0.1):
            run = runs.run_config(
                folder,
                out=folder / f"balance_{weight}",
                init_from=str(folder / "runs/tiny"),
                adapter=SMALL[kind],
                steps=60,
                routing=RoutingConfig(balance_loss=weight),
            )
            rows = (train(run).directory / "metrics.jsonl").read_text().splitlines()
            loads = [row["expert_load_max"] for row in map(json.loads, rows) if "expert_load_max" in row]
            excess.append(np.mean(loads[-10:]) - 1)
    return {"load": float(excess[1] / excess[0])}


def trained_and_resumed(folder: Path, adapter: AdapterConfig) -> Path:
    """Directory of a run that was not stopped, beside one that was and has the same losses and parameters."""
    train(runs.run_config(folder))
    fields = {"init_from": str(folder / "runs/tiny"), "adapter": adapter, "steps": 6}
    whole = train(runs.run_config(folder, out=folder / "whole", **fields)).directory
    runs.stopped_at(folder, 4, out=folder / "parts", **fields)
    parts = train(runs.run_config(folder, out=folder / "parts", **fields)).directory
    assert runs.losses(whole) == runs.losses(parts)
    one, other, base = (load_model(path).params for path in (whole, parts, folder / "runs/tiny"))
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(x, y)
    if not (adapter.virtual_tokens or adapter.has_experts):
        pairs = zip(jax.tree.leaves(one), jax.tree.leaves(base), strict=True)
        assert any((x != y).any() for x, y in pairs)
    return whole
