"""Steps of the large recipes, compiled for absent slices and nodes: they fit, and send what the formulas say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for
from recipes.llama3 import llama3_8b, llama3_8b_1m, llama3_70b, llama3_405b
from recipes.mixtral import mixtral_8x22b
from sharding.topology import Topology
from tests.proofs.harness import proof
from tests.proofs.parallelism.traffic import OPTIONS, difference

PODS: dict[Callable[[], RunConfig], tuple[str, ...]] = {
    llama3_8b: ("v5p:4x4x4", "v6e:8x8", "tpu7x:2x4x4", "h100:8x8"),
    llama3_70b: ("v5p:4x8x8", "v6e:16x16", "tpu7x:4x4x8", "h100:32x8"),
    llama3_405b: ("v5p:8x8x16", "4*v6e:16x16", "tpu7x:8x8x8", "h100:128x8"),
    mixtral_8x22b: ("v5p:4x8x8", "v6e:16x16", "tpu7x:4x4x8", "h100:32x8"),
    llama3_8b_1m: ("v5p:4x4x8",),
}
CASES = tuple((recipe.__name__, on) for recipe, topologies in PODS.items() for on in topologies)


def run_of(recipe: str) -> RunConfig:
    """The recipe, with the GPU compiler's options of the plans of eight."""
    make = next(make for make in PODS if make.__name__ == recipe)
    return dataclasses.replace(make(), compiler_options=OPTIONS)


@proof("parallelism", cases=CASES, sample=1, bound={"of_memory": 1.0, "traffic": 1e-3})
def pods(case: tuple[str, str]) -> dict[str, float]:
    """The share of a device's memory that the step takes, and how far what it sends is from the formula.

    Between several slices each collective becomes one inside a slice and others between them: no formula for those.
    """
    recipe, on = case
    run, topology = run_of(recipe), Topology.parse(on)
    report = compile_for(run, on)
    assert topology.hbm_bytes is not None
    traffic = difference(run, report) if topology.slices == 1 else 0.0
    return {"of_memory": report.total_bytes / topology.hbm_bytes, "traffic": traffic}
