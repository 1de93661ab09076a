"""``jaxllm train``: trains a recipe."""

from __future__ import annotations

from jaxllm.cli.recipe_arguments import find_recipe, recipe_summary, recipes, run_recipe


def train(argv: list[str]) -> int:
    """Train a model: `jaxllm train RECIPE [--setting value ...]`; resumes a stopped run."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: jaxllm train RECIPE [--setting value ...]\n")
        print("RECIPE is one of these, or FILE.py:FUNCTION, a function that returns a RunConfig:\n")
        names = sorted(recipes())
        width = max(map(len, names))
        for name in names:
            print(f"  {name:{width}} {recipe_summary(name)}")
        print("\n`jaxllm train RECIPE --help` lists every setting with the recipe's value.")
        print("`--sources FILE` trains on a sources table, such as `jaxllm data mix` writes: docs/train/data.md.")
        print("`--mesh auto` takes the layout that `jaxllm plan` ranks first for these devices: docs/train/plan.md.")
        print("`--replan STEP:MESH` changes the mesh after so many steps: docs/train/plan.md.")
        print("`--precision NAME` sets all settings of a precision preset: docs/train/precision.md.")
        print("`--within SIZE`, `--fit`: what layers keep and compute again: docs/train/recomputation.md.")
        print("`--disk DIR:SIZE` keeps the optimizer state in files: docs/train/recomputation.md.")
        print("`--elastic` goes on with the processes left when one fails: docs/train/elastic.md.")
        print("`--together FILE` trains several adapters of one base in one step: docs/train/adapters.md.")
        return 0
    return run_recipe(find_recipe(argv[0]), argv[1:], prog=f"jaxllm train {argv[0]}")
