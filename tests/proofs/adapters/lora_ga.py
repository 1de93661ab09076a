"""LoRA-GA beside LoRA on the real SmolLM2 and real conversations (arXiv:2407.05000)."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.data import load_dataset
from jaxllm.models.param_subset import merge, select
from jaxllm.peft import AdapterConfig
from jaxllm.peft.adapted_model import merge_adapters, start_params
from jaxllm.train.init_from import open_initial_model
from jaxllm.train.run import build_value_and_grad
from jaxllm.train.run_model import base_model, run_model, trained_params
from recipes.sft import sft_smollm2
from sharding import MeshSpec
from tests.proofs.data.sft import run_recipe
from tests.proofs.harness import proof

RANK, STEPS, RATE, MEAN = 8, 30, 3e-4, 5
"""Rank, steps and learning rate of both methods; a loss is the mean of so many steps."""


def first_update_cosine(kind: str, seed: int) -> float:
    """Cosine of the first step's change of the adapted weights, to first order, and their gradient in the base."""
    whole = sft_smollm2()
    whole = dataclasses.replace(
        whole, accumulate=1, data=dataclasses.replace(whole.data, seq_len=128, batch_size=4, seed=seed)
    )
    run = dataclasses.replace(whole, adapter=AdapterConfig(kind, rank=RANK))  # type: ignore[arg-type]
    model, mesh = run_model(run), MeshSpec.parse("dp").build(jax.devices()[:1])
    begin = open_initial_model(whole.init_from, whole.model)
    batch = load_dataset(whole.data, begin.tokenizer, begin.template).train.batch_at(0)
    with jax.set_mesh(mesh):
        base = begin.load(mesh, "float32")
        grads = jax.jit(build_value_and_grad(whole, base_model(whole), mesh))(base, batch)[1]
        params = start_params(model, run.adapter, base, mesh, seed, grads if kind == "lora_ga" else None)
        mask = trained_params(run, model)
        step = jax.jit(build_value_and_grad(run, model, mesh))(params, batch)[1]
        trained = select(mask, params)
        towards = jax.tree.map(jnp.negative, select(mask, step))
        change = jax.jvp(lambda t: merge_adapters(model, merge(t, params)), (trained,), (towards,))[1]
    pairs = [
        (np.ravel(moved), -np.ravel(grad))
        for moved, grad in zip(jax.tree.leaves(change), jax.tree.leaves(grads), strict=True)
        if np.any(moved)
    ]
    dot, one, other = (sum(float(np.dot(a, b)) for a, b in of) for of in (
        pairs, [(a, a) for a, _ in pairs], [(b, b) for _, b in pairs]))  # fmt: skip
    return dot / np.sqrt(one * other)


def losses(kind: str, seed: int) -> np.ndarray:
    """Training loss of each step of the recipe with an adapter, as the mean of the last ``MEAN`` steps."""
    settings: dict[str, Any] = {"adapter": kind, "adapter.rank": RANK, "optim.schedule.peak": RATE, "seed": seed,
                                "data.seed": seed, "log-every": 1}  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        run = run_recipe(Path(name), STEPS, *(str(part) for k, v in settings.items() for part in (f"--{k}", v)))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    each = np.array([row["nll"] for row in rows if "nll" in row])
    assert len(each) == STEPS
    return np.convolve(each, np.ones(MEAN) / MEAN, "valid")


@proof("adapters", cases=(1, 2, 3), sample=1, bound={"cosine": 0.8, "steps": 0.9}, parallel=False)
def lora_ga_is_ahead_of_lora(seed: int) -> dict[str, float]:
    """SmolLM2, equal rank, rate and batches: cosine of LoRA's first update with the gradient, over LoRA-GA's; steps
    that LoRA-GA takes to the loss at which LoRA ends, over LoRA's."""
    cosine = {kind: first_update_cosine(kind, seed) for kind in ("lora", "lora_ga")}
    lora, ours = losses("lora", seed), losses("lora_ga", seed)
    reached = np.flatnonzero(ours <= lora[-1])
    steps = (int(reached[0]) if len(reached) else len(ours) * 2) + MEAN
    print(f"seed {seed}: cosine {cosine}, loss of lora {lora[0]:.4f} -> {lora[-1]:.4f}, of lora_ga {ours[0]:.4f} -> "
          f"{ours[-1]:.4f}, which is there after {steps} of {STEPS} steps", flush=True)  # fmt: skip
    return {"cosine": cosine["lora"] / cosine["lora_ga"], "steps": steps / STEPS}
