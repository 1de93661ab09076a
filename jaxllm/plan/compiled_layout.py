"""What the compiler makes of a layout: its memory, its collectives, and the seconds of its schedule."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.compiler import aot, program_walker
from jaxllm.compiler.timeline import timeline
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.layout_search import Layout
from jaxllm.plan.timeline_rates import rates_of
from jaxllm.train.compile_step import compile_for
from sharding.isolate import Progress


@dataclass(frozen=True)
class Compiled:
    """A layout's program.

    Attributes:
        report: of the compiler.
        seconds: of its schedule: on TPUs by the compiler's estimated cycles, on GPUs by roofline alone, a lower bound.
    """

    report: aot.CompileReport
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """JSON-able data."""
        return {**self.report.to_json(), "seconds": self.seconds}


def compile_layout(layout: Layout, cluster: Cluster, progress: Progress | None = None) -> Compiled:
    """Compiles a layout's step in a process of its own.

    Raises:
        OutOfDeviceMemory: the compiler says it does not fit.
        CompilerMissing: names the extra to install.
    """
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "program.json"
        report = compile_for(layout.run, cluster.topology.name, progress=progress, keep=kept)
        text, placement = aot.kept(kept)
    return Compiled(report, timeline(program_walker.read(text, placement), rates_of(cluster, layout.mesh)).seconds)
