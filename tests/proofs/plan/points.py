"""Thirty runs on topologies, dense, mixtures, long rows; points.json has the compilers' figures.

    python -m tests.proofs.plan.points [NAME ...]    compiles those that are not stored, or the named ones again
    python -m tests.proofs.plan.points table         writes the table of PAGE

This is also the list of what each recipe's step takes, in memory and in time to compile: compiling a point again says
what has become more, and its difference in git is the regression.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxllm.compiler.aot import CompileReport
from jaxllm.config import from_dict, to_dict
from jaxllm.files import write_json
from jaxllm.plan.formulas import memory_estimate
from jaxllm.plan.hardware import Cluster
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for, step_on
from recipes.llama3 import llama3_8b
from sharding import MeshSpec
from sharding.isolate import run_isolated
from sharding.topology import GIB, Topology
from tests.proofs.moe_models.pods import RECIPES
from tests.proofs.parallelism.pods import CASES, run_of
from tests.proofs.pipeline.programs import PODS as STAGED

STORED = Path(__file__).with_suffix(".json")
RECORDS = Path(__file__).parents[3] / "docs/proofs"
PAGE = Path(__file__).parents[3] / "docs/train/plan.md"
BEGIN, END = "<!-- points: generated -->\n", "<!-- end of points -->\n"


@dataclasses.dataclass(frozen=True)
class Point:
    """A run on a topology."""

    run: RunConfig
    on: str


def _point(recipe: Callable[[], RunConfig], on: str, mesh: str = "", rows: int = 0, **changes: Any) -> Point:
    """A recipe with another mesh, batch, row, or fields of its model (``model_*``) and plan (``parallel_*``)."""
    run = recipe()
    data = dataclasses.replace(
        run.data,
        batch_size=rows or run.data.batch_size,
        seq_len=changes.pop("seq_len", run.data.seq_len),
    )
    parts = {name: getattr(run, name) for name in ("model", "parallel")}
    for name in list(changes):
        part, _, field = name.partition("_")
        if part in parts:
            parts[part] = dataclasses.replace(parts[part], **{field: changes.pop(name)})
    return Point(dataclasses.replace(run, data=data, mesh=mesh or run.mesh, **parts, **changes), on)


OWN = {
    "8b fsdp tensor v6e": _point(llama3_8b, "v6e:8x8", "fsdp=16,tensor=4", parallel_sequence=True),
    "8b elementwise h100": _point(llama3_8b, "h100:8x8", model_remat="elementwise"),
    "8b none h200": _point(llama3_8b, "h200:8x8", model_remat="none"),
    "8b accumulate h100": _point(llama3_8b, "h100:8x8", rows=256, accumulate=4),
    "8b zero2 h200": _point(llama3_8b, "h200:1x8", "fsdp=8", rows=32, accumulate=4, parallel_zero=2),
    "8b data h100": _point(llama3_8b, "h100:8x8", "data=8,fsdp=8"),
}
"""Of other kinds than the recipes' own plans."""


def _pods() -> Iterator[tuple[str, Point]]:
    """The programs of the proofs ``pods``, whose records have their memory."""
    for recipe, on in CASES:
        yield f"{recipe} {on}", Point(run_of(recipe), on)
    for recipe, (make, on, _) in RECIPES.items():
        yield f"{recipe} {on}", Point(make(), on)
    for pod in STAGED:
        yield f"{pod.recipe.__name__} staged {pod.on}", Point(pod.run(), pod.on)


POINTS = {**OWN, **dict(_pods())}


@dataclasses.dataclass(frozen=True)
class Said:
    """Memory of a point by the compiler, bytes of one device.

    Attributes:
        arguments: by ``compile_arguments``, which the compiler of a whole step agrees with.
        total: of a step.
        jax, compiler: versions; of a total that the record of a proof ``pods`` has, the record's commit.
        compile_seconds: on two cores with much else to do; 0 for a record.
    """

    arguments: int
    total: int
    jax: str
    compiler: str
    compile_seconds: float

    @classmethod
    def of(cls, report: CompileReport) -> Said:
        """Figures of a compile report."""
        seconds = round(report.compile_seconds, 1)
        return cls(report.argument_bytes, report.total_bytes, report.jax, report.compiler, seconds)


def stored() -> dict[str, Said]:
    """Stored compiler figures, by point."""
    return {name: Said(**said) for name, said in _read().items()}


def _records() -> dict[str, Said]:
    """Totals in the records of ``pods``."""
    out = {}
    for issue in ("parallelism", "moe_models", "pipeline"):
        cases = json.loads((RECORDS / f"{issue}.json").read_text())["cases"]
        record = next(case for case in cases if case["name"] == "pods")
        jax = record["versions"]["jax"]
        for name, errors in record["each"].items():
            if point := _named(name):
                hbm = Topology.parse(POINTS[point].on).hbm_bytes
                assert hbm is not None
                out[point] = Said(
                    compile_arguments(point),
                    round(errors["of_memory"] * hbm),
                    jax,
                    f"record {record['commit'][:7]}",
                    0.0,
                )
    return out


def _named(record: str) -> str | None:
    """The point of a record's case."""
    if record.endswith(" / forward"):
        return None
    if record.endswith(" / train"):
        recipe = record.removesuffix(" / train")
        return f"{recipe} {RECIPES[recipe][1]}"
    if " on " in record:
        recipe, _, rest = record.partition(" on ")
        return f"{recipe} staged {rest.split(',')[0]}"
    return record.replace(" / ", " ")


def compile_point(name: str) -> CompileReport:
    """The compiler's word on a point, now."""
    point = POINTS[name]
    return compile_for(point.run, point.on)


def compile_arguments(name: str) -> int:
    """Bytes of a step's arguments as its compiler lays them out: of a program that takes them and no more."""
    point = POINTS[name]
    return run_isolated("tests.proofs.plan.points:arguments_here", point.on, {"config": to_dict(point.run)})


def arguments_here(topology: Topology, config: dict[str, Any]) -> int:
    """``compile_arguments`` in a process set up for the topology's compiler."""
    _, arguments, mesh = step_on(topology, from_dict(RunConfig, config))
    with jax.set_mesh(mesh):
        program = jax.jit(lambda *taken: jax.tree.leaves(taken)[0], keep_unused=True).lower(*arguments).compile()
    memory: Any = program.memory_analysis()
    return memory.argument_size_in_bytes


def _read() -> dict[str, Any]:
    return json.loads(STORED.read_text()) if STORED.is_file() else {}


def predicted(name: str) -> memory_estimate.MemoryEstimate:
    """Predicted memory of a point."""
    point = POINTS[name]
    cluster = Cluster.parse(point.on)
    mesh = MeshSpec.parse(point.run.mesh).resolve(cluster.devices)
    return memory_estimate.predict(point.run, mesh, cluster.topology)


def table() -> str:
    """Markdown table of all points by formula and by the compiler, and their errors."""
    rows = [
        "| run | mesh | on | arguments, GiB | predicted | total, GiB | predicted | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    errors = []
    for name, said in stored().items():
        point, found = POINTS[name], predicted(name)
        errors.append(found.total / said.total - 1)
        sizes = [f"{size / GIB:.3f}" for size in (said.arguments, found.arguments)]
        sizes += [f"{size / GIB:.2f}" for size in (said.total, found.total)]
        cells = (
            name.removesuffix(f" {point.on}"),
            f"`{point.run.mesh}`",
            f"`{point.on}`",
            *sizes,
            f"{errors[-1]:+.1%}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    rows += [
        "",
        f"The median error is {statistics.median(map(abs, errors)):.1%}, the largest {max(map(abs, errors)):.1%}.",
    ]
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """The page with the table in its place."""
    start = page.index(BEGIN) + len(BEGIN)
    return page[:start] + table() + page[page.index(END, start) :]


def main(names: list[str]) -> None:
    """Compiles points and stores each report as it comes."""
    if names == ["table"]:
        PAGE.write_text(with_table(PAGE.read_text()))
        return
    if names == ["records"]:
        found = {name: dataclasses.asdict(said) for name, said in _records().items()}
        write_json(STORED, dict(sorted({**found, **_read()}.items())))
        return
    for name in names or [name for name in POINTS if name not in _read()]:
        said, before = Said.of(compile_point(name)), stored().get(name)
        write_json(STORED, dict(sorted({**_read(), name: dataclasses.asdict(said)}.items())))
        change = f", {said.total / before.total - 1:+.1%}" if before is not None else ""
        print(f"{name}: {said.total / 2**30:.2f} GiB{change}, in {said.compile_seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
