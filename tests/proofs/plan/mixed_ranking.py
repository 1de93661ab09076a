"""Ranking of twelve layouts by layer of a mixture of experts, by formula and as compiled programs: order and memory.

    python -m tests.proofs.plan.mixed_ranking ON [NAME ...]    compiles those that are not stored, or the named ones
    python -m tests.proofs.plan.mixed_ranking table            writes the tables of PAGE

Compiled seconds are those of the compiled schedule, as in ``tests.proofs.plan.unseen``; memory is the compiler's.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxllm.compiler import aot, program_walker
from jaxllm.compiler.timeline import timeline
from jaxllm.files import write_json
from jaxllm.models import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig, MoeConfig
from jaxllm.plan.formulas import memory_estimate, step_time
from jaxllm.plan.formulas.calibration import DEFAULT
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.timeline_rates import rates_of
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for
from recipes.llama3 import llama3_8b
from sharding import MeshSpec
from sharding.topology import GIB
from tests.proofs.harness import proof
from tests.proofs.plan.ranking import kendall

STORED = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[3] / "docs/train/plan.md"
BEGIN, END = "<!-- mixed layouts: generated -->\n", "<!-- end of mixed layouts -->\n"


def _layout(mesh: str, layers: str, remat: str = "full") -> RunConfig:
    """Four dense layers before four of 16 experts, 1.2B parameters in all, on 16 rows of 4,096."""
    run = llama3_8b()
    dense = BlockConfig(AttentionConfig(heads=16, kv_heads=8, head_dim=128), MlpConfig(hidden=8192))
    model = DecoderConfig(
        vocab_size=32_768,
        embed_dim=2048,
        layers=8,
        prefix=(dense,) * 4,
        pattern=(dataclasses.replace(dense, mlp=MoeConfig(experts=16, top_k=2, hidden=2048)),),
        tied=False,
        dtype="bfloat16",
        remat=remat,
    )
    data = dataclasses.replace(run.data, seq_len=4096, batch_size=16)
    plan = dataclasses.replace(run.parallel, sequence=True, zero=3, layers=layers)
    return dataclasses.replace(run, name="mixed", model=model, data=data, mesh=mesh, parallel=plan)


CHOICES: tuple[tuple[str, ...], ...] = (
    ("expert=2,tensor=4", "tensor=4,fsdp"),
    ("expert=2,tensor=4", "fsdp=4,tensor"),
    ("expert=4,tensor=2", "fsdp=4,tensor"),
    ("expert=4,tensor=2", "tensor=4,fsdp", "full=4,elementwise=4"),
    ("expert=2,fsdp=2,tensor=2", "fsdp=4,tensor", "elementwise=4,full=4"),
    ("expert=2,fsdp=2,tensor=2", "tensor=4,fsdp"),
    ("expert=2,tensor=4", "fsdp=6,tensor", "elementwise"),
    ("fsdp=2,tensor=4", "fsdp=4,tensor"),
    ("fsdp=2,tensor=4", "tensor=4,fsdp"),
    ("fsdp=4,tensor=2", "tensor=4,fsdp", "elementwise"),
    ("tensor=8", "tensor=4,fsdp"),
    ("tensor=8", "fsdp=4,tensor"),
)
"""Mesh, layouts by layer and remat policy of each run."""
LAYOUTS = {"; ".join(choice): _layout(*choice) for choice in CHOICES}
PROGRAMS = {
    "h100:1x8": tuple(LAYOUTS),
    "v6e:2x4": ("expert=2,tensor=4; tensor=4,fsdp", "expert=2,tensor=4; fsdp=4,tensor"),
}
"""Compiled layouts of each topology: for TPUs two alone, which take four minutes of a core each, for their memory."""
QUICK = ("h100:1x8 tensor=8; tensor=4,fsdp", "h100:1x8 expert=2,fsdp=2,tensor=2; tensor=4,fsdp")
"""Compiled again by the proof."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds of a step, and bytes of a device."""

    seconds: float
    bytes: int


def predicted(on: str, name: str) -> Step:
    """A layout by formula."""
    run, cluster = LAYOUTS[name], Cluster.parse(on)
    mesh = MeshSpec.parse(run.mesh)
    memory = memory_estimate.predict(run, mesh, cluster.topology)
    return Step(step_time.predict(run, cluster, mesh).seconds, memory.total)


def compile_layout(on: str, name: str) -> dict[str, Any]:
    """Seconds and bytes of the compiled step, parts of its seconds, and versions."""
    run, cluster = LAYOUTS[name], Cluster.parse(on)
    with tempfile.TemporaryDirectory() as folder:
        report = compile_for(run, on, keep=Path(folder) / "program.json")
        text, placement = aot.kept(Path(folder) / "program.json")
    made = timeline(program_walker.read(text, placement), rates_of(cluster, MeshSpec.parse(run.mesh), DEFAULT))
    parts = {"seconds": made.seconds, "compute": made.compute, "exposed": sum(made.exposed.values())}
    return {**parts, "bytes": report.total_bytes, "jax": report.jax, "compiler": report.compiler}


def _kept() -> dict[str, dict[str, Any]]:
    return json.loads(STORED.read_text()) if STORED.is_file() else {}


def stored(on: str) -> dict[str, Step]:
    """Stored figures of the steps that were compiled for a topology."""
    return {name: Step(one["seconds"], one["bytes"]) for name, one in _kept().get(on, {}).items()}


def order(on: str) -> dict[str, float]:
    """Formulas against the stored programs: their order, what the formulas' first costs, and errors of memory."""
    said = stored(on)
    found = {name: (predicted(on, name), said[name]) for name in PROGRAMS[on]}
    compiled = [step.seconds for _, step in found.values()]
    first = min(found.values(), key=lambda pair: pair[0].seconds)[1].seconds
    memory = [abs(formula.bytes / step.bytes - 1) for formula, step in found.values()]
    return {
        "one less tau": 1 - kendall([(formula.seconds, step.seconds) for formula, step in found.values()]),
        "place of the first": 1.0 + sum(seconds < first for seconds in compiled),
        "first over best": first / min(compiled) - 1,
        "median memory": statistics.median(memory),
        "worst memory": max(memory),
    }


@proof(
    "plan",
    cases=("h100:1x8",),
    sample=1,
    bound={
        "one less tau": 0.2,
        "place of the first": 1.0,
        "first over best": 0.05,
        "median memory": 0.10,
        "worst memory": 0.20,
    },
)
def mixed_layouts_rank(on: str) -> dict[str, float]:
    """Kendall's tau of layouts by layer of a mixture, the formulas' first, and the errors of memory."""
    return order(on)


@proof("plan", cases=QUICK, sample=1, bound={"seconds": 0.02, "bytes": 0.02})
def mixed_layouts_recompiled(program: str) -> dict[str, float]:
    """A layout compiled again has the seconds and bytes that the formulas are checked against."""
    on, name = program.split(" ", 1)
    found, said = compile_layout(on, name), stored(on)[name]
    return {"seconds": abs(found["seconds"] / said.seconds - 1), "bytes": abs(found["bytes"] / said.bytes - 1)}


def table() -> str:
    """Markdown tables of all programs, the fastest by formula first, and the figures of ``order``."""
    lines: list[str] = []
    for on, names in PROGRAMS.items():
        said = stored(on)
        lines += [
            f"| mesh on `{on}` | layouts by layer | recomputation | predicted, s | compiled, s | predicted, GiB "
            "| compiled, GiB | |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name in sorted(names, key=lambda name: predicted(on, name).seconds):
            formula, step, run = predicted(on, name), said[name], LAYOUTS[name]
            lines.append(
                f"| `{run.mesh}` | `{run.parallel.layers}` | {run.model.remat} "
                f"| {formula.seconds:.3f} | {step.seconds:.3f} "
                f"| {formula.bytes / GIB:.2f} | {step.bytes / GIB:.2f} | {formula.bytes / step.bytes - 1:+.1%} |"
            )
        found = order(on)
        ranked = (
            f"Kendall's tau of the {len(names)} programs is {1 - found['one less tau']:.2f}. The layout that the "
            f"formulas rank first is number {found['place of the first']:.0f} of the compiled ones, "
            f"{found['first over best']:.1%} slower than the fastest. "
        )
        errors = f"The median error of memory is {found['median memory']:.1%}, the largest {found['worst memory']:.1%}."
        lines += ["", (ranked if len(names) > 2 else "") + errors, ""]
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with the tables in their place."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def main(arguments: list[str]) -> None:
    """Compiles layouts and stores each as it comes, or writes the tables."""
    if arguments == ["table"]:
        PAGE.write_text(with_table(PAGE.read_text()))
        return
    on, *names = arguments
    for name in names or [name for name in PROGRAMS[on] if name not in stored(on)]:
        found = compile_layout(on, name)
        kept = _kept()
        write_json(STORED, kept | {on: dict(sorted({**kept.get(on, {}), name: found}.items()))})
        print(on, name, found, "predicted", predicted(on, name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
