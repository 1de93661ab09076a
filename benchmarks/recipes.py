"""The tables in the recipes' docstrings: predicted seconds, utilisation and memory, and what compilers took.

    python -m benchmarks.recipes [--write]    prints the recipes whose table is stale; writes them anew

A table's rows name its topologies; figures are those of `jaxllm plan RECIPE --on TOPOLOGY --as-is --no-compile`, and
"compiled" those of the stored programs of proofs. A test holds tables to this command.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxllm.models import functional
from jaxllm.plan import layout_search
from jaxllm.plan.hardware import Cluster
from jaxllm.train import RunConfig
from jaxllm.train.run import fitting_mesh
from sharding.topology import GIB

ROOT = Path(__file__).resolve().parent.parent
ROW = re.compile(r"^    \| ((?:\d+\*)?[a-z]\w*:[\dx]+) +(?:\| +[\d.-]+ ){5}\|$", re.MULTILINE)


def recipes() -> dict[str, Callable[[], RunConfig]]:
    """All of them, by name, as pyproject.toml lists them."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["jaxllm.recipes"]
    places = {name: place.split(":") for name, place in listed.items()}
    return {name: getattr(importlib.import_module(module), attr) for name, (module, attr) in places.items()}


@dataclasses.dataclass(frozen=True)
class Row:
    """A recipe on a topology.

    Attributes:
        seconds, mfu, gib: of a step, per cent of the peak, memory of a device; predicted.
        compiled: memory of a device by its compiler; None if it was never compiled there.
        of: what there is, GiB.
    """

    on: str
    seconds: float
    mfu: float
    gib: float
    compiled: float | None
    of: float

    def __str__(self) -> str:
        compiled = "-" if self.compiled is None else f"{self.compiled:.1f}"
        digits = 3 if self.seconds < 100 else 1
        predicted = f"{self.seconds:>6.{digits}f} | {self.mfu:>5.1f} | {self.gib:>4.1f}"
        return f"    | {self.on:<11} | {predicted} | {compiled:>8} | {self.of:>5.1f} |"


def topologies(recipe: Callable[[], RunConfig]) -> list[str]:
    """Those in the recipe's table."""
    return ROW.findall(recipe.__doc__ or "")


def predicted(recipe: Callable[[], RunConfig], on: str) -> Row:
    """The row of a table, by formula and records."""
    run, cluster = recipe(), Cluster.parse(on)
    mesh = fitting_mesh(run, functional(run.model, run.parallel.rules()), cluster.devices)
    layout = layout_search.predict_layout(run, mesh, cluster)
    size = compiled().get((recipe.__name__, on))
    return Row(
        on,
        layout.time.seconds,
        100 * layout.time.mfu(cluster.hardware.flops),
        layout.memory.total / GIB,
        None if size is None else size / GIB,
        cluster.hardware.hbm_bytes / GIB,
    )


def compiled() -> dict[tuple[str, str], int]:
    """(recipe, topology) -> bytes of a device, of recipes as they are.

    From the stored programs of the proof ``hbm``, and of ``pods`` where there is none.
    """
    found = {(recipe, on): round(errors["of_memory"] * _hbm(on)) for recipe, on, errors in _records()}
    for name, said in json.loads((ROOT / "tests/proofs/plan/points.json").read_text()).items():
        recipe, _, on = name.rpartition(" ")
        if ":" in on:
            found[recipe, on] = said["total"]
    return found


def _hbm(on: str) -> int:
    return Cluster.parse(on).hardware.hbm_bytes


def _records() -> Iterator[tuple[str, str, dict[str, float]]]:
    places = {"deepseek_v3": "v5p:8x8x8", "qwen3_235b_a22b": "v5p:4x8x8"}
    for issue in ("parallelism", "moe_models", "front"):
        path = ROOT / f"docs/proofs/{issue}.json"
        cases = json.loads(path.read_text())["cases"] if path.is_file() else []
        for name, errors in next((case["each"] for case in cases if case["name"] == "pods"), {}).items():
            recipe, program = name.split(" / ")
            if program != "forward":
                yield recipe, places.get(recipe, program) if program == "train" else program, errors


def main(write: bool) -> int:
    """Prints what is stale; returns how many recipes are."""
    stale = 0
    for name, recipe in recipes().items():
        path = ROOT / Path(*recipe.__module__.split(".")).with_suffix(".py")
        before = recipe.__doc__ or ""
        rows = {row.on: str(row) for row in (predicted(recipe, on) for on in topologies(recipe))}
        after = ROW.sub(lambda found, rows=rows: rows[found[1]], before)
        if after == before:
            continue
        stale += 1
        print(f"{name}\n" + "\n".join(rows.values()))
        if write:
            source = path.read_text()
            assert source.count(before) == 1, f"{path}: the docstring of {name} is not there once"
            path.write_text(source.replace(before, after))
    return stale


if __name__ == "__main__":
    write = "--write" in sys.argv[1:]
    raise SystemExit(bool(main(write)) and not write)
