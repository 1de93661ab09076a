"""Runs of SmolLM2 that learn in minutes on two CPU cores, in a process with one device, as a user has it.

python -m tests.posttrain.smollm2_runs sums|shuffled|preferences SEED    # prints its figures as JSON at the end
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.checkpoint import CheckpointConfig
from jaxllm.infer import LLM, EngineConfig, SamplingParams
from jaxllm.optim import OptimConfig, ScheduleConfig
from jaxllm.peft.adapter_method import AdapterConfig
from jaxllm.posttrain import PolicyRunConfig, RolloutConfig, train_policy
from jaxllm.train import RunConfig, train
from jaxllm.train.records.run_directory import RunDirectory
from recipes.grpo import grpo_arith_smollm2
from recipes.preferences import dpo_smollm2
from tests.posttrain.shuffled_rewards import shuffle_rewards

SOLVED = "2+2=4\n6+6=12\n"
"""Sums before each question, in place of a short fine-tuning: the base goes on in their form and answers some."""
HELD_OUT = 20
SAMPLES = 16
LORA = AdapterConfig("lora", rank=16, targets=("attention", "mlp"))


def first_number(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """1 if the completion begins with the row's answer and no further digit, else 0."""
    found = re.match(r"\s*(\d+)", completion)
    return float(found is not None and found[1] == row["answer"])


def sums(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All sums of two numbers from 0 to 9, in random order: those that are trained on, and held-out ones."""
    pairs = list(itertools.product(range(10), repeat=2))
    order = np.random.default_rng([seed, 7]).permutation(len(pairs))
    rows = [{"prompt": f"{SOLVED}{a}+{b}=", "answer": str(a + b)} for a, b in (pairs[i] for i in order)]
    return rows[HELD_OUT:], rows[:HELD_OUT]


def sums_run(folder: Path, seed: int, rows: list[dict[str, str]]) -> PolicyRunConfig:
    """The recipe with LoRA, 10 steps of eight sums with six completions each."""
    file = folder / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = grpo_arith_smollm2()
    return dataclasses.replace(
        recipe,
        prompts=str(file),
        rewards=(f"{first_number.__module__}:first_number",),
        adapter=LORA,
        rollout=RolloutConfig(prompts=8, group=6, max_tokens=4, max_sequences=48),
        data=dataclasses.replace(recipe.data, batch_size=10),
        optim=OptimConfig(ScheduleConfig("constant", peak=2e-4, warmup=0.0)),
        steps=10,
        accumulate=1,
        seed=seed,
        checkpoint=CheckpointConfig(every=1000, keep_last=1),
        out=str(folder),
    )


def share_right(model: str, rows: list[dict[str, str]]) -> float:
    """Mean reward of completions of the rows' prompts, sampled at temperature 1 as in training."""
    llm = LLM(model, EngineConfig(max_sequences=32, max_len=64))
    params = [SamplingParams(max_tokens=4, temperature=1.0, n=SAMPLES, seed=row) for row in range(len(rows))]
    found = llm.generate([row["prompt"] for row in rows], params)
    rewards = [
        first_number(row["prompt"], completion.text, row)
        for row, request in zip(rows, found, strict=True)
        for completion in request.outputs
    ]
    assert len(rewards) == len(rows) * SAMPLES
    return float(np.mean(rewards))


def learn_sums(folder: Path, seed: int, shuffled: bool) -> dict[str, Any]:
    """Mean reward on held-out sums before and after; prints that of each step."""
    rows, held_out = sums(seed)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if shuffled:
            shuffle_rewards(monkeypatch)
        directory = train_policy(sums_run(folder, seed, rows)).directory
    by_step = [row["reward"] for row in RunDirectory(directory).read_metrics() if "reward" in row]
    print(np.round(by_step, 2).tolist(), flush=True)
    found = {"before": share_right("smollm2", held_out), "after": share_right(str(directory), held_out)}
    return found


def preferences_run(folder: Path, seed: int) -> RunConfig:
    """The recipe of DPO with LoRA, 30 steps of four rows of 192 tokens."""
    recipe = dpo_smollm2()
    return dataclasses.replace(
        recipe,
        adapter=LORA,
        data=dataclasses.replace(recipe.data, seq_len=192, batch_size=4, seed=seed),
        optim=OptimConfig(ScheduleConfig("constant", peak=1e-4, warmup=0.0)),
        steps=30,
        accumulate=1,
        seed=seed,
        log_every=1,
        checkpoint=CheckpointConfig(every=1000, keep_last=1),
        out=str(folder),
    )


def learn_preferences(folder: Path, seed: int) -> dict[str, Any]:
    """Loss of the first step, and accuracy and margin of held-out pairs at the end."""
    config = preferences_run(folder, seed)
    train(config)
    directory = folder / config.name
    first = next(row["loss"] for row in RunDirectory(directory).read_metrics() if "loss" in row)
    result = json.loads((directory / "receipt.json").read_text())["result"]
    return {"first": first, "accuracy": result["heldout_accuracy"], "margin": result["heldout_margin"]}


def run_alone(kind: str, seed: int) -> dict[str, Any]:
    """Figures of a run in a process of its own; the last line that it prints."""
    command = [sys.executable, "-m", "tests.posttrain.smollm2_runs", kind, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    kind, seed = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as name:
        made = (
            learn_preferences(Path(name), seed)
            if kind == "preferences"
            else learn_sums(Path(name), seed, kind != "sums")
        )
    print(json.dumps(made))
