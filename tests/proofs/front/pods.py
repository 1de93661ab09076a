"""Steps of recipes compiled for absent slices and nodes: those that no other proof compiles."""

from __future__ import annotations

from collections.abc import Callable

from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for
from recipes.gpt2 import gpt2_124m
from recipes.llama3 import llama3_1b, llama3_8b, llama3_8b_128k
from recipes.qwen import qwen3_30b_a3b
from tests.proofs.harness import proof

PODS: dict[Callable[[], RunConfig], tuple[str, ...]] = {
    gpt2_124m: ("h100:1x8", "v5e:2x4", "v6e:2x4"),
    llama3_1b: ("h100:1x8", "v5e:4x4", "v6e:4x4"),
    qwen3_30b_a3b: ("h100:8x8", "v5p:4x4x4"),
    llama3_8b_128k: ("h100:8x8", "v5p:4x4x4"),
    llama3_8b: ("h200:8x8", "v5e:8x8"),
}
CASES = tuple((recipe.__name__, on) for recipe, topologies in PODS.items() for on in topologies)


@proof("front", cases=CASES, sample=1, bound={"of_memory": 1.0})
def pods(case: tuple[str, str]) -> dict[str, float]:
    """The share of a device's memory that the step takes, by its compiler."""
    name, on = case
    report = compile_for(next(make for make in PODS if make.__name__ == name)(), on)
    print(report)
    assert report.hbm_bytes is not None
    return {"of_memory": report.total_bytes / report.hbm_bytes}
