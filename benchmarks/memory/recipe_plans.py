"""Plans of recipes under memory limits: what the solver chose, beside every policy for all layers, by the compilers.

    python -m benchmarks.memory.recipe_plans --list
    python -m benchmarks.memory.recipe_plans --unit 3

A unit is a recipe, a topology and a limit of device memory. Its compiled bytes are kept in
``docs/train/recipe_plans.json`` as they come, so that a run which is stopped resumes, and the tables in
``docs/train/recipe_plans.md`` are written from them. A compilation takes minutes for the larger recipes. A policy that
recomputes less than the solution is compiled to show that it does not fit, unless it is larger than the limit by more
than ``CERTAIN`` by the solver's sizes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

from jaxllm.cli.memory_budget import FIT_SHARE, measured_for, with_remat
from jaxllm.cli.recipe_arguments import configure, find_recipe
from jaxllm.files import write_json
from jaxllm.models.remat import RematError
from jaxllm.parallel.sharding_table_view import columns
from jaxllm.plan.graphs.block_graph import block_graphs, value_bytes
from jaxllm.plan.remat_solver import NAMED, StepBytes, places_bytes, saved_bytes, solve, value_sizes
from jaxllm.train import RunConfig
from jaxllm.train.model_flops import hardware_flops_per_token, train_flops_per_token
from jaxllm.train.run import fitting_mesh
from jaxllm.train.run_model import run_model
from sharding.topology import Topology

RESULTS = Path("docs/train/recipe_plans.json")
PAGE = Path("docs/train/recipe_plans.md")
CERTAIN = 1.1
"""Predicted bytes over the limit beyond which a policy is not compiled."""
GPU = "h100:1x1"
"""Topology that a single GPU of 24 GB is compiled for: the compiler has no smaller one, the limit is 24 GB."""


class RecipePlan(NamedTuple):
    """Unit of the table.

    Attributes:
        recipe: recipe.
        on: topology.
        limit: GiB of a device; 0 for 95% of what it has.
        settings: further settings of the run.
    """

    recipe: str
    on: str
    limit: float = 0.0
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name in the results."""
        return " ".join([self.recipe, self.on, f"{self.limit:g}" if self.limit else "fit", *self.settings])

    def budget(self) -> int:
        """Bytes of a device."""
        if self.limit:
            return int(self.limit * 2**30)
        found = Topology.parse(self.on).hbm_bytes
        assert found is not None, "a topology of an accelerator"
        return int(FIT_SHARE * found)

    def run(self) -> RunConfig:
        """The run."""
        return configure(find_recipe(self.recipe), [*self.settings], prog="recipe_plans")


UNITS = (
    *(RecipePlan("llama3_1b", on, limit) for on, limit in (("v5e:8x8", 5.0), ("v6e:8x8", 6.0), ("h100:1x8", 24.0))),
    *(RecipePlan("llama3_8b", on, limit) for on, limit in (("v5e:8x8", 10.0), ("v6e:8x8", 0.0), ("h100:1x8", 0.0))),
    *(RecipePlan("qwen3_30b_a3b", on) for on in ("v5e:8x8", "v6e:8x8")),
    RecipePlan("gpt2_124m", GPU, 22.3, ("--data.batch-size", "128")),
    RecipePlan("llama3_1b", GPU, 22.3, ("--data.batch-size", "1", "--data.seq-len", "4096")),
    RecipePlan("sft_smollm2", GPU, 22.3, ("--data.batch-size", "16")),
)
"""Recipes on pods of TPUs, a server of GPUs and one GPU of 24 GB (22.3 GiB)."""


def plan_unit(unit: RecipePlan, results: Path = RESULTS) -> dict[str, object]:
    """Solution of a unit and the uniform policies beside it; compiled bytes are read from and written to ``results``.

    Returns:
        "budget", "chosen", "recomputed" FLOPs per token of each policy, and its "compiled" or "predicted" bytes; where
        nothing fits, "chosen" is empty.
    """
    everything = json.loads(results.read_text()) if results.exists() else {}
    own = everything.setdefault(unit.name, {"compiled": {}})
    compiled: dict[str, int] = own["compiled"]
    run, topology, budget = unit.run(), Topology.parse(unit.on), unit.budget()

    def measure(remat: str) -> StepBytes:
        if remat not in compiled:
            compiled[remat] = measured_for(with_remat(run, remat), unit.on).device
            write_json(results, everything)
            print(f"{unit.name}: {remat} {compiled[remat] / 2**30:.3f} GiB", flush=True)
        return StepBytes(compiled[remat])

    mesh = fitting_mesh(run, run_model(run), topology.num_devices, topology.platform)
    blocks = block_graphs(run, mesh)
    widths = value_bytes(blocks) if blocks else None
    model, seq_len = run.model, run.data.seq_len
    plain = train_flops_per_token(model, seq_len)

    def again(remat: str) -> float:
        return hardware_flops_per_token(dataclasses.replace(model, remat=remat), seq_len) - plain

    chosen, predicted = "", dict[str, int]()
    try:
        solved = solve(run, budget, measure, None, widths)
    except RematError as nothing_fits:
        print(nothing_fits)
    else:
        chosen, base = solved.remat, solved.named["full"].bytes
        sizes = {name: (one.bytes - base) / model.layers for name, one in solved.named.items()}
        values = value_sizes(model, sizes, widths)
        for remat in saved_bytes(model, sizes, seq_len, widths):
            here = base + model.layers * places_bytes(remat, values)[0]
            if again(remat) < again(chosen) and here <= CERTAIN * budget:
                measure(remat)
            elif remat not in compiled:
                predicted[remat] = round(here)
    own |= {
        "budget": budget,
        "chosen": chosen,
        "predicted": predicted,
        "recomputed": {remat: again(remat) for remat in (*compiled, *predicted)},
    }
    if everything != (json.loads(results.read_text()) if results.exists() else {}):
        write_json(results, everything)
    return own


def planned(name: str, results: Path = RESULTS) -> bool:
    """Whether a unit was planned to the end."""
    return results.exists() and "chosen" in json.loads(results.read_text()).get(name, {})


def table(name: str, own: dict) -> str:
    """Table of a unit: policies for all layers and mixtures that were compiled, from the least bytes to the most."""
    size = own["compiled"] | own["predicted"]
    rows = [
        (
            remat,
            f"{size[remat] / 2**30:.2f}" + ("" if remat in own["compiled"] else " *"),
            "yes" if size[remat] <= own["budget"] else "no",
            f"{own['recomputed'][remat] / 1e9:.3f}",
            "chosen" if remat == own["chosen"] else "",
        )
        for remat in sorted(size, key=lambda remat: size[remat])
    ]
    head = ("model.remat", "GiB", "fits", "GFLOP again per token", "")
    nothing = "" if own["chosen"] else ": nothing fits, and the plan is refused"
    return f"{name}, at most {own['budget'] / 2**30:.2f} GiB{nothing}\n\n    " + columns(head, rows, "<>>><").replace(
        "\n", "\n    "
    )


def page(results: Path = RESULTS) -> str:
    """Page of all units in ``results`` that were planned to the end."""
    found = {name: own for name, own in json.loads(results.read_text()).items() if "chosen" in own}
    missing = [one.name for one in UNITS if one.name not in found]
    return "\n\n".join(
        [
            "# Plans of recipes",
            "Written by `python -m benchmarks.memory.recipe_plans`: for each recipe, topology and memory limit the "
            "remat policies that `--within` chose, and beside them every policy for all layers that keeps more or "
            "recomputes less than others. Bytes of a device are compiled; those with a star are the solver's, of "
            "policies that recompute more than the chosen ones, or that are more than 10% too large.",
            *(f"## {name.partition(',')[0]}\n\n{table(name, own)}" for name, own in found.items()),
            f"Not run yet: {'; '.join(missing) or 'none'}.\n",
        ]
    )


def problems(own: dict) -> list[str]:
    """Conditions that a unit does not meet: it is over the limit, or a policy for all layers fits and recomputes less,
    or it uses less than 95% of the limit though something is computed again. The last is allowed where what is left is
    less than mixtures that recompute less took beyond the sum of their parts: a loop more takes memory of its own
    (docs/train/recomputation.md). Of a unit where nothing was chosen: a policy fits, or was not compiled.
    """
    chosen, budget = own["chosen"], own["budget"]
    if not chosen:
        fits = {name: own["compiled"].get(name, 0) <= budget for name in NAMED}
        return [f"{name} fits or was not compiled, and nothing was chosen" for name, one in fits.items() if one]
    bytes_, again = own["compiled"][chosen], own["recomputed"]
    found = [f"{chosen} takes {bytes_:,} bytes of {budget:,}"] if bytes_ > budget else []
    faster = [remat for remat in own["compiled"] if "=" in remat and again[remat] < again[chosen]]
    of_a_loop = min((excess(own, remat) for remat in faster), default=0.0)
    if again[chosen] and bytes_ + max(0.0, of_a_loop) < 0.95 * budget:
        found.append(f"{chosen} uses {bytes_ / budget:.3f} of the limit")
    found += [
        f"{remat} fits and recomputes no more than {chosen}"
        for remat, size in own["compiled"].items()
        if remat != chosen and size <= budget and (again[remat] < again[chosen])
    ]
    return found


def excess(own: dict, remat: str) -> float:
    """Bytes that a mixture takes beyond the sum of its parts, by those of its policies for all layers."""
    sizes = own["compiled"] | own["predicted"]
    parts = [(name, int(count)) for name, _, count in (one.rpartition("=") for one in remat.split(","))]
    return own["compiled"][remat] - sum(count * sizes[name] for name, count in parts) / sum(n for _, n in parts)


def main() -> None:
    """Plans a unit, or lists them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit", type=int, action="append", default=[], help="number of a unit; may be repeated")
    parser.add_argument("--list", action="store_true", help="list the units")
    args = parser.parse_args()
    if args.list or not args.unit:
        print("\n".join(f"{i:2} {one.name}" for i, one in enumerate(UNITS)))
        return
    for i in args.unit:
        own = plan_unit(UNITS[i])
        PAGE.write_text(page())
        print(table(UNITS[i].name, own))
        print("\n".join(problems(own)) or "all conditions hold", flush=True)


if __name__ == "__main__":
    main()
