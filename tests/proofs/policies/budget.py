"""Remat solver under memory budgets, measured by the TPU compiler."""

from __future__ import annotations

import dataclasses
import functools

from jaxllm.data import DataConfig
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxllm.plan.remat_solver import solve
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for
from tests.proofs.harness import proof

ON, DEVICES = "v5e:2x2", 4
LAYERS, WIDTH, ROWS, LENGTH = 24, 512, 8, 1024


def config() -> RunConfig:
    """A model whose activations are most of what a step takes."""
    block = BlockConfig(AttentionConfig(4, 4, WIDTH // 4), MlpConfig(4 * WIDTH))
    model = DecoderConfig(vocab_size=1024, embed_dim=WIDTH, layers=LAYERS, pattern=(block,), dtype="bfloat16")
    return RunConfig(model=model, data=DataConfig(batch_size=ROWS, seq_len=LENGTH), mesh=f"fsdp={DEVICES}", steps=10)


@functools.cache
def measure(remat: str) -> int:
    """Bytes of a device, of all that the step takes."""
    run = config()
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, remat=remat))
    return compile_for(run, ON, anyway=True).total_bytes


@proof(
    "policies",
    cases=[0.3, 0.5, 0.7, 0.9],
    sample=1,
    bound={"over the budget": 0.0, "left": 0.05, "FLOPs over the best named": 0.0},
)
def solver(share: float) -> dict[str, float]:
    """A budget between the memory of "full" and of "elementwise": it is kept, and used up to 5%.

    Every named policy that fits computes more again.
    """
    least, most = measure("full"), measure("elementwise")
    budget = round(least + share * (most - least))
    solved = solve(config(), budget, measure)
    best = min(flops for size, flops in solved.named.values() if size <= budget)
    assert solved.flops < best, "between two named policies a mixture computes less again"
    return {
        "over the budget": max(0.0, measure(solved.remat) / budget - 1),
        "left": 1 - measure(solved.remat) / budget,
        "FLOPs over the best named": max(0.0, solved.flops / best - 1),
    }
