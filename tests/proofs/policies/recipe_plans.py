"""Plans of recipes under memory limits, by the compilers; single values against sets of groups, by the graph."""

from __future__ import annotations

import itertools

import numpy as np

from benchmarks.memory.recipe_plans import UNITS, plan_unit, planned, problems
from jaxllm.cli.recipe_arguments import find_recipe
from jaxllm.models.remat import GROUPS, save_policy
from jaxllm.plan.graphs.block_graph import block_graphs
from jaxllm.train.run import fitting_mesh
from jaxllm.train.run_model import run_model
from sharding.topology import Topology
from tests.proofs.harness import proof

ALSO_COVERS = ("docs/train/recipe_plans.json",)
NAMES = [one.name for one in UNITS]
ON = "v6e:8x8"


@proof("policies", cases=NAMES, sample=1, quick=[name for name in NAMES if planned(name)])
def recipe_plans(name: str) -> None:
    """Compiled bytes of the solution are within the limit, and no policy for all layers that fits recomputes less.
    Where something is computed again they use 95% of the limit, or leave less than mixtures that recompute less take
    beyond the sum of their parts. Where nothing was chosen, no policy fits. Bytes in docs/train/recipe_plans.json are
    not compiled again.
    """
    assert problems(plan_unit(UNITS[NAMES.index(name)])) == []


@proof(
    "policies",
    cases=["llama3_1b", "llama3_8b", "qwen3_30b_a3b", "gpt2_124m"],
    sample=1,
    bound={"over the groups": 0.0, "of the groups": 0.95},
)
def single_values_recompute_less(recipe: str) -> dict[str, float]:
    """FLOPs that a block's traced graph recomputes with the best set of single values, over those with the best of the
    15 sets of four groups in as many bytes: the most for 20 budgets, and the mean.
    """
    run, topology = find_recipe(recipe)(), Topology.parse(ON)
    block = block_graphs(run, fitting_mesh(run, run_model(run), topology.num_devices, topology.platform))[-1]
    names = ("qkv", "attention", "residual", "inner")
    kept = [some for n in range(5) for some in itertools.combinations(names, n)]
    sets = [save_policy(one for name in some for one in GROUPS.get(name, (name,))) for some in kept]
    groups = [own for policy in sets if (own := block.kept_by(policy)) is not None]
    ratios: list[float] = []
    most = max(own.bytes for own in groups)
    for room in np.linspace(0, most, 21)[1:]:
        best = min(own.time for own in groups if own.bytes <= room)
        single = block.kept_by(block.best(int(room)))
        assert single is not None
        assert single.bytes <= room
        ratios.append(single.time / best if best else float(single.time > 0))
    below = [f"{one:.2f}" for one in ratios]
    print(f"{recipe}: {', '.join(below)}")
    return {"over the groups": max(0.0, max(ratios) - 1), "of the groups": float(np.mean(ratios))}
