"""Search of layouts on an unequal cluster, ranked by predicted step time.

Two kinds of plans are compared on each mesh whose axes ``stage`` and ``data`` are over the units of the cluster, and
all others inside a unit: pipelines, whose device order and depths are chosen (``device_order``, ``depth_split``), and
replicas of the whole model. These get equal rows, or rows by their speed, and where the memory of some is too small,
shares of the optimizer state by their memory (``uneven_rows``). All other memory is that of the one program that all
devices run: the buffers of a pipeline are as large as its deepest stage needs, on all devices, so the smallest memory
decides how deep a stage may be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.plan import layout_search
from jaxllm.plan.formulas.calibration import DEFAULT, Calibration
from jaxllm.plan.unequal.depth_split import DepthSplit, depth_splits
from jaxllm.plan.unequal.device_order import DeviceOrder, OrderCosts, best_order
from jaxllm.plan.unequal.unequal_cluster import UnequalCluster
from jaxllm.plan.unequal.uneven_rows import share_weights, split_rows
from jaxllm.plan.unequal.unit_cost import ReplicaUnitCost, StageUnitCost, replica_unit_cost, stage_unit_cost
from jaxllm.train import RunConfig
from jaxllm.train.combinations import refused
from sharding import MeshSpec


@dataclass(frozen=True)
class UnequalPlan:
    """Plan of a run on an unequal cluster.

    Attributes:
        run: the run, with its mesh, device order, depths and all other choices made.
        mesh: the run's mesh, parsed.
        seconds: of a step, predicted.
        parts: seconds of the step by cause: they add up.
        limit: what takes the largest part.
        order: unit at each place of stages and replicas, stage by stage. [U]
        depths: layers of each stage, or groups of them where a pattern repeats; empty without stages.
        rows: rows of a step on each unit, in the cluster's order. [U]
        state: share of the optimizer state that a device of each unit holds of what its place in the units has. [U]
        memory: bytes of a device, by unit. [U]
        even: seconds of the same layout in the file's order, with layers split evenly; None where that does not fit.
        splits: non-dominated splits of the layers in this order; empty without stages.
    """

    run: RunConfig
    mesh: MeshSpec
    seconds: float
    parts: dict[str, float]
    limit: str
    order: tuple[int, ...]
    depths: tuple[int, ...]
    rows: tuple[int, ...]
    state: tuple[float, ...]
    memory: tuple[int, ...]
    even: float | None
    splits: tuple[DepthSplit, ...]


class UnequalSearchResult(NamedTuple):
    """Result of a search on an unequal cluster.

    Attributes:
        plans: those that fit, the fastest of each mesh, fastest first.
        tried: number of layouts.
        least: bytes above the limit of a device in the layout that comes nearest, if none fits; 0 where none is legal.
    """

    plans: tuple[UnequalPlan, ...]
    tried: int
    least: int


def search_unequal(run: RunConfig, cluster: UnequalCluster, calibration: Calibration = DEFAULT) -> UnequalSearchResult:
    """Searches layouts of a run on an unequal cluster.

    The run's own mesh, remat, accumulate and parallel settings are ignored; its model, data and batch are kept. Of
    pipelines the schedule 1F1B is searched, whose formula holds for stages of unequal length, with nothing offloaded.

    Raises:
        ConfigError: the run has outer steps or compressed gradients, whose memory and time have no formula.
    """
    layout_search.check_formulas(run)
    plans: list[UnequalPlan] = []
    over: list[int] = []
    for mesh in unit_meshes(run, cluster):
        of_mesh = _of_stages if dict(mesh.axes).get("stage", 1) > 1 else _of_replicas
        plans += of_mesh(list(_layouts(run, mesh)), mesh, cluster, calibration, over)
    plans.sort(key=lambda plan: (round(plan.seconds, 9), str(plan.mesh)))
    return UnequalSearchResult(tuple(plans), len(over), 0 if plans else min(over, default=0))


def unit_meshes(run: RunConfig, cluster: UnequalCluster) -> Iterator[MeshSpec]:
    """Meshes whose ``stage`` and ``data`` are over the units of a cluster, and all other axes inside a unit."""
    one_kind = len(run.model.segments) == 1
    for mesh in layout_search.meshes(run, cluster.as_if_equal(0)):
        sizes = dict(mesh.axes)
        stages = sizes.get("stage", 1)
        if sizes.get("data", 1) * stages == len(cluster.units) and (stages == 1 or one_kind):
            yield mesh


def _layouts(run: RunConfig, mesh: MeshSpec) -> Iterator[RunConfig]:
    stages = dict(mesh.axes).get("stage", 1)
    for laid in layout_search.legal_layouts(run, mesh):
        if stages == 1 or (laid.parallel.schedule == "1f1b" and not laid.parallel.offload):
            yield laid


def _of_stages(
    layouts: list[RunConfig], mesh: MeshSpec, cluster: UnequalCluster, calibration: Calibration, over: list[int]
) -> list[UnequalPlan]:
    """The fastest pipeline on a mesh; the bytes of each layout above the limit are appended to ``over``."""
    sizes, units = dict(mesh.axes), cluster.units
    stages, replicas = sizes["stage"], sizes.get("data", 1)
    candidates: list[tuple[float, int, OrderCosts, list[StageUnitCost]]] = []
    for place, laid in enumerate(layouts):
        costs = [stage_unit_cost(laid, mesh, cluster, group, calibration) for group in range(len(cluster.groups))]
        layers, most = sum(repeats for _, repeats in laid.model.segments), min(one.deepest for one in costs)
        over.append(max(one.memory(-(-layers // stages)) - one.limit for one in costs))
        if most * stages < layers:
            continue
        of = [costs[unit.group] for unit in units]
        given = OrderCosts(
            stages,
            replicas,
            tuple(one.layer for one in of),
            tuple(one.head for one in of),
            of[0].message,
            of[0].sums,
            of[0].ends,
            of[0].moved,
            cluster.links,
            layers,
            most,
            laid.accumulate,
        )
        candidates.append((given.bound(), place, given, of))
    best: tuple[DeviceOrder, int, OrderCosts, list[StageUnitCost]] | None = None
    for bound, place, given, of in sorted(candidates, key=lambda one: one[:2]):
        known = math.inf if best is None else best[0].seconds
        if bound >= known:
            break
        found = best_order(given, known)
        if found is not None and found.seconds < known:
            best = found, place, given, of
    return [] if best is None else [_pipeline(layouts[best[1]], mesh, cluster, best[0], best[2], best[3])]


def _pipeline(
    laid: RunConfig,
    mesh: MeshSpec,
    cluster: UnequalCluster,
    found: DeviceOrder,
    given: OrderCosts,
    of: list[StageUnitCost],
) -> UnequalPlan:
    units, stages, replicas = cluster.units, given.stages, given.replicas
    depths, micro = found.split.depths, laid.accumulate
    even = len(set(depths)) == 1
    layer, beside = given.stages_of(found.order)
    busy = [f + d * one for one, f, d in zip(layer, beside, depths, strict=True)]
    slow = busy.index(found.split.slowest)
    sent = 0.0 if slow == stages - 1 else beside[slow]
    parts = {
        "compute": micro * (busy[slow] - sent),
        "messages": micro * sent,
        "bubble": found.split.total - found.split.slowest,
        "sums": found.sums,
        "weights": found.moved,
    }
    rows = given.rows(found.order)
    named = [", ".join(dict.fromkeys(cluster.groups[units[u].group].name for u in row)) for row in rows]
    blame = {
        "compute": f"stage {slow} on {named[slow]}, which computes longest",
        "messages": f"messages from stage {slow} on {named[slow]} to {named[min(slow + 1, stages - 1)]}",
        "bubble": f"the bubble of {stages} stages with {micro} micro-batches",
        "sums": "sums of gradients between replicas",
        "weights": "weights that stages bring to where they are used",
    }
    plain = given.placed_evenly(range(len(units)))
    # The mesh has data outside of stage: devices of a replica are neighbours in its order.
    ordered = tuple(row[r] for r in range(replicas) for row in rows)
    run = dataclasses.replace(
        laid,
        parallel=dataclasses.replace(laid.parallel, depths=() if even else depths),
        device_order=() if ordered == tuple(range(len(units))) else ordered,
    )
    deepest = max(depths)
    return UnequalPlan(
        run,
        mesh,
        found.seconds,
        parts,
        blame[max(parts, key=lambda name: parts[name])],
        found.order,
        depths,
        (laid.data.batch_size // replicas,) * len(units),
        (1.0,) * len(units),
        tuple(one.memory(deepest) for one in of),
        None if plain is None else plain.seconds,
        tuple(depth_splits(layer, beside, given.layers, given.most)),
    )


def _of_replicas(
    layouts: list[RunConfig], mesh: MeshSpec, cluster: UnequalCluster, calibration: Calibration, over: list[int]
) -> list[UnequalPlan]:
    """The fastest replicas on a mesh; ``over`` as above."""
    best: UnequalPlan | None = None
    for laid in layouts:
        costs = [replica_unit_cost(laid, mesh, cluster, group, calibration) for group in range(len(cluster.groups))]
        above, found = _replicas(laid, mesh, cluster, costs)
        over.append(above)
        for plan in found:
            if best is None or plan.seconds < best.seconds:
                best = plan
    return [] if best is None else [best]


def _replicas(
    laid: RunConfig, mesh: MeshSpec, cluster: UnequalCluster, costs: list[ReplicaUnitCost]
) -> tuple[int, list[UnequalPlan]]:
    units, micro = cluster.units, laid.accumulate
    of, limits = [costs[unit.group] for unit in units], [cluster.groups[unit.group].limit for unit in units]
    link = min(rate for row in cluster.links for rate in row)
    sums, sums_once = (max(getattr(one, name) for one in of) / link for name in ("sums", "sums_once"))
    a_batch = laid.data.batch_size // (micro * len(units))  # rows of a unit's micro-batch
    memory = [one.memory.total for one in of]
    over = max(size - limit for size, limit in zip(memory, limits, strict=True))

    def plan(counts: tuple[int, ...], weights: tuple[int, ...], own_counts: bool) -> UnequalPlan:
        ready = [one.fixed + n * one.micro_batch for one, n in zip(of, counts, strict=True)]
        slow = max(range(len(units)), key=lambda u: ready[u])
        sent = sums_once if own_counts else sums
        state = tuple(one / sum(weights) for one in weights) if weights else (1.0,) * len(units)
        # New parameters are all-gathered, with room for the largest slice.
        moved = (len(units) - 1) * max(state) * of[0].memory.parameters / link if weights else 0.0
        parts = {"compute": ready[slow], "sums": sent, "weights": moved}
        where = cluster.groups[units[slow].group].name
        limit = (
            f"{where}, which computes longest" if ready[slow] >= sent else f"sums of gradients at {link / 1e9:.3g} GB/s"
        )
        if moved > max(ready[slow], sent):
            limit = f"new parameters at {link / 1e9:.3g} GB/s"
        parallel = dataclasses.replace(laid.parallel, micro_batches=counts if own_counts else (), state_shares=weights)
        held = [
            round(one.memory.total - (1 - share) * one.memory.optimizer) for one, share in zip(of, state, strict=True)
        ]
        ready_even = max(one.fixed + micro * one.micro_batch for one in of) + sums
        return UnequalPlan(
            dataclasses.replace(laid, parallel=parallel),
            mesh,
            ready[slow] + sent + moved,
            parts,
            limit,
            tuple(range(len(units))),
            (),
            tuple(a_batch * n for n in counts),
            state,
            tuple(held),
            ready_even if over <= 0 else None,
            (),
        )

    weights: tuple[int, ...] | None = ()
    if over > 0:
        room = [limit - one.memory.total + one.memory.optimizer for one, limit in zip(of, limits, strict=True)]
        weights = share_weights(room, of[0].memory.optimizer)
        shared = dataclasses.replace(laid, parallel=dataclasses.replace(laid.parallel, state_shares=weights or ()))
        if weights is None or refused(shared, dict(mesh.axes)):
            return over, []
    found = [plan((micro,) * len(units), weights, False)]
    if micro > 1 and sums_once_a_step(laid, mesh):
        counts = split_rows([one.micro_batch for one in of], [one.fixed for one in of], micro * len(units))
        if len(set(counts)) > 1 or sums_once < sums:
            found.append(plan(counts, weights, True))
    return over, found


def sums_once_a_step(run: RunConfig, mesh: MeshSpec) -> bool:
    """Whether the costs of replicas hold for uneven rows, which sum gradients over ``data`` once a step.

    Inside a replica gradients are then summed in each micro-batch, as ZeRO 2 and 3 do, and ZeRO-1 does not.
    """
    return run.parallel.zero != 1 or all(size == 1 for name, size in mesh.axes if name not in ("data", "tensor"))
