"""Search by layer: plans whose layers have layouts and remat policies of their own (Galvatron, arXiv:2211.13878).

Of each mesh without stages, the dynamic program (``layer_program``) finds the fastest plan of all that give each layer
a layout, "tensor" or "fsdp" (``sharding.layer_layouts``), and a remat policy, for each number of micro-batches, with
ZeRO-3 and experts that are not folded. Where the mesh has no ``tensor``, remat alone is chosen by layer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from jaxllm.config import ConfigError
from jaxllm.plan import layout_search
from jaxllm.plan.by_layer.layer_costs import LayerChoice, LayerCosts
from jaxllm.plan.by_layer.layer_program import LayerProblem, fastest_plan
from jaxllm.plan.formulas.calibration import DEFAULT, Calibration
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.layout_search import LayoutSearchResult, ParallelLayout
from jaxllm.train import RunConfig
from sharding import MeshSpec
from sharding.layer_layouts import AXIS, LAYOUTS

MOST_SEGMENTS = 4
"""Stacks of equal layers of a model that is searched by layer: sets of layouts are tried for all of them."""


def search_by_layer(
    run: RunConfig,
    cluster: Cluster,
    *,
    calibration: Calibration = DEFAULT,
) -> LayoutSearchResult:
    """Search of all layouts of a run, and of each mesh also by layer; the best one of each mesh, fastest first.

    Args:
        run, cluster, calibration: as for ``layout_search.search``, whose layouts are among those compared.

    Raises:
        ConfigError: the run has settings that a search by layer has no formula for; names them.
    """
    if reason := not_by_layer(run):
        raise ConfigError(f"a search by layer does not cover {reason}. Plan without --by-layer.")
    found = layout_search.search(run, cluster, calibration=calibration)
    fastest = {layout.mesh: layout for layout in found.layouts}
    tried = found.tried
    for mesh in layout_search.meshes(run, cluster):
        for laid in candidates(run, mesh):
            tried += 1
            below = math.inf if mesh not in fastest else fastest[mesh].time.seconds
            if (mixed := fastest_by_layer(laid, mesh, cluster, calibration, below)) is not None:
                fastest[mesh] = mixed
    layouts = sorted(fastest.values(), key=lambda one: (round(one.time.seconds, 9), one.memory.total, str(one.mesh)))
    return LayoutSearchResult(tuple(layouts), None if layouts else found.nearest, tried)


def improve_by_layer(
    run: RunConfig, cluster: Cluster, known: ParallelLayout | None, calibration: Calibration = DEFAULT
) -> ParallelLayout | None:
    """The fastest layout of a run with choices by layer, over all meshes; ``known`` if none is faster.

    Args:
        run, cluster, calibration: what is planned.
        known: a layout; meshes that cannot be faster cost little time.
    """
    if not_by_layer(run):
        return known
    for mesh in layout_search.meshes(run, cluster):
        for laid in candidates(run, mesh):
            below = math.inf if known is None else known.time.seconds
            known = fastest_by_layer(laid, mesh, cluster, calibration, below) or known
    return known


def not_by_layer(run: RunConfig) -> str:
    """Setting of a run that a search by layer does not cover, and why; "" if it covers the run."""
    if run.host.optimizer or run.host.params:
        return "host.optimizer, host.params: the time of transfers depends on all layers together"
    if run.disk.directory:
        return "disk.directory: layers are read one by one, all in one layout"
    if (stacks := len(run.model.segments)) > MOST_SEGMENTS:
        return f"models of more than {MOST_SEGMENTS} stacks of equal layers; this one has {stacks}"
    return ""


def candidates(run: RunConfig, mesh: MeshSpec) -> Iterator[RunConfig]:
    """Runs on a mesh whose layers the search chooses: one for each number of micro-batches that is legal."""
    if dict(mesh.axes).get("stage", 1) == 1:
        yield from layout_search.plain_layouts(run, mesh)


def fastest_by_layer(
    run: RunConfig, mesh: MeshSpec, cluster: Cluster, calibration: Calibration = DEFAULT, below: float = math.inf
) -> ParallelLayout | None:
    """The fastest plan of a run on a mesh with choices by layer that fits; None if none is faster than ``below``.

    Args:
        run: with mesh, micro-batches and parallel settings; its remat and layouts by layer are chosen anew.
        mesh: its mesh, without stages.
        cluster, calibration: devices.
        below: seconds of a step.
    """
    layouts = [layout for layout in LAYOUTS if layout == AXIS or _legal(run, mesh, layout)]
    costs = LayerCosts(run, mesh, cluster, calibration)
    seconds, taken = costs.shared
    limit = layout_search.memory_limit(cluster)
    segments = run.model.segments
    repeats = tuple(count for _, count in segments)
    choices = [LayerChoice(*pair) for pair in itertools.product(layouts, layout_search.REMATS)]
    of_group = [{choice: costs.group(s, choice) for choice in choices} for s in range(len(segments))]
    ends = {layout: costs.ends(layout) for layout in layouts}
    changes = {(a, b): costs.change(a, b) for a, b in itertools.product(("", *layouts), repeat=2)}
    best, found = below, None
    for used in _sets(layouts, len(segments)):
        room = (limit - taken - costs.working(used)) / costs.turns
        own = tuple(
            {choice: cost for choice, cost in group.items() if choice.layout in some}
            for group, some in zip(of_group, used, strict=True)
        )
        while (plan := fastest_plan(LayerProblem(own, repeats, ends, changes, room), best - seconds)) is not None:
            laid = with_choices(run, plan)
            layout = layout_search.predict_layout(laid, mesh, cluster, calibration, limit)
            if layout.fits:
                if layout.time.seconds < best:
                    best, found = layout.time.seconds, layout
                break
            room -= layout.over  # bytes are rounded
    return found


def with_choices(run: RunConfig, plan: Sequence[LayerChoice]) -> RunConfig:
    """The run with a layout and a remat policy for each group of layers, in order."""
    sizes = [len(group) for group, repeats in run.model.segments for _ in range(repeats)]
    texts = []
    for column in (0, 1):
        counts: list[tuple[str, int]] = []
        for choice, size in zip(plan, sizes, strict=True):
            same = counts and counts[-1][0] == choice[column]
            counts.append((choice[column], size + (counts.pop()[1] if same else 0)))
        texts.append(counts[0][0] if len(counts) == 1 else ",".join(f"{name}={count}" for name, count in counts))
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, remat=texts[1]),
        parallel=dataclasses.replace(run.parallel, layers=texts[0]),
    )


def _sets(layouts: Sequence[str], segments: int) -> Iterator[list[frozenset[str]]]:
    """Sets of layouts that each segment may use: the largest first, of which the others are subsets."""
    some = [frozenset(one) for n in range(len(layouts), 0, -1) for one in itertools.combinations(layouts, n)]
    yield from (list(one) for one in itertools.product(some, repeat=segments))


def _legal(run: RunConfig, mesh: MeshSpec, layout: str) -> bool:
    """Whether layers of a run may be in a layout on a mesh."""
    laid = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, layers=layout))
    return dict(mesh.axes).get("tensor", 1) > 1 and layout_search.is_legal(laid, mesh)
