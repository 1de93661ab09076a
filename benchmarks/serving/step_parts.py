"""Predicted time of steps with prompts, whole, in halves (``--overlap iso``) and in the best parts.

    python -m benchmarks.serving.step_parts [RECIPE [CLUSTER ...]]

RECIPE is llama3_8b by default, the clusters h100:1x4, a100:1x4 and v6e:2x2; all devices are tensor shards. The formulas
are those of ``jaxllm plan``; docs/serve/serving.md shows the table.
"""

from __future__ import annotations

import sys

from jaxllm.cli import find_recipe
from jaxllm.plan.formulas.serving_step import ServingStepModel
from jaxllm.plan.hardware import Cluster
from jaxllm.simulate.step_parts import best_parts, parted_step
from sharding import MeshSpec

ROWS = (512, 1024, 2048, 4096, 8192, 16384)


def main(recipe: str = "llama3_8b", *clusters: str) -> None:
    """Prints a table: a row for each cluster and number of tokens."""
    config = find_recipe(recipe)().model
    print("| devices | tokens | whole, ms | halves | best parts | tokens of each |\n|---|---:|---:|---:|---:|---|")
    for name in clusters or ("h100:1x4", "a100:1x4", "v6e:2x2"):
        cluster = Cluster.parse(name)
        model = ServingStepModel(config, cluster, MeshSpec.parse(f"tensor={cluster.devices}"))
        for rows in ROWS:
            whole, halves = parted_step(model, [rows]), parted_step(model, [rows // 2, rows - rows // 2])
            best = best_parts(model, rows)
            share = [f"{one.seconds / whole.seconds:.2f}" for one in (halves, best)]
            sizes = ", ".join(map(str, best.sizes))
            print(f"| {name} | {rows:,} | {whole.seconds * 1e3:.1f} | {' | '.join(share)} | {sizes} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
