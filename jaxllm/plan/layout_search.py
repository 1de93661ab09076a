"""Layout search: ranks parallel layouts of a run on a cluster by predicted step time.

The cost model evaluates every mesh over the useful axes, remat policies, micro-batches, pipeline schedules and shares
of offloaded layers. Layouts that the model or the batch does not fit are skipped (by the checks of ``jaxllm train``),
and so are dominated ones: of the same mesh and policy, one that fits with fewer micro-batches is never slower
(dominance pruning, Galvatron, arXiv:2211.13878). Nothing is compiled, and the result is deterministic.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from jaxllm.config import ConfigError
from jaxllm.lazy import lazy_exports
from jaxllm.models import DecoderConfig
from jaxllm.parallel.mesh_search import factorings
from jaxllm.parallel.parallel_config import ParallelConfig
from jaxllm.parallel.pipeline.stage_layout import assign_units
from jaxllm.plan.document_batch import DocumentBatch
from jaxllm.plan.formulas import memory_estimate as memory
from jaxllm.plan.formulas import step_time as time
from jaxllm.plan.formulas.calibration import DEFAULT, Calibration
from jaxllm.plan.formulas.device_work import DeviceWork, architecture, leaves_of, rules_of
from jaxllm.plan.formulas.layer_parts import layered_work
from jaxllm.plan.formulas.memory_estimate import MemoryEstimate
from jaxllm.plan.formulas.step_time import StepTime, is_mixture
from jaxllm.plan.hardware import Cluster
from jaxllm.train import RunConfig
from jaxllm.train.combinations import check_combinations
from jaxllm.train.run import check_batch
from jaxllm.train.step.pipelined_loss import stage_depths
from sharding import AXES, MeshSpec, Rules, ShardingError
from sharding.folding import FOLDED, legal

REMATS = ("none", "elementwise", "full")
"""Remat policies, from the fastest to the one that saves least."""
OFFLOADS = (0.0, 0.5, 1.0)
"""Shares of a stage's layers whose activations are offloaded to host memory; only pipelines support it."""
MOST_MICRO_BATCHES = 64
LONG_ROW = 32_768
"""Sequence length from which on the sequence is split over devices; shorter ones are split by batch."""
ROOM = {"tpu": 1.0, "gpu": 0.92}
"""Fraction of HBM that a layout may fill: the TPU compiler knows the capacity; on GPUs, NCCL and cuBLAS take some, and
the process must be given this much (XLA_PYTHON_CLIENT_MEM_FRACTION).
"""


@dataclass(frozen=True)
class ParallelLayout:
    """Parallel layout of a run, with its predicted memory and step time.

    Attributes:
        run: the run, with its mesh and all other choices made.
        mesh: the run's mesh, parsed.
        memory: memory estimate of a device.
        time: predicted step time.
        limit: bytes of a device that may be filled.
    """

    run: RunConfig
    mesh: MeshSpec
    memory: MemoryEstimate
    time: StepTime
    limit: int

    @property
    def fits(self) -> bool:
        """True if the memory estimate is within the limit."""
        return self.memory.total <= self.limit

    @property
    def over(self) -> int:
        """Bytes above the limit."""
        return max(0, self.memory.total - self.limit)


@dataclass(frozen=True)
class LayoutSearchResult:
    """Result of a layout search.

    Attributes:
        layouts: layouts that fit, fastest first.
        nearest: the layout that is least over the limit, if none fits; None where some fit or nothing is legal.
        tried: number of layouts predicted.
    """

    layouts: tuple[ParallelLayout, ...]
    nearest: ParallelLayout | None
    tried: int


def search(
    run: RunConfig,
    cluster: Cluster,
    *,
    calibration: Calibration = DEFAULT,
    documents: DocumentBatch | None = None,
) -> LayoutSearchResult:
    """Searches all layouts of a run on a cluster; those that fit, fastest first, the best one of each mesh.

    The run's own mesh, remat, accumulate and parallel settings are ignored; its model, data and batch are kept.

    Args:
        run, cluster, calibration: what is planned.
        documents: a batch of it, by which attention is predicted, and context by need is searched too; None: whole
            rows.

    Raises:
        ConfigError: the run has outer steps or compressed gradients, whose memory and time have no formula.
    """
    check_formulas(run)
    limit = memory_limit(cluster)
    fitting: list[ParallelLayout] = []
    nearest: tuple[int, RunConfig, MeshSpec, MemoryEstimate] | None = None
    tried = 0
    for mesh in meshes(run, cluster, documents):
        for runs in _families(run, mesh, documents):
            for laid in runs:
                if not is_supported(laid, mesh):
                    continue
                tried += 1
                work = _work(laid, mesh, documents)
                taken = memory.predict_work(work, cluster.topology)
                over = taken.total - limit
                if over <= 0:
                    fitting.append(_predicted(laid, work, taken, cluster, calibration, limit, documents))
                    break  # the rest of the family computes or communicates more
                if nearest is None or over < nearest[0]:
                    nearest = over, laid, mesh, taken
    fitting.sort(key=lambda layout: (round(layout.time.seconds, 9), layout.memory.total, str(layout.mesh)))
    least = None
    if not fitting and nearest is not None:
        _, laid, mesh, taken = nearest
        least = _predicted(laid, _work(laid, mesh, documents), taken, cluster, calibration, limit, documents)
    return LayoutSearchResult(tuple(_distinct(fitting)), least, tried)


def check_formulas(run: RunConfig) -> None:
    """Checks that there are formulas for a run's memory and time.

    Raises:
        ConfigError: the run has outer steps or compressed gradients, or recurrent layers.
    """
    if not all(block.attention.has_keys for block in (*run.model.prefix, *run.model.pattern)):
        raise ConfigError(
            "a layout search has no formula for recurrent layers: give a mesh of data, fsdp and tensor yourself; "
            "`jaxllm compile` has its memory and FLOPs."
        )
    for given, setting in ((run.outer.kind != "none", "outer.kind"), (bool(run.grads.compress), "grads.compress")):
        if given:
            raise ConfigError(
                f"a layout search has no formula for {setting}: leave it out and plan the devices and the batch of one "
                "replica, then give the mesh replica=R (or data=R) in front; `jaxllm shard` prints the bytes between "
                "them."
            )


def predict_layout(
    run: RunConfig,
    mesh: MeshSpec,
    cluster: Cluster,
    calibration: Calibration = DEFAULT,
    limit: int | None = None,
    documents: DocumentBatch | None = None,
) -> ParallelLayout:
    """Prediction for a run as it is, on a legal mesh."""
    work = _work(run, mesh, documents)
    taken, limit = memory.predict_work(work, cluster.topology), memory_limit(cluster) if limit is None else limit
    return _predicted(run, work, taken, cluster, calibration, limit, documents)


def _work(run: RunConfig, mesh: MeshSpec, documents: DocumentBatch | None) -> DeviceWork:
    return layered_work(run, mesh) if documents is None else documents.work(run, mesh).on(mesh)


def _predicted(
    run: RunConfig,
    work: DeviceWork,
    taken: MemoryEstimate,
    cluster: Cluster,
    calibration: Calibration,
    limit: int,
    documents: DocumentBatch | None,
) -> ParallelLayout:
    took = time.predict_work(work, cluster, calibration)
    if documents is not None:
        took = dataclasses.replace(took, flops=documents.model_flops(run.model))
    return ParallelLayout(run, work.mesh, taken, took, limit)


def suggest_fitting(run: RunConfig, cluster: Cluster) -> str:
    """Sentence with the nearest change that makes the run fit: more devices, fewer rows, or shorter ones; "" if none
    is found.
    """
    said = []
    for factor in (2, 4, 8):
        more = cluster.resized(factor)
        if more is not None and (found := search(run, more)).layouts:
            said.append(f"on {more.name} it fits: {found.layouts[0].mesh}")
            break
    data = run.data
    for rows, length in [(data.batch_size // n, data.seq_len) for n in (2, 4, 8)] + [
        (data.batch_size, data.seq_len // n) for n in (2, 4, 8)
    ]:
        if rows < 1 or length < 128:
            continue
        less = dataclasses.replace(run, accumulate=1, data=dataclasses.replace(data, batch_size=rows, seq_len=length))
        if (found := search(less, cluster)).layouts:
            what = "data.batch-size" if length == data.seq_len else "data.seq-len"
            value = rows if length == data.seq_len else length
            said.append(f"with --{what} {value} it fits here: {found.layouts[0].mesh}")
            break
    return ("; ".join(said) + ".").capitalize() if said else ""


def memory_limit(cluster: Cluster) -> int:
    """Bytes of a device that a layout may fill."""
    return int(cluster.hardware.hbm_bytes * ROOM[cluster.topology.platform])


def meshes(run: RunConfig, cluster: Cluster, documents: DocumentBatch | None = None) -> Iterator[MeshSpec]:
    """Candidate meshes over the axes that can help this run, in a fixed order."""
    devices = cluster.devices
    neighbours = cluster.topology.shape[-1] if cluster.topology.platform == "gpu" else 16
    engine = run.engine_beside
    # An engine on the run's own mesh does not serve over stages.
    names = ["data", "fsdp"] if engine is not None and not engine.mesh else ["data", "stage", "fsdp"]
    if run.data.seq_len >= LONG_ROW or documents is not None:
        names.append("context")
    if is_mixture(run):
        names.append("expert")
    if run.parallel.tensor != "1d":  # 2D tensor parallelism is tried where the run asks for it
        names.append("features")
    names.append("tensor")
    outside = cluster.topology.slices
    for sizes in factorings(devices, len(names)):
        size = dict(zip(names, sizes, strict=True))
        columns = size["tensor"] * size.get("features", 1)
        if (
            columns > neighbours
            or size.get("features", 1) > size["tensor"]
            or size.get("stage", 1) > min(64, run.model.layers)
        ):
            continue
        if is_mixture(run) and size["expert"] * columns > devices:
            continue
        ways = size["data"] * size["fsdp"] * size.get("expert", 1)
        if run.data.batch_size % ways:
            continue
        axes = tuple((name, size[name]) for name in AXES if size.get(name, 1) > 1)
        mesh = MeshSpec(axes or (("data", 1),))
        if outside > 1 and not _divides(mesh, outside):
            continue
        yield mesh


def legal_layouts(run: RunConfig, mesh: MeshSpec) -> Iterator[RunConfig]:
    """All legal layouts of a run on a mesh, with experts that are not folded: remat, ZeRO stages, micro-batches, and of
    pipelines schedules and shares of offloaded layers; whether they fit or not.
    """
    for family in _families_of(run, mesh, ""):
        yield from (laid for laid in family if is_supported(laid, mesh))


def _families(run: RunConfig, mesh: MeshSpec, documents: DocumentBatch | None = None) -> Iterator[Iterator[RunConfig]]:
    """Candidate runs on a mesh, in groups whose first fitting member is the fastest."""
    for experts in foldings(run, mesh):
        yield from _families_of(run, mesh, experts)
        if documents is not None and dict(mesh.axes).get("context", 1) > 1 == dict(mesh.axes).get("stage", 1):
            yield from _by_need(run, mesh, experts)


def _by_need(run: RunConfig, mesh: MeshSpec, experts: str) -> Iterator[Iterator[RunConfig]]:
    """Candidate runs with context by need: slots as long as micro-batches of all sizes make them."""
    sequence = dict(mesh.axes).get("tensor", 1) > 1
    plan = dataclasses.replace(
        run.parallel,
        context="by_need",
        slot=0,
        tensor="1d",
        layers="tensor",
        micro_batches=(),
        state_shares=(),
        sequence=sequence,
        overlap="compiler",
        experts=experts,
    )
    for n in range(1, MOST_MICRO_BATCHES + 1):
        if run.data.batch_size % n == 0 and _legal(run, plan, mesh, n):
            for remat, zero in itertools.product(REMATS, (3, 2, 1)):
                yield iter([_laid(run, plan, mesh, n, remat, zero)])


def foldings(run: RunConfig, mesh: MeshSpec) -> Iterator[str]:
    """Candidate foldings of a run's experts on a mesh (``ParallelConfig.experts``): none first, then all others.

    Outside of experts the mesh axis ``expert`` is as ``fsdp``: where a folding treats both alike, it is that of the
    mesh which has them as one axis, and left out here.
    """
    yield ""
    size = dict(mesh.axes)
    plain = {name: tuple(axis for axis in (name,) if size.get(axis, 1) > 1) for name in ("expert", "tensor")}
    mixtures = list(run.model.mixtures.values())
    if not mixtures:
        return
    neighbours = plain["expert"] and size.get("context", 1) == 1
    for folding in dict.fromkeys(legal(tuple((axis, size[axis]) for axis in FOLDED if size.get(axis, 1) > 1))):
        table = folding.table(size)
        shards, width = table["experts"], table["expert_mlp"]
        if (shards, width) == (plain["expert"], plain["tensor"]):
            continue
        if neighbours and all(("fsdp" in axes) == ("expert" in axes) for axes in (shards, width)):
            continue
        if all(moe.experts % folding.expert == 0 == moe.hidden % folding.tensor for moe in mixtures):
            yield str(folding)


def _families_of(run: RunConfig, mesh: MeshSpec, experts: str) -> Iterator[Iterator[RunConfig]]:
    size = dict(mesh.axes)
    ways = math.prod(size.get(name, 1) for name in ("data", "fsdp", "expert"))
    rows, stages = run.data.batch_size // ways, size.get("stage", 1)
    micro = [n for n in range(1, MOST_MICRO_BATCHES + 1) if rows % n == 0]
    plan = dataclasses.replace(
        run.parallel,
        tensor="1d",
        layers="tensor",
        micro_batches=(),
        state_shares=(),
        sequence=size.get("tensor", 1) > 1,
        overlap="compiler",
        context="ring",
        slot=0,
        experts=experts,
        chunks=0,
        depths=(),
        offload=0.0,
        offload_chunks="all",
    )
    if stages == 1:
        if not _legal(run, plan, mesh, 1):
            return
        for remat, zero in itertools.product(REMATS, (3, 2, 1)):  # with one micro-batch, ZeRO-1 and ZeRO-2 are the same
            yield (_laid(run, plan, mesh, n, remat, zero) for n in micro if zero > 1 or n > 1)
        return
    for accumulate in (n for n in micro if n >= 2 * stages or n == micro[-1]):
        for name, depths in _schedules(run, stages, accumulate):
            staged = dataclasses.replace(plan, schedule=name, depths=depths)
            if _legal(run, staged, mesh, accumulate):
                for zero, share in itertools.product((2, 3), OFFLOADS if name == "1f1b" else (0.0,)):
                    away = dataclasses.replace(staged, offload=share)
                    for remat in REMATS:
                        yield iter([_laid(run, away, mesh, accumulate, remat, zero)])


def _laid(run: RunConfig, plan: ParallelConfig, mesh: MeshSpec, accumulate: int, remat: str, zero: int) -> RunConfig:
    return dataclasses.replace(
        run,
        mesh=str(mesh),
        device_order=(),
        accumulate=accumulate,
        parallel=dataclasses.replace(plan, zero=zero),  # type: ignore[arg-type]
        model=_recomputing(run.model, remat),
    )


@functools.lru_cache(maxsize=64)
def _recomputing(model: DecoderConfig, remat: str) -> DecoderConfig:
    """Model with a remat policy: one object for all layouts, so that what it caches is computed once."""
    return dataclasses.replace(model, remat=remat)  # type: ignore[arg-type]


def plain_layouts(run: RunConfig, mesh: MeshSpec) -> Iterator[RunConfig]:
    """Legal layouts of a run on a mesh without stages, with ZeRO-3, full remat and experts that are not folded: one for
    each number of micro-batches.
    """
    for family in _families_of(run, mesh, ""):
        for laid in family:
            if laid.model.remat == "full" and laid.parallel.zero == 3 and is_supported(laid, mesh):
                yield laid


def is_legal(run: RunConfig, mesh: MeshSpec) -> bool:
    """True if parameters and micro-batch of a run fit a mesh, and its settings go together."""
    return _legal(run, run.parallel, mesh, run.accumulate) and is_supported(run, mesh)


def _legal(run: RunConfig, plan: ParallelConfig, mesh: MeshSpec, accumulate: int) -> bool:
    """True if parameters, micro-batch and pipeline fit the mesh, by the checks of training."""
    laid = dataclasses.replace(run, parallel=plan, accumulate=accumulate)
    try:
        if (stages := dict(mesh.axes).get("stage", 1)) > 1:
            stage_depths(laid, stages)
        check_batch(laid, mesh.abstract(), rules_of(plan))
    except ValueError:
        return False
    return _parameters_fit(architecture(run.model), rules_of(plan), mesh)


@functools.lru_cache(maxsize=4096)
def _parameters_fit(config: DecoderConfig, rules: Rules, mesh: MeshSpec) -> bool:
    abstract = mesh.abstract()
    try:
        for leaf in leaves_of(config):
            rules.spec(leaf.axes, abstract, leaf.shape, what=leaf.name)
    except ShardingError:
        return False
    return True


def is_supported(run: RunConfig, mesh: MeshSpec) -> bool:
    """True if the run's optimizer, and its other settings, support the layout."""
    try:
        check_combinations(run, dict(mesh.axes))
    except ConfigError:
        return False
    return True


def _schedules(run: RunConfig, stages: int, accumulate: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if stages == 1:
        yield run.parallel.schedule, ()
        return
    repeats = [repeats for _, repeats in run.model.segments]
    # "interleaved" has the bubble of "gis", and holds more.
    for name, chunks in (("1f1b", 1), ("gis", 2), ("zb_h1", 1)):
        if sum(repeats) < stages * chunks or (name == "gis" and accumulate % stages):
            continue
        depths = assign_units(repeats, stages * chunks)
        yield name, () if depths.even or chunks > 1 else tuple(int(n) for n in depths.counts.sum(1))


def _divides(mesh: MeshSpec, slices: int) -> bool:
    try:
        mesh.between(slices)
    except ValueError:
        return False
    return True


def _distinct(layouts: list[ParallelLayout]) -> Iterator[ParallelLayout]:
    """Fastest layout of each mesh, whatever its micro-batches and schedule."""
    seen: set[MeshSpec] = set()
    for layout in layouts:
        if layout.mesh not in seen:
            seen.add(layout.mesh)
            yield layout


__getattr__, _ = lazy_exports(
    __name__,
    {__name__: ("ParallelLayout", "predict_layout")},
    renamed={"Layout": "ParallelLayout", "predicted": "predict_layout"},
)
