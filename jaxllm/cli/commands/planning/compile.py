"""``jaxllm compile``: ahead-of-time compilation of a recipe's train step for absent devices."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jaxllm.cli.command_parser import check_outputs, parse_command
from jaxllm.cli.errors import UsageError
from jaxllm.cli.memory_budget import MemoryBudget, budget_of, measured_for, within_budget
from jaxllm.cli.memory_overflow import memory_overflow
from jaxllm.cli.progress_line import progress_line
from jaxllm.cli.recipe_arguments import configure, find_recipe, split_settings

if TYPE_CHECKING:
    from jaxllm.compiler.aot import CompileReport
    from jaxllm.train import RunConfig
    from sharding.topology import Topology


def compile(argv: list[str]) -> int:
    """Compile the train step ahead of time: `jaxllm compile RECIPE --on v6e:8x8`."""
    if any(word.split("=")[0] == "--serve" for word in argv):
        from jaxllm.cli.commands.planning.compile_serving import compile_serving

        return compile_serving(argv)

    def run(
        recipe: Annotated[str, tyro.conf.Positional],
        /,
        on: str,
        save: Path | None = None,
        html: Path | None = None,
        anyway: bool = False,
        within: str | None = None,
        host: str | None = None,
        estimate: bool = False,
    ) -> int:
        """Compiles the train step for devices that are not attached; reports memory, collectives and cost estimates.

        Any setting of the run can follow, as for `jaxllm train`: --mesh, --model.layers, ... The exit status is 1 if
        the step does not fit into device memory. `jaxllm compile MODEL --serve DIR` compiles a server's programs
        instead, see `jaxllm compile --serve --help`.

        Args:
            recipe: name of the recipe, or FILE.py:FUNCTION.
            on: topology, such as v6e:8x8, 4*v6e:16x16 or h100:4x8.
            save: JSON file to write the report to.
            html: HTML page to write: memory over the schedule, timeline, roofline, collectives.
            anyway: let the TPU compiler compile a step that does not fit, to see which arrays take the memory.
            within: memory budget of a device, such as 20GiB, or a number of GiB: first finds what each layer keeps and
                computes again (model.remat) with the least recomputation that fits, which takes about seven
                compilations, eight with --host.
            host: with --within: host memory for each device, such as 64GiB, where layers may keep activations too; the
                step of least time is found, in which copies count as far as the passes do not hide them.
            estimate: do not compile: print an estimate of the step's memory from its traced operations, in seconds.
        """
        from jaxllm.files import write_json
        from jaxllm.plan.compiled_layout import read_program
        from jaxllm.train.compile_step import compile_for
        from sharding.isolate import OutOfDeviceMemory
        from sharding.topology import Topology

        config, topology = configure(find_recipe(recipe), settings, prog=f"jaxllm compile {recipe}"), Topology.parse(on)
        if estimate:
            return _print_estimate(config, topology, [save, html, within, host], anyway)
        if host is not None and within is None:
            raise UsageError("--host needs --within SIZE, the memory budget of a device.")
        check_outputs(save=save, html=html)
        if within is not None:
            config = _with_remat_solved(config, topology, budget_of(within, host))
            if config is None:
                return 1
        with tempfile.TemporaryDirectory() as folder:
            keep = Path(folder) / "program.json" if html is not None or anyway else None
            try:
                report = compile_for(config, on, progress=progress_line(), keep=keep, anyway=anyway)
            except OutOfDeviceMemory as error:
                print(memory_overflow(config, topology, error))
                print(
                    "The compiler does not finish this program anyway, so its arrays are not known."
                    if anyway
                    else "--anyway lists the arrays that take the memory."
                )
                return 1
            print(report)
            _print_rollouts(config, on, report)
            over = topology.hbm_bytes is not None and report.total_bytes > topology.hbm_bytes
            if keep is not None:
                reading = read_program(config, topology, report, keep)
                if over:
                    print(f"\n{reading.memory}")
                if html is not None:
                    html.write_text(reading.html())
                    print(f"written: {html}")
        if save is not None:
            write_json(save, report.to_json())
            print(f"saved: {save}")
        return 1 if over and (anyway or not report.fits) else 0

    # All other options are settings of the run.
    known, settings = split_settings(
        argv,
        ("--on", "--save", "--html", "--within", "--host"),
        ("--anyway", "--no-anyway", "--estimate", "--no-estimate", "--help", "-h"),
    )
    return parse_command(run, known, "jaxllm compile")


def _print_estimate(config: RunConfig, topology: Topology, others: list[object], anyway: bool) -> int:
    """Prints the estimated memory of a run's step; returns 1 if it does not fit."""
    from jaxllm.plan.graphs.step_estimate import estimate_step
    from jaxllm.train.run import fitting_mesh
    from jaxllm.train.run_model import run_model

    if anyway or any(one is not None for one in others):
        raise UsageError("--estimate compiles nothing; give it without --save, --html, --within, --host and --anyway.")
    mesh = fitting_mesh(config, run_model(config), topology.num_devices, topology.platform)
    found = estimate_step(config, mesh)
    limit = topology.hbm_bytes
    print(
        f"{config.name} on {topology.name}, mesh {mesh}, estimated without a compiler, GiB of a device\n"
        f"  arguments   {found.arguments / 2**30:10.3f}\n"
        f"  all else    {found.temporaries / 2**30:10.3f}  packed; live {found.live / 2**30:.3f}\n"
        f"  in all      {found.total / 2**30:10.3f}" + ("" if limit is None else f"  of {limit / 2**30:.2f}")
    )
    return 1 if limit is not None and found.total > limit else 0


def _print_rollouts(config: RunConfig, on: str, report: CompileReport) -> None:
    """Compiles and prints what a run of reinforcement learning has beside its step: the engine's programs."""
    from jaxllm.posttrain import PolicyRunConfig

    if not isinstance(config, PolicyRunConfig):
        return
    from jaxllm.config import ConfigError
    from jaxllm.parallel.sharding_table_view import columns
    from jaxllm.posttrain.compile_rollouts import compile_rollouts_for
    from sharding import ShardingError
    from sharding.isolate import OutOfDeviceMemory

    try:
        found = compile_rollouts_for(config, on, progress=progress_line("rollouts: "))
    except (ConfigError, ShardingError, OutOfDeviceMemory) as error:
        print(f"\nrollouts were not compiled: {error}")
        return
    rows = [
        (name, *(f"{size / 2**30:.2f}" for size in (one.argument_bytes, one.temp_bytes, one.total_bytes)))
        for name, one in found.items()
    ]
    head = ("programs of rollouts, GiB of a device", "arguments", "temporaries", "all")
    print(f"\n{columns(head, rows, '<>>>')}")
    engine = max(one.argument_bytes for name, one in found.items() if name != "swap")
    there = "" if report.hbm_bytes is None else f" of {report.hbm_bytes / 2**30:.2f}"
    print(f"the step and the engine's arrays beside it: {(report.total_bytes + engine) / 2**30:.2f} GiB{there}")


def _with_remat_solved(config: RunConfig, topology: Topology, budget: MemoryBudget) -> RunConfig | None:
    """The run with the remat that fits the budget; prints the candidates. None if none fits."""
    from jaxllm.models.remat import RematError
    from jaxllm.plan.hardware import Cluster
    from jaxllm.plan.remat_solver import StepBytes
    from sharding.isolate import OutOfDeviceMemory

    def measure(run: RunConfig) -> StepBytes:
        return measured_for(run, topology.name, progress_line(f"remat {run.model.remat}: "))

    try:
        cluster = None if budget.host is None else Cluster.parse(topology.name)
        devices = topology.num_devices, topology.platform
        return within_budget(config, budget, measure, devices, cluster)
    except (RematError, OutOfDeviceMemory) as error:  # or not even the activations that are left fit
        print(error)
        return None
