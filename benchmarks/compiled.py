"""Compiled training steps beside MaxText's, and beside their own stored figures: cycles and memory of a chip.

    python -m benchmarks.compiled [--only PATTERN ...]     compiles them with the installed JAX; writes STORED and PAGE
    python -m benchmarks.compiled --table                  writes the table of PAGE alone

Nothing is run. Cycles are the TPU compiler's own estimates with loops multiplied out; Pallas kernels and waiting for
collectives are not in them. Memory is that of the arguments and the temporaries. MaxText's steps are not compiled here:
``PEERS`` has their figures with versions, read from their programs' texts in the same way.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax

from jaxllm.compiler import aot
from jaxllm.files import write_json
from jaxllm.models import AttentionConfig, BlockConfig, MlpConfig, MoeConfig, RopeConfig
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for
from recipes._pretraining import decoder, pretraining
from recipes.llama3 import llama3_8b, llama3_70b

ROOT = Path(__file__).resolve().parents[1]
STORED = Path(__file__).parent / "peers" / "compiled.json"
PAGE = ROOT / "docs" / "compiled.md"
BEGIN, END = "<!-- peers: generated -->\n", "<!-- end -->\n"


def llama_70b() -> RunConfig:
    """Llama 3.1 70B, one row of 8,192 tokens a chip, weights fully sharded."""
    run = llama3_70b()
    data = replace(run.data, batch_size=256)
    return replace(run, name="llama3_70b_fsdp", mesh="fsdp=256", data=data, parallel=type(run.parallel)())


def mixtral(mesh: str) -> RunConfig:
    """Mixtral 8x7B, two rows of 4,096 tokens a chip on 128 chips."""
    attention = AttentionConfig(heads=32, kv_heads=8, head_dim=128, rope=RopeConfig(theta=1_000_000.0))
    model = decoder(32_000, 4096, 32, BlockConfig(attention, MoeConfig(experts=8, top_k=2, hidden=14336)))
    return pretraining("mixtral_8x7b", model, seq_len=4096, rows=256, peak=2e-4, mesh=mesh)


def few_layers() -> RunConfig:
    """Four layers of Llama 3 8B with a small vocabulary."""
    run = llama3_8b()
    return replace(run, name="llama3_8b_4_layers", model=replace(run.model, layers=4, vocab_size=8192))


def tiny() -> RunConfig:
    """Small model with heads of 128, whose step compiles in seconds."""
    block = BlockConfig(AttentionConfig(heads=4, kv_heads=2, head_dim=128), MlpConfig(hidden=1024))
    return pretraining("tiny", decoder(2048, 512, 2, block), seq_len=1024, rows=8, peak=1e-3, mesh="fsdp")


class Step(NamedTuple):
    """Training step to compile: its run, and the topology."""

    run: Callable[[], RunConfig]
    on: str


STEPS = {
    "Llama 3.1 8B, fsdp 64": Step(llama3_8b, "v6e:8x8"),
    "Llama 3.1 70B, fsdp 256": Step(llama_70b, "v6e:16x16"),
    "Mixtral 8x7B, fsdp 128": Step(lambda: mixtral("fsdp=128"), "v5p:4x4x8"),
    "Mixtral 8x7B, fsdp 16 x expert 8": Step(lambda: mixtral("fsdp=16,expert=8"), "v5p:4x4x8"),
    "four layers of 8B": Step(few_layers, "v6e:8x8"),
    **{f"tiny, {on}": Step(tiny, on) for on in ("v5e:2x4", "v5p:2x2x2", "v6e:2x4")},
}
"""Steps by name. All of Llama and Mixtral have 8,192 tokens a chip and full recomputation."""


class Peer(NamedTuple):
    """MaxText's step of the same work.

    Attributes:
        cycles: the compiler's estimate; None where only a ratio was kept.
        bytes: arguments and temporaries of a chip; None likewise.
        versions: of MaxText, JAX and the compiler.
    """

    cycles: float | None
    bytes: float | None
    versions: str


_VERSIONS = "MaxText 0.2.5, jax 0.12.0.1, libtpu 0.0.51"
PEERS = {
    "Llama 3.1 8B, fsdp 64": Peer(1831.7e6, 9.35e9, _VERSIONS),
    "Llama 3.1 70B, fsdp 256": Peer(15454e6, 22.40e9, _VERSIONS),
}
"""MaxText's figures by step. That of 70B was kept as ratios, 1.030 and 1.235, to a step of 15,918 M cycles and 27.7 GB.

Of Mixtral there is none: its cycles, 3,056 M, have the matmuls of experts in them, and ours are a kernel without.
"""


def figures(report: aot.CompileReport) -> dict[str, str | int | None]:
    """Figures of a compiled step that are stored."""
    return {
        "cycles": report.cycles,
        "argument_bytes": report.argument_bytes,
        "temp_bytes": report.temp_bytes,
        "compiler": report.compiler,
    }


def stored() -> dict[str, dict[str, dict]]:
    """Stored figures: step -> version of JAX -> ``figures``."""
    return json.loads(STORED.read_text()) if STORED.exists() else {}


def growth(now: dict, before: dict) -> dict[str, float]:
    """Relative growth of the cycles and of the memory of a step; 0 where they fell."""
    memory = [figure["argument_bytes"] + figure["temp_bytes"] for figure in (now, before)]
    return {"cycles": max(0.0, now["cycles"] / before["cycles"] - 1), "memory": max(0.0, memory[0] / memory[1] - 1)}


def table(found: dict[str, dict[str, dict]]) -> str:
    """Markdown table of stored figures, with ratios to MaxText's where those are known."""
    lines = [
        "| step | on | jax | M cycles | of MaxText | GiB | of MaxText |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, step in STEPS.items():
        for version, row in sorted(found.get(name, {}).items()):
            memory = row["argument_bytes"] + row["temp_bytes"]
            peer = PEERS.get(name, Peer(None, None, ""))
            cells = (
                *(name, step.on, version),
                *(f"{row['cycles'] / 1e6:,.1f}", ratio(row["cycles"], peer.cycles)),
                *(f"{memory / 2**30:.2f}", ratio(memory, peer.bytes)),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ratio(ours: float, theirs: float | None) -> str:
    """Ratio for a table; "-" where the other figure is not known."""
    return "-" if theirs is None else f"{ours / theirs:.3f}"


def write_table() -> None:
    """Renews the table of the page."""
    page = PAGE.read_text()
    start = page.index(BEGIN) + len(BEGIN)
    PAGE.write_text(page[:start] + table(stored()) + page[page.index(END, start) :])


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m benchmarks.compiled``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PATTERN", default=["*"], help="steps, by name")
    parser.add_argument("--table", action="store_true", help="compile nothing")
    given = parser.parse_args(arguments)
    wanted = [name for name in STEPS if any(fnmatch.fnmatch(name, pattern) for pattern in given.only)]
    if not wanted:
        parser.error(f"no step is called {' or '.join(given.only)}; there are: {'; '.join(STEPS)}.")
    for name in () if given.table else wanted:
        report = compile_for(STEPS[name].run(), STEPS[name].on, progress=aot.to_stderr)
        now, all_stored = figures(report), stored()
        before = all_stored.setdefault(name, {}).get(jax.__version__)
        print(f"{name}: {now['cycles'] / 1e6:,.1f} M cycles, {report.compile_seconds:.0f} s to compile", end="")
        print(f"; grown by {growth(now, before)}" if before else "")
        all_stored[name][jax.__version__] = now
        write_json(STORED, all_stored)
    write_table()
    return 0


if __name__ == "__main__":
    sys.exit(main())
