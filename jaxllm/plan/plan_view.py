"""Text views of layouts: ranking, breakdown of time and memory, compiled programs, price."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.parallel.sharding_table_view import columns
from jaxllm.plan.capacity_table import without_files
from jaxllm.plan.compiled_layout import CompiledLayout, CompiledPrograms
from jaxllm.plan.formulas import offload_time
from jaxllm.plan.formulas.device_work import DeviceWork
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.layout_search import LayoutSearchResult, ParallelLayout
from jaxllm.plan.training_cost import TrainingCost
from sharding.topology import GIB


def ranking(layouts: Sequence[ParallelLayout], cluster: Cluster) -> str:
    """Table of layouts, fastest first: choices, step time and its parts, memory."""
    spent = ("compute", "HBM", "ICI", "DCN", "bubble", "host")
    disk, host = (any(getattr(one.memory, tier) for one in layouts) for tier in ("disk", "host"))
    spent += ("disk",) * disk
    tiers = ("of host",) * host + ("on disk",) * disk
    head = ("", "mesh", "remat", "micro", "plan", "s/step", "MFU %", *spent, "GiB", *tiers)
    if cluster.topology.platform == "gpu":
        head = tuple({"ICI": "NVLink", "DCN": "network"}.get(name, name) for name in head)
    rows = [
        (
            str(number),
            str(layout.mesh),
            layout.run.model.remat,
            str(layout.run.accumulate),
            describe_plan(layout),
            _seconds(layout.time.seconds),
            f"{100 * layout.time.mfu(cluster.hardware.flops):.1f}",
            *(f"{100 * seconds / layout.time.seconds:.0f}%" for seconds in parts(layout, disk=disk).values()),
            f"{layout.memory.total / GIB:.1f}",
            *([f"{layout.memory.host / GIB:.1f}"] if host else []),
            *([f"{layout.memory.disk / GIB:.1f}"] if disk else []),
        )
        for number, layout in enumerate(layouts, 1)
    ]
    return columns(head, rows, "><<><" + ">" * (len(head) - 5))


def parts(layout: ParallelLayout, *, disk: bool = False) -> dict[str, float]:
    """Seconds of a step by cause; with ``disk`` those of files too."""
    time = layout.time
    near, far = sum(time.near.values()), sum(time.far.values())
    return {
        "compute": time.compute,
        "memory": time.memory,
        "near": near,
        "far": far,
        "bubble": time.bubble,
        "host": time.host,
    } | ({"disk": time.disk} if disk else {})


def describe_plan(layout: ParallelLayout) -> str:
    """Settings of a layout besides mesh, remat and micro-batches."""
    parallel, sizes = layout.run.parallel, dict(layout.mesh.axes)
    said = [f"ZeRO-{parallel.zero}"] if layout.mesh.axes != (("data", sizes.get("data", 0)),) else []
    said += ["sequence"] if parallel.sequence else []
    said += [f"layers {parallel.layers}"] if parallel.layouts() else []
    said += [f"experts {parallel.experts}"] if parallel.experts else []
    said += ["context by need"] if parallel.context == "by_need" else []
    said += [parallel.schedule] if sizes.get("stage", 1) > 1 else []
    said += [f"offload {parallel.offload:g}"] if parallel.offload else []
    said += ["state on the host"] if layout.run.host.optimizer else []
    if layout.run.disk.directory:
        files = layout.run.disk
        if files.parameters:
            saved = "inputs" if layout.run.model.remat == "full" else "inputs and values"
            saved += f" of {files.activation_layers} layers" if files.activation_layers else ""
            said += [f"{saved}, layers, state on disk" if files.activations else "layers, state on disk"]
        said += ["state on disk"] * (not files.parameters) + [f"window {files.window}"]
    return ", ".join(said)


def explained(layout: ParallelLayout, cluster: Cluster) -> str:
    """Breakdown of a layout's step time and memory."""
    time, memory = layout.time, layout.memory
    lines = [f"{layout.run.name} on {cluster.name}, {layout.mesh}: {time.seconds:.3f} s a step, predicted", ""]
    lines.append("seconds of a step")
    rows = [("arithmetic", time.compute), ("waiting for memory", time.memory)]
    rows += [(f"sent over {axes}, inside", seconds) for axes, seconds in time.near.items() if seconds]
    rows += [(f"sent over {axes}, between", seconds) for axes, seconds in time.far.items() if seconds]
    rows += [("bubble", time.bubble)] if time.bubble else []
    rows += [("to the host and back", time.host)] if time.host else []
    rows += [("files, beside the passes", time.disk)] if time.disk else []
    lines += [f"  {label:<44}{seconds:10.4f}" for label, seconds in rows]
    if any(time.hidden.values()):
        behind = ", ".join(f"{seconds:.3f} s over {axes}" for axes, seconds in time.hidden.items() if seconds > 5e-4)
        lines.append(f"  sent beside arithmetic: {behind or 'nothing to speak of'}")
    lines += ["", "GiB of a device"]
    lines += [f"  {label:<44}{size / GIB:10.3f}" for label, size in memory.parts().items()]
    lines.append(f"  {'total':<44}{memory.total / GIB:10.3f} of {layout.limit / GIB:.2f}")
    if memory.disk:
        lines.append(f"  {'in files, twice what is not activations':<44}{memory.disk / GIB:10.3f}")
    if memory.host:
        lines.append(f"  {'in the memory of its host':<44}{memory.host / GIB:10.3f}")
        forward = time.compute / 3 / layout.run.accumulate  # a third of the arithmetic
        work = DeviceWork.of(without_files(layout.run), layout.mesh)
        lines += [f"    {line}" for line in offload_time.describe(work, cluster.hardware, forward)]
    return "\n".join(lines)


def nothing_fits(found: LayoutSearchResult, cluster: Cluster, larger: str) -> str:
    """Message for a search without a fitting layout: the nearest layout, its excess, and what would fit."""
    layout = found.nearest
    if layout is None:
        return (
            f"no layout of this model and batch is legal on {cluster.name}: its {cluster.devices} devices need a batch "
            f"(data.batch_size) that divides over some of them. {larger}"
        ).rstrip()
    rows = [*layout.memory.parts().items(), ("needed", layout.memory.total), ("there is", layout.limit)]
    lines = [
        f"no layout fits {cluster.name}; the nearest is {layout.mesh}, remat {layout.run.model.remat}, "
        f"{layout.run.accumulate} micro-batches, GiB of one device",
        *(f"  {label:<44}{size / GIB:10.3f}" for label, size in [*rows, ("too much", layout.over)]),
        larger,
    ]
    return "\n".join(lines).rstrip()


def compiled(rows: Sequence[tuple[ParallelLayout, CompiledLayout | CompiledPrograms | str]]) -> str:
    """Table of predicted and compiled layouts; a string in place of a program says why it was not compiled. Of a step
    that is several programs, bytes alone."""
    head = ("", "mesh", "s/step", "compiled", "GiB", "compiled", "of it arguments", "collectives of a step", "took")
    lines = []
    for number, (layout, found) in enumerate(rows, 1):
        seconds, size = _seconds(layout.time.seconds), f"{layout.memory.total / GIB:.2f}"
        first = (str(number), str(layout.mesh), seconds)
        if isinstance(found, str):
            lines.append((*first, "", size, found, "", "", ""))
            continue
        if isinstance(found, CompiledPrograms):
            verdict = f", {(found.device - layout.limit) / GIB:.2f} too much" if found.device > layout.limit else ""
            said = f"{len(found.programs)} programs"
            lines.append((*first, "", size, f"{found.device / GIB:.2f}{verdict}", "", said, f"{found.seconds:.0f} s"))
            continue
        report = found.report
        sent = [f"{kind} over {group}: {size / GIB:.2f} GiB" for kind, group, _, size in report.by_kind()[:3]]
        verdict = "" if report.fits else f", {report.over_bytes / GIB:.2f} too much"
        memory = (size, f"{report.total_bytes / GIB:.2f}{verdict}", f"{report.argument_bytes / GIB:.2f}")
        took = f"{report.lower_seconds + report.compile_seconds:.0f} s"
        lines.append((*first, _seconds(found.seconds), *memory, "; ".join(sent) or "none", took))
    return columns(head, lines, "><>>>>><>")


def price(cost: TrainingCost, layout: ParallelLayout) -> str:
    """Time, energy and price of training on a number of tokens."""
    energy = f"{cost.megawatt_hours:,.1f} MWh" if cost.megawatt_hours is not None else "energy not known (watts)"
    money = f"${cost.dollars:,.0f}" if cost.dollars is not None else "price not known (dollars_per_hour)"
    return (
        f"{cost.tokens:,.0f} tokens with {layout.mesh}: {cost.steps:,.0f} steps, {cost.days:,.1f} days, "
        f"{cost.device_hours:,.0f} device-hours, {energy}, {money}"
    )


def _seconds(number: float) -> str:
    return f"{number:.3f}" if number >= 0.1 else f"{number:.5f}"
