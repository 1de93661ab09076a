"""The commands ``plan`` and ``compile``: what a recipe's step takes on devices that are not here."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jaxllm.cli import configure, find_recipe, split_settings
from jaxllm.command import UsageError

if TYPE_CHECKING:
    from jaxllm.compiler.aot import CompileReport
    from jaxllm.compiler.reading import Reading
    from jaxllm.plan.calibration import Calibration
    from jaxllm.plan.compiled import Compiled
    from jaxllm.plan.hardware import Cluster
    from jaxllm.plan.search import Layout
    from jaxllm.train import RunConfig
    from sharding.isolate import OutOfDeviceMemory, Progress
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
        from jaxllm.train.compile import compile_for
        from sharding.isolate import OutOfDeviceMemory
        from sharding.topology import Topology

        config, topology = configure(find_recipe(recipe), settings, prog=f"jaxllm compile {recipe}"), Topology.parse(on)
        if within is not None and (config := _recomputing(config, on, within)) is None:
            return 1
        with tempfile.TemporaryDirectory() as folder:
            keep = Path(folder) / "program.json" if html is not None or anyway else None
            try:
                report = compile_for(config, on, progress=_progress(), keep=keep, anyway=anyway)
            except OutOfDeviceMemory as error:
                print(_over(config, topology, error))
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
    from jaxllm.parallel.table_view import columns
    from jaxllm.plan.recompute import solve
    from jaxllm.train.compile import compile_for

    def measure(remat: str) -> int:
        run = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))
        return compile_for(run, on, progress=_progress(f"remat {remat}: "), anyway=True).total_bytes

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


def _reading(config: RunConfig, topology: Topology, report: CompileReport, keep: Path) -> Reading:
    """What there is to see of a program that was kept in a file."""
    from jaxllm.compiler import aot, live, walker
    from jaxllm.compiler.reading import Reading
    from jaxllm.models import functional
    from jaxllm.plan.hardware import Cluster, HardwareError
    from jaxllm.plan.rates import rates_of
    from jaxllm.train.run import fitting_mesh

    text, placement = aot.kept(keep)
    try:
        mesh = fitting_mesh(config, functional(config.model, config.parallel.rules()), topology.num_devices)
        rates = rates_of(Cluster.parse(topology.name), mesh)
    except HardwareError:  # a CPU's rates are on no data sheet: the page shows sizes
        rates = None
    return Reading(report, walker.read(text, placement), live.read(text), rates)


def _progress(before: str = "") -> Progress | None:
    """A line that says how far it is, for people who watch."""
    if not sys.stderr.isatty():
        return None

    def show(seconds: float, stage: str) -> None:
        end = "\r\x1b[K" if stage == "done" else ""
        print(f"\r\x1b[K{before}{stage}, {seconds:.0f} s{end}", end="", file=sys.stderr, flush=True)

    return show


def _over(config: RunConfig, topology: Topology, error: OutOfDeviceMemory) -> str:
    """What a step takes that the compiler refused for its size, as far as that is known without it."""
    from jaxllm.parallel.table import device_bytes
    from jaxllm.train.shard import sharding_table

    table = sharding_table(config, topology.num_devices)
    parts = {
        "parameters": device_bytes(table.parameters),
        "optimizer's state": device_bytes(table.optimizer),
    }
    parts["all else: gradients, activations, the batch"] = error.need - sum(parts.values())
    rows = [*parts.items(), ("needed", error.need), ("there is", error.limit), ("too much", error.need - error.limit)]
    lines = [f"{config.name} does not fit {topology}, GiB of one device"]
    lines += [f"  {label:<44}{size / 2**30:10.3f}" for label, size in rows]
    hint = "Split it over more devices, make the micro-batch smaller (--accumulate), or recompute more (--model.remat)."
    return "\n".join([*lines, hint])


PLAN_VALUES = ("--on", "--top", "--explain", "--save", "--json", "--tokens", "--hardware", "--calibrate")
PLAN_BARE = ("--compile", "--no-compile", "--as-is", "--no-as-is", "--help", "-h")


def plan(argv: list[str]) -> int:
    """Rank layouts of a run by predicted time: `jaxllm plan RECIPE --on v6e:8x8`."""

    def run(
        recipe: Annotated[str, tyro.conf.Positional],
        /,
        on: str,
        top: int = 3,
        compile: bool = True,
        explain: int | None = None,
        save: Path | None = None,
        json: Path | None = None,
        tokens: float | None = None,
        hardware: Path | None = None,
        calibrate: Path | None = None,
        as_is: bool = False,
    ) -> int:
        """Meshes, recomputation, micro-batches and schedules by predicted step time; then the first few, compiled.

        Any setting of the run can follow, as for `jaxllm train`: --model.layers, --data.seq-len, --data.batch-size,
        ... The exit status is 1 where nothing fits.

        Args:
            recipe: its name, or FILE.py:FUNCTION.
            on: a topology, such as v6e:8x8 or h100:8x8, or several with commas between.
            top: layouts shown, and compiled.
            compile: let the compiler say what the first ones take.
            explain: number of a layout to show in full.
            save: write the first layout (or the one to explain) there, as FILE.py.
            json: write all that is shown there.
            tokens: say what training on so many costs, such as 15e12.
            hardware: a TOML or JSON file that changes or adds kinds of hardware.
            calibrate: a run on such devices whose profile says what they reach of their data sheets.
            as_is: predict the run's own mesh and plan instead of looking for others.
        """
        from jaxllm.files import write_json
        from jaxllm.plan import hardware as table
        from jaxllm.plan.hardware import Cluster
        from jaxllm.plan.save import to_json

        config = configure(find_recipe(recipe), settings, prog=f"jaxllm plan {recipe}")
        if top < 1 or (explain is not None and not 1 <= explain <= top):
            raise UsageError(f"--top {top} --explain {explain}: show 1 layout or more, and explain one of them.")
        known = table.TABLE if hardware is None else table.read(hardware)
        clusters = [Cluster.parse(name, known) for name in on.split(",")]
        if save is not None and len(clusters) > 1:
            raise UsageError(f"--save {save}: name one topology, and not {on}.")
        found, status = [], 0
        for number, cluster in enumerate(clusters):
            if number:
                print()
            layouts = _layouts(config, cluster, top, as_is, _calibration(calibrate, cluster))
            if not layouts:
                status = 1
                continue
            reports = _compiled(layouts, cluster) if compile else []
            _shown(layouts, cluster, explain, tokens, save)
            for place, layout in enumerate(layouts):
                report = reports[place] if place < len(reports) else None
                said = None if report is None else {"refused": report} if isinstance(report, str) else report.to_json()
                found.append({**to_json(layout, cluster), "compiled": said})
        if json is not None:
            write_json(json, found)
            print(f"saved: {json}")
        return status

    known, settings = split_settings(argv, PLAN_VALUES, PLAN_BARE)
    return tyro.cli(run, args=known, prog="jaxllm plan")


def _calibration(run: Path | None, cluster: Cluster) -> Calibration:
    """What a run's profile says, printed; the shipped one without a run."""
    from jaxllm.plan.calibration import DEFAULT
    from jaxllm.plan.measured import calibration_of

    if run is None:
        return DEFAULT
    found = calibration_of(run, cluster.hardware)
    said = ", ".join(f"{name} {100 * share:.0f}%" for name, share in dataclasses.asdict(found).items())
    print(f"of data sheets, by {run}: {said}")
    return found


def _layouts(config: RunConfig, cluster: Cluster, top: int, as_is: bool, calibration: Calibration) -> list[Layout]:
    """The first layouts, printed; none, and why, where none fits."""
    from jaxllm.models import functional
    from jaxllm.plan import search, view
    from jaxllm.train.run import fitting_mesh

    tokens = config.data.batch_size * config.data.seq_len
    print(
        f"{config.name} on {cluster.name} ({cluster.devices} devices of {cluster.hardware.hbm_bytes / 2**30:.1f} GiB): "
        f"{config.data.batch_size} rows of {config.data.seq_len:,}, {tokens:,} tokens a step"
    )
    if as_is:
        mesh = fitting_mesh(config, functional(config.model, config.parallel.rules()), cluster.devices)
        layouts = [search.predicted(config, mesh, cluster, calibration)]
        tried = 1
    else:
        found = search.search(config, cluster, calibration=calibration)
        layouts, tried = list(found.layouts), found.tried
        if not layouts:
            print(view.nothing_fits(found, cluster, search.larger(config, cluster)))
            return []
    shown = layouts[:top]
    print(f"predicted, the first {len(shown)} of {len(layouts)} meshes that fit ({tried} layouts tried)\n")
    print(view.ranking(shown, cluster), flush=True)
    return shown


def _compiled(layouts: list[Layout], cluster: Cluster) -> list[Compiled | str]:
    """What the compiler says of layouts, printed: reports, or what it refused."""
    from jaxllm.plan import compiled, view
    from sharding.isolate import OutOfDeviceMemory

    if cluster.hardware.like != cluster.hardware.name:
        print(f"\nnot compiled: there is no compiler for {cluster.hardware.name} here")
        return []
    out: list[Compiled | str] = []
    for number, layout in enumerate(layouts, 1):
        try:
            out.append(compiled.compile_layout(layout, cluster, _progress(f"{number} of {len(layouts)}: ")))
        except OutOfDeviceMemory as error:
            print(f"\n{_over(layout.run, cluster.topology, error)}")
            out.append(f"{(error.need - error.limit) / 2**30:.2f} GiB too much")
    by = "the TPU compiler's cycles" if cluster.topology.platform == "tpu" else "roofline alone, a lower bound"
    print(f"\ncompiled; seconds by {by}")
    print(view.compiled(list(zip(layouts, out, strict=True))))
    return out


def _shown(
    layouts: list[Layout], cluster: Cluster, explain: int | None, tokens: float | None, save: Path | None
) -> None:
    """A layout in full, its cost, its recipe."""
    from jaxllm.plan import view
    from jaxllm.plan.cost import cost
    from jaxllm.plan.save import write_recipe

    if explain is not None and explain > len(layouts):
        raise UsageError(f"--explain {explain}: {len(layouts)} layouts fit {cluster.name}.")
    chosen = layouts[(explain or 1) - 1]
    if explain is not None:
        print(f"\n{view.explained(chosen, cluster)}")
    if tokens is not None:
        print(f"\n{view.price(cost(chosen, cluster, tokens), chosen)}")
    if save is not None:
        print(f"\nsaved: {write_recipe(save, chosen, cluster)}")
