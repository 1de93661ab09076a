"""AOT compilation of a layout: memory, collectives and scheduled step time of its compiled program."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.compiler import aot, program_walker
from jaxllm.compiler.timeline import timeline
from jaxllm.plan.formulas.calibration import DEFAULT, Calibration
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.layout_search import ParallelLayout
from jaxllm.plan.timeline_rates import rates_of
from jaxllm.train.compile_step import compile_for
from sharding.isolate import Progress


@dataclass(frozen=True)
class CompiledLayout:
    """Compiled program of a layout.

    Attributes:
        report: the compiler's report: memory and collectives.
        seconds: time of the compiled schedule: on TPUs by the compiler's estimated cycles, on GPUs by roofline; at the
            calibration's shares of the data sheet's rates, as in the prediction.
    """

    report: aot.CompileReport
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """JSON-able data."""
        return {**self.report.to_json(), "seconds": self.seconds}


def compile_layout(
    layout: ParallelLayout, cluster: Cluster, progress: Progress | None = None, calibration: Calibration = DEFAULT
) -> CompiledLayout:
    """Compiles a layout's train step in a child process.

    Raises:
        OutOfDeviceMemory: the compiler reports that the program does not fit.
        CompilerMissing: no compiler is installed; names the extra to install.
    """
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "program.json"
        report = compile_for(layout.run, cluster.topology.name, progress=progress, keep=kept)
        text, placement = aot.kept(kept)
    return CompiledLayout(
        report, timeline(program_walker.read(text, placement), rates_of(cluster, layout.mesh, calibration)).seconds
    )
