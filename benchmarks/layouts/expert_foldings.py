"""Folded experts beside experts on attention's own layout: programs compiled for four platforms, and published MFU.

    python -m benchmarks.layouts.expert_foldings [--only PATTERN ...]    compiles; writes STORED and the tables
    python -m benchmarks.layouts.expert_foldings --table                 writes the tables alone

A pair of programs is one training step of one model on one mesh: experts as attention lies, their width split over
``tensor``, and folded, whole experts over ``expert`` and ``tensor``. Nothing is run. Bytes are those that a device's
collectives move in a step, as whole arrays (``jaxllm.compiler.collectives``); cycles are the TPU compiler's estimates,
in which Pallas kernels and waiting for collectives are missing.

The second table has the rows of the paper (MoE Parallel Folding, arXiv:2504.14960, tables 1, 3 and 4): sequences of
4,096, a global batch of 256, micro-batches of one row, on H100.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxllm.compiler import aot
from jaxllm.files import write_json
from jaxllm.models import AttentionConfig, BlockConfig, MoeConfig, RopeConfig
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.plan.formulas import step_time
from jaxllm.plan.hardware import Cluster
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for
from recipes._pretraining import decoder, pretraining
from recipes.deepseek import deepseek_v3
from recipes.mixtral import mixtral_8x22b
from recipes.qwen import qwen3_235b_a22b
from sharding import MeshSpec
from sharding.topology import GIB

STORED = Path(__file__).parent / "expert_foldings.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "compiled.md"
BEGIN, END = "<!-- foldings: generated -->\n", "<!-- end of foldings -->\n"
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


class Pair(NamedTuple):
    """A model, with a mesh and a folding.

    Attributes:
        run: the recipe.
        mesh: of all devices.
        folding: ``parallel.experts``.
        on: topologies with as many devices as the mesh.
    """

    run: Callable[[], RunConfig]
    mesh: str
    folding: str
    on: tuple[str, ...]

    def of(self, folded: bool) -> RunConfig:
        """The run with experts folded or not; full recomputation, one row a micro-batch of each four devices."""
        run = self.run()
        plan = ParallelConfig(sequence=True, experts=self.folding if folded else "")
        return dataclasses.replace(run, mesh=self.mesh, parallel=plan, accumulate=4)


_256 = ("v5p:4x8x8", "v6e:16x16", "tpu7x:4x4x8", "h100:32x8")
PAIRS = {
    "Mixtral 8x22B": Pair(mixtral_8x22b, "fsdp=32,expert=2,tensor=4", "expert=8", _256),
    "Qwen3 235B-A22B": Pair(qwen3_235b_a22b, "fsdp=16,expert=4,tensor=4", "expert=16", _256),
    "DeepSeek-V3": Pair(
        deepseek_v3,
        "fsdp=16,expert=8,tensor=4",
        "expert=32",
        ("v5p:8x8x8", "2*v6e:16x16", "tpu7x:4x8x8", "h100:64x8"),
    ),
}


class Published(NamedTuple):
    """Row of the paper: MFU with experts folded and not.

    Attributes:
        run: the model on the row's devices.
        on: H100 nodes.
        mesh, folding: of ours, with the paper's degrees; experts that are not folded split their width over ``tensor``.
        unfolded: mesh without folding, that of the paper's best row.
        mfu, mfu_unfolded: published, per cent.
    """

    run: Callable[[], RunConfig]
    on: str
    mesh: str
    folding: str
    unfolded: str
    mfu: float
    mfu_unfolded: float

    def of(self, folded: bool) -> RunConfig:
        """The run, with experts folded or not, micro-batches of one row and 1F1B."""
        run, mesh = self.run(), self.mesh if folded else self.unfolded
        sizes = dict(MeshSpec.parse(mesh).axes)
        rows = 256 // (sizes.get("data", 1) * sizes.get("expert", 1))
        plan = ParallelConfig(sequence=True, zero=1, schedule="1f1b", experts=self.folding if folded else "")
        model = dataclasses.replace(run.model, remat="elementwise")
        data = dataclasses.replace(run.data, batch_size=256, seq_len=4096)
        return dataclasses.replace(run, mesh=mesh, model=model, data=data, parallel=plan, accumulate=rows)


def fine_mixtral() -> RunConfig:
    """Mixtral 8x22B with each expert cut into eight, of which eight are chosen (8x22B-G8T8)."""
    run = mixtral_8x22b()
    block = run.model.pattern[0]
    assert isinstance(block, BlockConfig)
    fine = dataclasses.replace(block, mlp=MoeConfig(experts=64, top_k=8, hidden=2048))
    return dataclasses.replace(run, model=dataclasses.replace(run.model, pattern=(fine,)))


def qwen2_57b() -> RunConfig:
    """Qwen2-57B-A14B: 64 experts of which 8 are chosen, and a shared one."""
    attention = AttentionConfig(heads=28, kv_heads=4, head_dim=128, rope=RopeConfig(theta=1_000_000.0), bias="qkv")
    experts = MoeConfig(experts=64, top_k=8, hidden=2560, shared=20480)
    model = decoder(151_936, 3584, 28, BlockConfig(attention, experts))
    return pretraining("qwen2_57b_a14b", model, seq_len=4096, rows=256, peak=2e-4, mesh="fsdp")


PUBLISHED = {
    "Mixtral 8x22B": Published(
        mixtral_8x22b,
        "h100:16x8",
        "stage=8,data=2,expert=4,tensor=2",
        "expert=8",
        "stage=8,data=2,expert=4,tensor=2",
        49.3,
        46.3,
    ),
    "Qwen2-57B-A14B": Published(
        qwen2_57b,
        "h100:8x8",
        "stage=4,data=4,expert=2,tensor=2",
        "expert=4",
        "stage=4,data=2,expert=4,tensor=2",
        39.0,
        35.3,
    ),
    "Mixtral 8x22B-G8T8": Published(
        fine_mixtral,
        "h100:16x8",
        "stage=8,data=2,expert=2,tensor=4",
        "expert=8",
        "stage=8,expert=8,tensor=2",
        28.8,
        17.1,
    ),
}
"""The paper's rows. Assumed: nothing is dropped, while its capacity factor of 1 drops rows; activations are those that
``remat = "elementwise"`` keeps; stages are not interleaved.
"""


def predicted_mfu(row: Published, folded: bool) -> float:
    """Model FLOPs utilisation by formula, per cent."""
    run, cluster = row.of(folded), Cluster.parse(row.on)
    return 100 * step_time.predict(run, cluster, MeshSpec.parse(run.mesh)).mfu(cluster.hardware.flops)


def figures(report: aot.CompileReport) -> dict:
    """Figures of a compiled step that are stored."""
    sent = Counter[str]()
    for one in report.collectives:
        sent[one.kind.removeprefix("ragged-")] += one.total_bytes
    return {
        "bytes": dict(sorted(sent.items())),
        "cycles": report.cycles,
        "memory": report.argument_bytes + report.temp_bytes,
        "jax": report.jax,
        "compiler": report.compiler,
    }


def stored() -> dict[str, dict]:
    """Stored figures by name, "MODEL / TOPOLOGY / unfolded"."""
    return json.loads(STORED.read_text()) if STORED.exists() else {}


def compiled_table(found: dict[str, dict]) -> str:
    """Markdown table of the pairs that are stored, folded beside unfolded."""
    lines = [
        "| model, mesh, folding | on | "
        + " | ".join(f"{kind} GiB" for kind in KINDS)
        + " | M cycles | GiB of a device |",
        "| --- | --- |" + " ---: |" * (len(KINDS) + 2),
    ]
    for model, pair in PAIRS.items():
        for on in pair.on:
            names = [name_of(model, on, folded) for folded in (False, True)]
            if not set(names) <= set(found):
                continue
            rows = [found[name] for name in names]
            cells = [both([row["bytes"].get(kind, 0) / GIB for row in rows], 1) for kind in KINDS]
            cells += [both([row["cycles"] and row["cycles"] / 1e6 for row in rows], 0)]
            cells += [both([row["memory"] / GIB for row in rows], 1)]
            lines.append(f"| {model}, `{pair.mesh}`, `{pair.folding}` | {on} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def both(figures: list[float | None], digits: int) -> str:
    """Cell with the figure without folding and that with it; "-" where the compiler says none."""
    return " -> ".join("-" if one is None else f"{one:,.{digits}f}" for one in figures)


def published_table() -> str:
    """Markdown table of the paper's rows beside the predictions."""
    lines = [
        "| model | on | unfolded: published MFU | predicted | folded: published MFU | predicted |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, row in PUBLISHED.items():
        cells = f"{row.mfu_unfolded} | {predicted_mfu(row, False):.1f} | {row.mfu} | {predicted_mfu(row, True):.1f}"
        lines.append(f"| {name} | {row.on} | {cells} |")
    return "\n".join(lines) + "\n"


def name_of(model: str, on: str, folded: bool) -> str:
    """Name of a program in STORED."""
    return f"{model} / {on} / {'folded' if folded else 'unfolded'}"


def tables() -> str:
    """Both, as the page has them."""
    return f"{compiled_table(stored())}\n{published_table()}"


def write_tables() -> None:
    """Renews the tables of the page."""
    page = PAGE.read_text()
    start = page.index(BEGIN) + len(BEGIN)
    PAGE.write_text(page[:start] + tables() + page[page.index(END, start) :])


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.layouts.expert_foldings``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PATTERN", default=["*"], help="programs, by name")
    parser.add_argument("--table", action="store_true", help="compile nothing")
    given = parser.parse_args(arguments)
    programs = {
        name_of(model, on, folded): (pair.of(folded), on)
        for model, pair in PAIRS.items()
        for on in pair.on
        for folded in (False, True)
    }
    wanted = [name for name in programs if any(fnmatch.fnmatch(name, pattern) for pattern in given.only)]
    if not wanted:
        parser.error(f"no program is called {' or '.join(given.only)}; there are: {'; '.join(programs)}.")
    for name in () if given.table else wanted:
        run, on = programs[name]
        report = compile_for(run, on, progress=aot.to_stderr, anyway=True)
        print(f"{name}: {figures(report)}, {report.compile_seconds:.0f} s to compile", flush=True)
        write_json(STORED, stored() | {name: figures(report)})
    write_tables()
    return 0


if __name__ == "__main__":
    sys.exit(main())
