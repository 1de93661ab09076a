"""Thirty runs on topologies, dense, mixtures, long rows; what the compilers said of them is in points.json.

python -m tests.proofs.plan.points [NAME ...]    compiles those that are not stored, or the named ones again
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxllm.compiler.aot import CompileReport
from jaxllm.files import write_json
from jaxllm.train import RunConfig
from jaxllm.train.compile import compile_for
from recipes.llama3 import llama3_8b, llama3_8b_1m, llama3_70b, llama3_405b
from recipes.mixtral import mixtral_8x22b
from recipes.qwen import qwen3_235b_a22b

STORED = Path(__file__).with_suffix(".json")


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


POINTS = {
    "8b fsdp h100": _point(llama3_8b, "h100:8x8"),
    "8b fsdp tensor h100": _point(llama3_8b, "h100:8x8", "fsdp=16,tensor=4", parallel_sequence=True),
    "8b one node h200": _point(llama3_8b, "h200:1x8", "fsdp=8", rows=8),
    "8b elementwise h100": _point(llama3_8b, "h100:8x8", model_remat="elementwise"),
    "8b none h200": _point(llama3_8b, "h200:8x8", model_remat="none"),
    "8b accumulate h100": _point(llama3_8b, "h100:8x8", rows=256, accumulate=4),
    "8b zero2 h200": _point(llama3_8b, "h200:1x8", "fsdp=8", rows=32, accumulate=4, parallel_zero=2),
    "8b data h100": _point(llama3_8b, "h100:8x8", "data=8,fsdp=8"),
    "8b 128k h100": _point(llama3_8b, "h100:8x8", "fsdp=8,context=8", rows=8, seq_len=131072),
    "70b h100": _point(llama3_70b, "h100:32x8"),
    "70b fsdp h200": _point(llama3_70b, "h200:16x8", "fsdp=128", rows=128, parallel_sequence=False),
    "70b b200": _point(llama3_70b, "b200:8x8", "fsdp=16,tensor=4"),
    "405b h100": _point(llama3_405b, "h100:128x8"),
    "mixtral h100": _point(mixtral_8x22b, "h100:32x8"),
    "mixtral h200": _point(mixtral_8x22b, "h200:8x8", "fsdp=8,expert=8", rows=64),
    "qwen3 h200": _point(qwen3_235b_a22b, "h200:32x8"),
    "8b 1m h100": _point(llama3_8b_1m, "h100:16x8"),
    "8b fsdp v6e": _point(llama3_8b, "v6e:8x8"),
    "8b fsdp v5p": _point(llama3_8b, "v5p:4x4x4"),
    "8b fsdp tpu7x": _point(llama3_8b, "tpu7x:2x4x4"),
    "8b fsdp v4": _point(llama3_8b, "v4:4x4x4"),
    "8b fsdp tensor v6e": _point(llama3_8b, "v6e:8x8", "fsdp=16,tensor=4", parallel_sequence=True),
    "8b elementwise v5p": _point(llama3_8b, "v5p:4x4x4", model_remat="elementwise"),
    "8b accumulate v6e": _point(llama3_8b, "v6e:8x8", rows=256, accumulate=4),
    "8b data v5e": _point(llama3_8b, "v5e:8x16", "data=2,fsdp=64", rows=128, seq_len=4096),
    "8b 128k v5p": _point(llama3_8b, "v5p:4x4x4", "fsdp=8,context=8", rows=8, seq_len=131072),
    "70b v5p": _point(llama3_70b, "v5p:4x8x8"),
    "70b fsdp v6e": _point(llama3_70b, "v6e:16x16", "fsdp=256", rows=256, parallel_sequence=False),
    "mixtral v5p": _point(mixtral_8x22b, "v5p:4x8x8"),
    "qwen3 v5p": _point(qwen3_235b_a22b, "v5p:4x8x8"),
}


@dataclasses.dataclass(frozen=True)
class Said:
    """What a compiler said of a point, bytes of one device."""

    arguments: int
    total: int
    jax: str
    compiler: str
    compile_seconds: float

    @classmethod
    def of(cls, report: CompileReport) -> Said:
        """Of a report."""
        seconds = round(report.compile_seconds, 1)
        return cls(report.argument_bytes, report.total_bytes, report.jax, report.compiler, seconds)


def stored() -> dict[str, Said]:
    """What the compilers said, by point."""
    return {name: Said(**said) for name, said in _read().items()}


def compile_point(name: str) -> CompileReport:
    """The compiler's word on a point, now."""
    point = POINTS[name]
    return compile_for(point.run, point.on)


def _read() -> dict[str, Any]:
    return json.loads(STORED.read_text()) if STORED.is_file() else {}


def main(names: list[str]) -> None:
    """Compiles points and stores each report as it comes."""
    for name in names or [name for name in POINTS if name not in _read()]:
        said = Said.of(compile_point(name))
        write_json(STORED, dict(sorted({**_read(), name: dataclasses.asdict(said)}.items())))
        print(f"{name}: {said.total / 2**30:.2f} GiB in {said.compile_seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
