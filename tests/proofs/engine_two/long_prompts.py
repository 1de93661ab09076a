"""Prefill steps sharded by tokens over the devices of a replica."""

from __future__ import annotations

from jaxllm.compiler import program_walker
from jaxllm.infer import EngineConfig
from tests.infer import engines, meshes
from tests.proofs.engine_two.meshes import sharded_is_unsharded
from tests.proofs.harness import proof

SPLIT = [
    ("context=2", "llama", "tight, swap"),
    ("context=4", "few kv heads", "tight, recompute"),
    ("context=8", "wide", "roomy"),
    ("context=2", "mistral", "one after the other"),
    ("fsdp=2,context=2", "gpt2", "contiguous"),
    ("data=2,context=2", "qwen3", "layers apart"),
    ("context=2,tensor=2", "gemma2", "tight, swap"),
    ("context=2,tensor=2", "gpt_oss", "roomy"),
    ("context=2,expert=2", "mixtral", "tight, swap"),
    ("data=2,context=2,tensor=2", "llama", "tight, recompute"),
]
"""(mesh, model, way to serve)."""


@proof("engine_two", cases=SPLIT, sample=1, float64=True, bound=1e-10)
def split_prompts_are_whole(case: tuple[str, str, str]) -> float:
    """Same as ``sharded_is_unsharded``, over ``context``."""
    return sharded_is_unsharded(case)


@proof("engine_two", cases=["wide", "llama", "qwen3", "gpt2"], sample=1, bound={"share": 0.05, "whole": 0.1})
def split_prompts_are_shared_work(model: str) -> dict[str, float]:
    """Matmuls of the compiled prefill step: those of 2 and 4 devices fall as ``whole + shared / devices``.

    ``share``: how far the shared part by the one differs from that by the other. ``whole``: the part of one device's
    products that every device does, the output head.
    """
    sizes = EngineConfig(
        max_sequences=2, max_batched_tokens=32, max_len=64, pages=40, page_size=8, samplers=("plain",), buckets=(32,)
    )
    taken = {}
    for ways in (1, 2, 4):
        made = engines.build(sizes, model, "float32") if ways == 1 else meshes.over(f"context={ways}", model, sizes)
        device = made.runner
        program = device.programs[device.choose(1, 32, decode=False, full=False).name]  # type: ignore[attr-defined]
        taken[ways] = program_walker.read(program.compiled.as_text()).flops
    by_two, by_four = 2 * (taken[1] - taken[2]), 4 / 3 * (taken[1] - taken[4])
    return {"share": abs(by_two / by_four - 1), "whole": 1 - by_four / taken[1]}
