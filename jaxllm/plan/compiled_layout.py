"""AOT compilation of a layout: memory, collectives and scheduled step time of its compiled program."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.compiler import aot, live_ranges, program_walker
from jaxllm.compiler.program_report import ProgramReport
from jaxllm.compiler.timeline import timeline
from jaxllm.plan.formulas.calibration import DEFAULT, Calibration
from jaxllm.plan.hardware import Cluster, HardwareError
from jaxllm.plan.layout_search import ParallelLayout
from jaxllm.plan.timeline_rates import rates_of
from jaxllm.train import RunConfig
from jaxllm.train.compile_step import compile_for, step_memory_for
from jaxllm.train.run import fitting_mesh
from jaxllm.train.run_model import run_model
from sharding.isolate import Progress
from sharding.topology import Topology


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


@dataclass(frozen=True)
class CompiledPrograms:
    """Compiled programs of a layout with files, whose step is several.

    Attributes:
        device: bytes of a device, added up by the formula of the step.
        programs: bytes of a device that each takes by itself, by name.
        seconds: what compiling took.
    """

    device: int
    programs: dict[str, int]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """JSON-able data."""
        return {"device": self.device, "programs": self.programs}


def compile_programs(layout: ParallelLayout, cluster: Cluster, progress: Progress | None = None) -> CompiledPrograms:
    """Compiles the programs of a layout with files in a child process; see ``compile_layout``."""
    began = time.monotonic()
    found = step_memory_for(layout.run, cluster.topology.name, progress)
    return CompiledPrograms(found.device, found.programs, time.monotonic() - began)


def compile_layout(
    layout: ParallelLayout,
    cluster: Cluster,
    progress: Progress | None = None,
    calibration: Calibration = DEFAULT,
    html: Path | None = None,
    anyway: bool = False,
) -> CompiledLayout:
    """Compiles a layout's train step in a child process.

    Args:
        layout, cluster, calibration: what to compile, for which devices, at which attained rates.
        progress: told what the child does.
        html: file to write the program's page to: memory of the device and its host over the step, timeline, roofline.
        anyway: compile a program that exceeds device memory too, see ``compile_for``.

    Raises:
        OutOfDeviceMemory: the compiler reports that the program does not fit; with ``anyway``, that it is not finished.
        CompilerMissing: no compiler is installed; names the extra to install.
    """
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "program.json"
        report = compile_for(layout.run, cluster.topology.name, progress=progress, keep=kept, anyway=anyway)
        text, placement = aot.kept(kept)
        if html is not None:
            html.write_text(read_program(layout.run, cluster.topology, report, kept, calibration).html())
    return CompiledLayout(
        report, timeline(program_walker.read(text, placement), rates_of(cluster, layout.mesh, calibration)).seconds
    )


def read_program(
    config: RunConfig, topology: Topology, report: aot.CompileReport, kept: Path, calibration: Calibration = DEFAULT
) -> ProgramReport:
    """Report on a run's compiled program that was saved to the file ``kept``."""
    text, placement = aot.kept(kept)
    try:
        mesh = fitting_mesh(config, run_model(config), topology.num_devices)
        rates = rates_of(Cluster.parse(topology.name), mesh, calibration)
    except HardwareError:  # CPUs are not in the hardware table; the page then shows sizes only
        rates = None
    return ProgramReport(report, program_walker.read(text, placement), live_ranges.read(text), rates)
