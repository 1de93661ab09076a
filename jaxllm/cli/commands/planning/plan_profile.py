"""``jaxllm bench RECIPE --operators FILE`` and ``jaxllm plan RECIPE --profile FILE``: measured operators, replayed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jaxllm.cli.command_parser import check_outputs, parse_command
from jaxllm.cli.errors import UsageError
from jaxllm.cli.recipe_arguments import configure, find_recipe, split_settings
from jaxllm.cli.runtime import processes

if TYPE_CHECKING:
    from jaxllm.plan.profile.step_graph import StepGraph
    from jaxllm.plan.profile.step_prediction import ProfiledLayout
    from jaxllm.train import RunConfig
    from sharding import MeshSpec

BARE = ("--as-is", "--no-as-is", "--help", "-h")


def bench_operators(argv: list[str]) -> int:
    """Measure the operators of a run's layouts: `jaxllm bench RECIPE --operators FILE`."""

    def run(
        recipe: Annotated[str, tyro.conf.Positional],
        /,
        operators: Path,
        devices: int | None = None,
        as_is: bool = False,
    ) -> int:
        """Measures passes of the model, updates and collectives on the devices here, for `jaxllm plan --profile`.

        Any setting of the run can follow, as for `jaxllm train`. In a job of several processes each starts it, such as
        by `jaxllm launch`, and all measure at the same time. What the file has is not measured again.

        Args:
            recipe: name of the recipe, or FILE.py:FUNCTION.
            operators: JSON file of the profile, to which times are added.
            devices: number of devices of the layouts; by default those of the job. With more, collectives of more
                devices than are here are left out, and named.
            as_is: the operators of the run's own mesh alone, not of all meshes of its other settings.
        """
        from jaxllm.plan.profile.operator_benchmark import devices_here, measure_profile
        from jaxllm.plan.profile.operator_profile import measured_for, opened_profile
        from jaxllm.plan.profile.operators import CollectiveOperator

        config = configure(find_recipe(recipe), settings, prog=f"jaxllm bench {recipe} --operators")
        check_outputs(operators=operators)
        with processes(advice="Start the measurement again; what the file has is kept.") as group:
            import jax

            here = devices_here(group)
            profile = opened_profile(operators, here)
            layouts = _layouts(config, devices or jax.device_count(), as_is)
            graphs, refused = _graphs(layouts, here.platform)
            found = measured_for(operator for graph in graphs for operator in graph.operators)
            measurable = lambda one: (  # noqa: E731
                not isinstance(one, CollectiveOperator) or jax.device_count() % one.devices == 0
            )
            said = lambda line: print(line, file=sys.stderr, flush=True) if group.is_leader else None  # noqa: E731
            write = lambda profile: profile.write(operators) if group.is_leader else None  # noqa: E731
            missing = profile.missing(filter(measurable, found))
            measure_profile(profile, missing, group, said, write)
            if group.is_leader:
                for line in refused:
                    print(line)
                for one in found:
                    if not measurable(one):
                        print(f"not measured, it needs a multiple of {one.devices} devices: {one.key}")  # type: ignore[union-attr]
                print(
                    f"{len(found)} operators of {len(graphs)} layouts, {len(missing)} of them measured now: {operators}"
                )
        return 0

    known, settings = split_settings(argv, ("--operators", "--devices"), BARE)
    return parse_command(run, known, "jaxllm bench --operators")


def plan_profile(argv: list[str]) -> int:
    """Rank layouts by replaying measured operators: `jaxllm plan RECIPE --profile FILE`."""

    def run(
        recipe: Annotated[str, tyro.conf.Positional],
        /,
        profile: Path,
        devices: int | None = None,
        top: int = 5,
        as_is: bool = False,
        html: Path | None = None,
        json: Path | None = None,
    ) -> int:
        """Replays the step of each mesh that the run fits with the times of a profile; the fastest comes first.

        Any setting of the run can follow, as for `jaxllm train`. Memory is not checked: `jaxllm plan RECIPE --on
        TOPOLOGY --as-is` predicts it. The exit status is 1 if no layout can be predicted.

        Args:
            recipe: name of the recipe, or FILE.py:FUNCTION.
            profile: JSON file that `jaxllm bench RECIPE --operators FILE` has written.
            devices: number of devices of the layouts; by default those of the profile.
            top: number of layouts to show.
            as_is: predict the run's own mesh alone.
            html: page to write with the timeline of the first layout.
            json: JSON file to write the results to.
        """
        from jaxllm.files import write_json
        from jaxllm.plan.profile.operator_profile import read_profile
        from jaxllm.plan.profile.step_prediction import ranked_layouts

        config = configure(find_recipe(recipe), settings, prog=f"jaxllm plan {recipe} --profile")
        if top < 1:
            raise UsageError(f"--top {top}: give 1 or more.")
        check_outputs(html=html, json=json)
        times = read_profile(profile)
        many = devices or len(times.devices.processors)
        found = ranked_layouts(_layouts(config, many, as_is), times)
        shown = [one for one in found if one.replay is not None][:top]
        refused = [one for one in found if one.replay is None]
        print(
            f"{config.name} on {many} devices ({times.devices.kind}), by {len(times.seconds)} operators of {profile}\n"
        )
        if shown:
            print(_table(shown))
        for one in refused:
            print(f"\n{one.mesh}: {one.refusal}")
        if not found:
            print(f"no mesh of {many} devices fits this run over data, stage, fsdp and tensor.")
        if html is not None and shown:
            html.write_text(_page(shown[0]))
            print(f"\nwritten: {html}")
        if json is not None:
            write_json(json, [_as_json(one) for one in found])
            print(f"saved: {json}")
        return 0 if shown else 1

    known, settings = split_settings(argv, ("--profile", "--devices", "--top", "--html", "--json"), BARE)
    return parse_command(run, known, "jaxllm plan --profile")


def _layouts(config: RunConfig, devices: int, as_is: bool) -> list[tuple[RunConfig, MeshSpec]]:
    from jaxllm.plan.profile.step_prediction import legal_layouts
    from jaxllm.train.run_sharding import described_mesh

    return [(config, described_mesh(config, devices))] if as_is else legal_layouts(config, devices)


def _graphs(layouts: list[tuple[RunConfig, MeshSpec]], platform: str) -> tuple[list[StepGraph], list[str]]:
    """Task graphs of layouts, and why others have none."""
    from jaxllm.plan.profile.step_graph import step_graph

    graphs, refused = [], []
    for run, mesh in layouts:
        try:
            graphs.append(step_graph(run, mesh, platform))
        except NotImplementedError as error:
            refused.append(f"{mesh}: {error}")
    return graphs, refused


def _table(layouts: list[ProfiledLayout]) -> str:
    """Table of predicted layouts: seconds of a step, and shares of the lane that computes most."""
    from jaxllm.parallel.sharding_table_view import columns

    rows = []
    for number, one in enumerate(layouts, 1):
        made = one.replay
        assert made is not None
        lane = max(range(made.lanes), key=made.computing)
        parts = (made.computing(lane), made.exposed(lane), made.idle(lane))
        shares = (f"{100 * part / made.seconds:.0f}%" for part in parts)
        rows.append((str(number), str(one.mesh), f"{made.seconds:.4g}", *shares))
    return columns(("", "mesh", "s/step", "compute", "sending", "idle"), rows, "><>>>>")


def _page(layout: ProfiledLayout) -> str:
    """HTML page with the timeline of a replayed step, a row for each stream of each lane."""
    from jaxllm.svg import lanes, page

    made = layout.replay
    assert made is not None
    rows: dict[str, list[tuple[float, float, int, str]]] = {}
    for task, (start, end) in zip(made.tasks, made.spans, strict=True):
        name = f"stage {task.lane}" if task.stream == "compute" else f"network {task.lane}"
        color = 3 if task.sends else 1 if task.label.startswith(("B", "backward")) else 0
        rows.setdefault(name, []).append((1e3 * start, 1e3 * end, color, f"{task.label}: {1e3 * task.seconds:.3f} ms"))
    title = f"{layout.run.name} on {layout.mesh}: {made.seconds:.4g} s a step"
    return page(title, f'<div class="panel wide">{lanes(sorted(rows.items()), title=title, unit="ms")}</div>')


def _as_json(layout: ProfiledLayout) -> dict[str, object]:
    made = layout.replay
    if made is None:
        return {"mesh": str(layout.mesh), "refusal": layout.refusal}
    by_lane = {
        name: [getattr(made, name)(lane) for lane in range(made.lanes)] for name in ("computing", "exposed", "idle")
    }
    return {"mesh": str(layout.mesh), "seconds": made.seconds, **by_lane}
