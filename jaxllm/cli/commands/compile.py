"""``jaxllm compile``: compiles the training step of a recipe for devices that are not here."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jaxllm.cli.memory_overflow import memory_overflow
from jaxllm.cli.progress_line import progress_line
from jaxllm.cli.recipe_arguments import configure, find_recipe, split_settings

if TYPE_CHECKING:
    from jaxllm.compiler.aot import CompileReport
    from jaxllm.compiler.program_report import ProgramReport
    from jaxllm.train import RunConfig
    from sharding.topology import Topology


def compile(argv: list[str]) -> int:
    """Compile a step for a pod that is not here: `jaxllm compile RECIPE --on v6e:8x8`."""

    def run(
        recipe: Annotated[str, tyro.conf.Positional],
        /,
        on: str,
        save: Path | None = None,
        html: Path | None = None,
        anyway: bool = False,
        within: float | None = None,
    ) -> int:
        """Memory of a device, what it sends, and the compiler's estimate of its work; no device is needed.

        Any setting of the run can follow, as for `jaxllm train`: --mesh, --model.layers, ... The exit status is 1
        where the step does not fit.

        Args:
            recipe: its name, or FILE.py:FUNCTION.
            on: a topology, such as v6e:8x8, 4*v6e:16x16 or h100:4x8.
            save: also write the report there, as JSON.
            html: write a page there: memory over the schedule, timeline, roofline, collectives.
            anyway: have the TPU compiler compile what does not fit, to see what takes the memory.
            within: GiB of a device that the step may take: first finds the recomputation by layers (model.remat) that
                computes least again within it, which takes half a dozen compilations.
        """
        from jaxllm.files import write_json
        from jaxllm.train.compile_step import compile_for
        from sharding.isolate import OutOfDeviceMemory
        from sharding.topology import Topology

        config, topology = configure(find_recipe(recipe), settings, prog=f"jaxllm compile {recipe}"), Topology.parse(on)
        if within is not None and (config := _recomputing(config, on, within)) is None:
            return 1
        with tempfile.TemporaryDirectory() as folder:
            keep = Path(folder) / "program.json" if html is not None or anyway else None
            try:
                report = compile_for(config, on, progress=progress_line(), keep=keep, anyway=anyway)
            except OutOfDeviceMemory as error:
                print(memory_overflow(config, topology, error))
                print("What takes it, array by array: --anyway.")
                return 1
            print(report)
            over = topology.hbm_bytes is not None and report.total_bytes > topology.hbm_bytes
            if keep is not None:
                reading = _reading(config, topology, report, keep)
                if over:
                    print(f"\n{reading.memory}")
                if html is not None:
                    html.write_text(reading.html())
                    print(f"written: {html}")
        if save is not None:
            write_json(save, report.to_json())
            print(f"saved: {save}")
        return 1 if over and (anyway or not report.fits) else 0

    # What is not this command's is the run's.
    known, settings = split_settings(
        argv, ("--on", "--save", "--html", "--within"), ("--anyway", "--no-anyway", "--help", "-h")
    )
    return tyro.cli(run, args=known, prog="jaxllm compile")


def _recomputing(config: RunConfig, on: str, within: float) -> RunConfig | None:
    """The run with the recomputation that fits into so many GiB, printed with what was measured; None if none does."""
    from jaxllm.models.remat import RematError
    from jaxllm.parallel.sharding_table_view import columns
    from jaxllm.plan.remat_solver import solve
    from jaxllm.train.compile_step import compile_for

    def measure(remat: str) -> int:
        run = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))
        return compile_for(run, on, progress=progress_line(f"remat {remat}: "), anyway=True).total_bytes

    try:
        solved = solve(config, round(within * 2**30), measure)
    except RematError as error:
        print(error)
        return None
    least = min(flops for _, flops in solved.named.values())
    rows = [
        (remat, f"{size / 2**30:.3f}", f"{100 * (flops / least - 1):.1f}%", "chosen" if remat == solved.remat else "")
        for remat, (size, flops) in {**solved.named, **solved.tried}.items()
    ]
    print(columns(("model.remat", "GiB", "FLOPs more", ""), rows, "<>><"), end="\n\n")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat=solved.remat))


def _reading(config: RunConfig, topology: Topology, report: CompileReport, keep: Path) -> ProgramReport:
    """What there is to see of a program that was kept in a file."""
    from jaxllm.compiler import aot, live_ranges, program_walker
    from jaxllm.compiler.program_report import ProgramReport
    from jaxllm.models import functional
    from jaxllm.plan.hardware import Cluster, HardwareError
    from jaxllm.plan.timeline_rates import rates_of
    from jaxllm.train.run import fitting_mesh

    text, placement = aot.kept(keep)
    try:
        mesh = fitting_mesh(config, functional(config.model, config.parallel.rules()), topology.num_devices)
        rates = rates_of(Cluster.parse(topology.name), mesh)
    except HardwareError:  # a CPU's rates are on no data sheet: the page shows sizes
        rates = None
    return ProgramReport(report, program_walker.read(text, placement), live_ranges.read(text), rates)
