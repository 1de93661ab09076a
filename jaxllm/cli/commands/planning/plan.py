"""``jaxllm plan``: ranks parallel layouts of a recipe by predicted step time and compiles the best ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jaxllm.cli.command_parser import check_outputs, parse_command
from jaxllm.cli.errors import UsageError
from jaxllm.cli.memory_budget import disk_of, size_of
from jaxllm.cli.memory_overflow import memory_overflow
from jaxllm.cli.progress_line import progress_line
from jaxllm.cli.recipe_arguments import configure, find_recipe, split_settings

if TYPE_CHECKING:
    from jaxllm.plan.compiled_layout import CompiledLayout, CompiledPrograms
    from jaxllm.plan.document_batch import DocumentBatch
    from jaxllm.plan.formulas.calibration import Calibration
    from jaxllm.plan.formulas.tier_bytes import TierBytes
    from jaxllm.plan.hardware import Cluster
    from jaxllm.plan.layout_search import ParallelLayout
    from jaxllm.train import RunConfig


PLAN_VALUES = (
    "--on",
    "--top",
    "--explain",
    "--save",
    "--json",
    "--html",
    "--tokens",
    "--hardware",
    "--calibrate",
    "--documents",
    "--host",
    "--disk",
)
PLAN_BARE = ("--compile", "--no-compile", "--as-is", "--no-as-is", "--by-layer", "--no-by-layer", "--help", "-h")


def plan(argv: list[str]) -> int:
    """Rank parallel layouts by predicted step time: `jaxllm plan RECIPE --on v6e:8x8`."""
    if "--serve" in argv:
        from jaxllm.cli.commands.planning.plan_serving import plan_serving

        return plan_serving([word for word in argv if word != "--serve"])
    if "--capacity" in argv:
        from jaxllm.cli.commands.planning.plan_capacity import plan_capacity

        return plan_capacity([word for word in argv if word != "--capacity"])
    if any(word.split("=")[0] == "--profile" for word in argv):
        from jaxllm.cli.commands.planning.plan_profile import plan_profile

        return plan_profile(argv)

    def run(
        recipe: Annotated[str, tyro.conf.Positional],
        /,
        on: str,
        top: int = 3,
        compile: bool = True,
        explain: int | None = None,
        save: Path | None = None,
        json: Path | None = None,
        html: Path | None = None,
        tokens: float | None = None,
        hardware: Path | None = None,
        calibrate: Path | None = None,
        documents: Path | None = None,
        host: str = "",
        disk: str = "",
        as_is: bool = False,
        by_layer: bool = False,
    ) -> int:
        """Searches meshes, remat, micro-batches and pipeline schedules; compiles the layouts predicted to be fastest.

        Any setting of the run can follow, as for `jaxllm train`: --model.layers, --data.seq-len, --data.batch-size,
        ... The exit status is 1 if no layout fits into device memory. `jaxllm plan MODEL --serve` plans the serving of
        a model instead, and has options of its own: `jaxllm plan --serve --help`. So has `jaxllm plan RECIPE
        --capacity`: which places for parameters, optimizer state and activations fit, on the device, in its host's
        memory or on disk. `jaxllm plan RECIPE --profile FILE` predicts by measured operators instead of formulas.

        Args:
            recipe: name of the recipe, or FILE.py:FUNCTION.
            on: topology, such as v6e:8x8 or h100:8x8, or several separated by commas; or FILE.toml, which describes
                groups of unequal devices and the links between them (nothing is compiled for these).
            top: number of layouts to show and compile.
            compile: compile the shown layouts and report the compiler's memory and cost estimates.
            explain: number of a layout to show in full.
            save: recipe file (FILE.py) to write for the first layout, or for the explained one.
            json: JSON file to write the results to.
            html: page to write about the compiled program of the explained layout: live bytes over the step on the
                device and in its host's memory, timeline, roofline, collectives. Of a layout with files, by formula:
                live bytes of device, host and disk, and when files are read and written.
            tokens: number of training tokens, such as 15e12, to estimate time and cost for.
            hardware: TOML or JSON file that changes or adds kinds of hardware.
            calibrate: directory of a run on such devices, whose profile gives the achieved shares of the data sheet.
            documents: file of document lengths, in tokens, one for each of a sample of documents: a batch is drawn from
                them, attention is predicted for its documents, and context by need is searched too.
            host: memory of the host for each device, such as 64GiB: the optimizer state may be there, and activations.
                With --as-is and --model.remat offload: what the share of tokens is computed for.
            disk: directory and bytes of it for each device, such as /mnt/nvme:2TiB: the optimizer state may be in
                files, and layers with their inputs. Their rate is that of --hardware (disk), else 3 GB/s.
            as_is: predict the run's own mesh and settings instead of searching.
            by_layer: also choose by layer, on each mesh without stages: what the mesh axis tensor splits
                (--parallel.layers) and what is recomputed (--model.remat).
        """
        from jaxllm.files import write_json
        from jaxllm.models.remat import offloaded_share
        from jaxllm.plan import hardware as table
        from jaxllm.plan.document_batch import DocumentBatch, read_lengths
        from jaxllm.plan.formulas.tier_bytes import TierBytes
        from jaxllm.plan.hardware import Cluster
        from jaxllm.plan.plan_export import to_json

        config = configure(find_recipe(recipe), settings, prog=f"jaxllm plan {recipe}")
        if top < 1 or (explain is not None and not 1 <= explain <= top):
            raise UsageError(f"--top {top} --explain {explain}: give --top of 1 or more, and --explain within it.")
        if html is not None and (explain is None or not compile):
            raise UsageError(f"--html {html} is of a layout's compiled program: give --explain N, and compile.")
        check_outputs(save=save, json=json, html=html)
        if by_layer and (as_is or documents is not None or host or disk or on.endswith(".toml")):
            raise UsageError(
                "--by-layer searches plans of equal devices with whole rows in device memory: leave out --as-is, "
                "--documents, --host and --disk, and give --on a topology."
            )
        known = table.TABLE if hardware is None else table.read(hardware)
        if on.endswith(".toml"):
            from jaxllm.cli.commands.planning.plan_unequal import plan_unequal

            given = {"--calibrate": calibrate, "--documents": documents, "--tokens": tokens, "--as-is": as_is or None}
            given |= {"--html": html, "--host": host or None, "--disk": disk or None}
            if unequal := [name for name, value in given.items() if value is not None]:
                raise UsageError(f"{unequal[0]}: it is for equal devices (--on TOPOLOGY); leave it out for {on}.")
            return plan_unequal(config, Path(on), known, top=top, explain=explain, save=save, json=json)
        shared = bool(host) and as_is and not disk and offloaded_share(config.model.remat) is not None
        if (host or disk) and (as_is or documents is not None) and not shared:
            raise UsageError(
                "--host, --disk: places are searched, for whole rows; leave --as-is and --documents out. --as-is with "
                "--host SIZE alone computes the share of --model.remat offload."
            )
        directory, size = disk_of(disk) if disk else ("", 0)
        there = TierBytes(0, size_of("--host", host) if host else 0, size)
        tiers = (directory, there) if (host or disk) and not shared else None
        clusters = [Cluster.parse(name, known) for name in on.split(",")]
        for name, file in (("--save", save), ("--html", html)):
            if file is not None and len(clusters) > 1:
                raise UsageError(f"{name} {file} needs a single topology, not --on {on}.")
        batch = None if documents is None else DocumentBatch.drawn(read_lengths(documents), config)
        found, status = [], 0
        for number, cluster in enumerate(clusters):
            if number:
                print()
            attained = _calibration(calibrate, cluster)
            laid = _with_token_share(config, cluster, there.host) if shared else config
            layouts = _layouts(laid, cluster, top, as_is, attained, batch, tiers, by_layer=by_layer)
            if not layouts:
                status = 1
                continue
            pages = {explain: html} if html is not None else {}
            reports = _compiled(layouts, cluster, attained, pages) if compile else []
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
    return parse_command(run, known, "jaxllm plan")


def _with_token_share(config: RunConfig, cluster: Cluster, host: float) -> RunConfig:
    """The run with the share of tokens that activation offload moves to the host as computed; prints it.

    Args:
        config: with ``model.remat`` "offload", whose share is replaced.
        cluster: devices.
        host: bytes of the host's memory for each device.

    Raises:
        RematError: the host has no room for what is moved for all tokens.
    """
    from jaxllm.plan.tiers.token_share import token_share
    from jaxllm.train.run_sharding import described_mesh

    mesh = described_mesh(config, cluster.devices, cluster.topology)
    found = token_share(config, mesh, cluster, host)
    print(found)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat=found.remat))


def _calibration(run: Path | None, cluster: Cluster) -> Calibration:
    """Calibration from a run's profile, printed; the default one without a run."""
    from jaxllm.plan.formulas.calibration import DEFAULT
    from jaxllm.plan.measured_calibration import calibration_of

    if run is None:
        return DEFAULT
    found = calibration_of(run, cluster.hardware)
    said = ", ".join(f"{name} {100 * share:.0f}%" for name, share in dataclasses.asdict(found).items())
    print(f"shares of the data sheet's rates, measured by {run}: {said}")
    return found


def _layouts(
    config: RunConfig,
    cluster: Cluster,
    top: int,
    as_is: bool,
    calibration: Calibration,
    documents: DocumentBatch | None,
    tiers: tuple[str, TierBytes] | None,
    *,
    by_layer: bool = False,
) -> list[ParallelLayout]:
    """Searches and prints the best layouts; prints why and returns none where none fits.

    Args:
        config, cluster, top, as_is, calibration, documents: what is searched.
        tiers: directory of files, and bytes of host and disk where states may be too; None: on the device alone.
        by_layer: whether layouts and recomputation are chosen by layer too.
    """
    from jaxllm.plan import layout_search, plan_view
    from jaxllm.plan.by_layer.layer_search import search_by_layer
    from jaxllm.plan.placed_layouts import search_places
    from jaxllm.train.run_sharding import described_mesh

    tokens = config.data.batch_size * config.data.seq_len
    print(
        f"{config.name} on {cluster.name} ({cluster.devices} devices of {cluster.hardware.hbm_bytes / 2**30:.1f} GiB): "
        f"{config.data.batch_size} rows of {config.data.seq_len:,}, {tokens:,} tokens a step"
    )
    if as_is:
        if config.device_order:
            raise UsageError("--device-order: --as-is predicts devices in the order of their links; leave it out.")
        mesh = described_mesh(config, cluster.devices, cluster.topology)
        try:
            layouts = [layout_search.predict_layout(config, mesh, cluster, calibration, documents=documents)]
        except NotImplementedError as error:
            raise UsageError(f"--as-is: the planner has no formula for this run: {error}") from None
        tried = 1
    else:
        if by_layer:
            found = search_by_layer(config, cluster, calibration=calibration)
        elif tiers is None:
            found = layout_search.search(config, cluster, calibration=calibration, documents=documents)
        else:
            available = tiers[1]._replace(device=layout_search.memory_limit(cluster))
            found = search_places(config, cluster, available, tiers[0], calibration=calibration)
        layouts, tried = list(found.layouts), found.tried
        if not layouts:
            print(plan_view.nothing_fits(found, cluster, layout_search.suggest_fitting(config, cluster)))
            return []
    shown = layouts[:top]
    print(f"predicted, the first {len(shown)} of {len(layouts)} meshes that fit ({tried} layouts tried)\n")
    print(plan_view.ranking(shown, cluster), flush=True)
    return shown


def _compiled(
    layouts: list[ParallelLayout], cluster: Cluster, calibration: Calibration, pages: Mapping[int | None, Path]
) -> list[CompiledLayout | CompiledPrograms | str]:
    """Compiles layouts and prints the results: a report for each, or the reason why it does not fit.

    Args:
        layouts, cluster, calibration: what to compile, for which devices, at which attained rates.
        pages: file for the page of a layout's program, by the layout's number.
    """
    from jaxllm.plan import compiled_layout, plan_view
    from jaxllm.plan.tiers.tier_page import tier_page
    from sharding.isolate import OutOfDeviceMemory

    for number, page in pages.items():  # of a step with files, which is several programs, by formula
        if number is not None and number <= len(layouts) and layouts[number - 1].run.disk.directory:
            page.write_text(tier_page(layouts[number - 1], cluster))
            print(f"\nwritten: {page}")
    compiles = cluster.hardware.like == cluster.hardware.name
    for number, page in pages.items():
        chosen = None if number is None or number > len(layouts) else layouts[number - 1].run
        away = chosen is not None and chosen.host.optimizer and cluster.topology.platform == "gpu"
        if chosen is not None and not chosen.disk.directory and (not compiles or away):
            needs = (
                "a GPU, whose host has its optimizer state" if compiles else f"a compiler for {cluster.hardware.name}"
            )
            raise UsageError(f"--html {page} is of the compiled program of layout {number}, which needs {needs}.")
    if not compiles:
        print(f"\nnot compiled: no compiler for {cluster.hardware.name} is available")
        return []
    out: list[CompiledLayout | CompiledPrograms | str] = []
    for number, layout in enumerate(layouts, 1):
        line = progress_line(f"{number} of {len(layouts)}: ")
        if layout.run.host.optimizer and cluster.topology.platform == "gpu":
            out.append("needs a GPU")  # its compiler takes no arguments in the host's memory without one
            continue
        try:
            if layout.run.disk.directory:
                out.append(compiled_layout.compile_programs(layout, cluster, line))
                continue
            out.append(compiled_layout.compile_layout(layout, cluster, line, calibration, pages.get(number)))
        except OutOfDeviceMemory as error:
            print(f"\n{memory_overflow(layout.run, cluster.topology, error)}")
            out.append(f"{(error.need - error.limit) / 2**30:.2f} GiB too much")
            if page := pages.get(number):
                try:
                    compiled_layout.compile_layout(layout, cluster, line, calibration, page, anyway=True)
                    print(f"written: {page}, of the program that does not fit")
                except OutOfDeviceMemory:
                    print(f"not written: {page}; the compiler does not finish a program that does not fit")
    by = "the TPU compiler's cycles" if cluster.topology.platform == "tpu" else "roofline"
    print(f"\ncompiled; seconds by {by}, at the prediction's shares of the data sheet's rates")
    print(plan_view.compiled(list(zip(layouts, out, strict=True))))
    for number, page in pages.items():
        if number is not None and number <= len(out) and isinstance(out[number - 1], compiled_layout.CompiledLayout):
            print(f"written: {page}")
    return out


def _shown(
    layouts: list[ParallelLayout], cluster: Cluster, explain: int | None, tokens: float | None, save: Path | None
) -> None:
    """Prints the explanation and cost of a layout, and saves its recipe, as requested."""
    from jaxllm.plan import link_traffic, plan_view
    from jaxllm.plan.plan_export import write_recipe
    from jaxllm.plan.training_cost import cost

    if explain is not None and explain > len(layouts):
        raise UsageError(f"--explain {explain}: {len(layouts)} layouts fit {cluster.name}.")
    chosen = layouts[(explain or 1) - 1]
    if explain is not None:
        print(f"\n{plan_view.explained(chosen, cluster)}\n")
        if chosen.run.parallel.context != "by_need":
            print(link_traffic.text(link_traffic.traffic_of_choices(chosen.run, chosen.mesh, cluster), cluster))
    if tokens is not None:
        print(f"\n{plan_view.price(cost(chosen, cluster, tokens), chosen)}")
    if save is not None:
        print(f"\nsaved: {write_recipe(save, chosen, cluster)}")
