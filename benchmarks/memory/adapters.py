"""Memory of a training step by optimizer and method of adaptation: compiled, beside the formula of ``jaxllm plan``.

    python -m benchmarks.memory.adapters [--on h100:1x1] [--optimizers adamw,lomo] [--methods full,lora]
    python -m benchmarks.memory.adapters --table             writes the table of the page alone

SmolLM2-135M in the recipe sft_smollm2 with 8 rows of 512 tokens, its layers recomputed in the backward pass, since the
layerwise optimizers need that. Nothing is run: memory is that of the arguments and the temporaries of the step compiled
for a device that need not be there. Each cell takes about half a minute; cells are kept in ``STORED`` as they are done.
CoLLiE (arXiv:2312.00407) has such tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxllm.compiler import aot
from jaxllm.files import write_json
from jaxllm.optim import OptimConfig
from jaxllm.peft import AdapterConfig
from jaxllm.plan.formulas.memory_estimate import predict
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for
from sharding import MeshSpec
from sharding.topology import Topology

ROOT = Path(__file__).resolve().parents[2]
STORED = Path(__file__).parent / "adapters.json"
PAGE = ROOT / "docs" / "train" / "adapters.md"
BEGIN, END = "<!-- memory: generated -->\n", "<!-- end -->\n"
GRID = "adamw,lion,adan,sophia,lomo,adalomo"
"""Optimizers of the table, those of the paper."""
OPTIMIZERS = tuple(GRID.split(","))
METHODS = {
    "full": AdapterConfig(),
    "lora": AdapterConfig("lora"),
    "qlora": AdapterConfig("qlora"),
    "prefix": AdapterConfig("prefix"),
    "prompt": AdapterConfig("prompt"),
}
MIB = 2**20


def run_of(optimizer: str, method: str, run: RunConfig | None = None) -> RunConfig:
    """The run of a cell.

    Args:
        run: the run without adapter, whose optimizer is replaced; None: that of the table.
    """
    if run is None:
        from recipes.sft import sft_smollm2

        run = sft_smollm2()
        run = replace(
            run,
            model=replace(run.model, remat="full"),
            data=replace(run.data, batch_size=8),
            accumulate=1,
            mesh="data=1",
        )
    optim = OptimConfig(run.optim.schedule, kind=optimizer, clip_norm=None)  # type: ignore[arg-type]
    return replace(run, optim=optim, adapter=METHODS[method])


def cell(run: RunConfig, on: str) -> dict[str, int]:
    """Bytes of a device that the compiled step takes, and those that the formula predicts."""
    report = compile_for(run, on, progress=aot.to_stderr)
    predicted = predict(run, MeshSpec.parse("data=1"), Topology.parse(on))
    return {
        "arguments": report.argument_bytes,
        "predicted arguments": predicted.arguments,
        "total": report.argument_bytes + report.temp_bytes,
        "predicted": predicted.total,
    }


def table(cells: dict[str, dict[str, int]]) -> str:
    """Table of cells by "optimizer method", in MiB."""
    lines = [
        "| optimizer | method | state, MiB | by formula | step, MiB | by formula | formula / compiled |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for optimizer in OPTIMIZERS:
        for method in METHODS:
            if (one := cells.get(f"{optimizer} {method}")) is not None:
                state, step = (
                    f"{one[own] / MIB:,.0f} | {one[formula] / MIB:,.0f}"
                    for own, formula in (("arguments", "predicted arguments"), ("total", "predicted"))
                )
                lines.append(f"| {optimizer} | {method} | {state} | {step} | {one['predicted'] / one['total']:.2f} |")
    return "\n".join(lines) + "\n"


def stored() -> dict[str, dict[str, int]]:
    """Cells of the last compilations, by "optimizer method"."""
    return json.loads(STORED.read_text()) if STORED.exists() else {}


def write_table() -> None:
    """Writes the table into its page."""
    page = PAGE.read_text()
    start = page.index(BEGIN) + len(BEGIN)
    PAGE.write_text(page[:start] + table(stored()) + page[page.index(END, start) :])


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.memory.adapters``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="h100:1x1")
    parser.add_argument("--optimizers", default=GRID)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--table", action="store_true", help="compile nothing")
    given = parser.parse_args(arguments)
    chosen: list[Any] = [given.optimizers.split(","), given.methods.split(",")]
    for names, legal in zip(chosen, (OPTIMIZERS, tuple(METHODS)), strict=True):
        if unknown := [name for name in names if name not in legal]:
            parser.error(f"{unknown[0]!r} is not one of {', '.join(legal)}.")
    for method in () if given.table else chosen[1]:
        for optimizer in chosen[0]:
            found = cell(run_of(optimizer, method), given.on)
            print(f"{given.on}, {optimizer} {method}: " + ", ".join(f"{k} {v / MIB:,.1f}" for k, v in found.items()))
            write_json(STORED, stored() | {f"{optimizer} {method}": found})
    write_table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
