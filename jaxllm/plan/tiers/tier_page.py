"""Page of a layout with files: live bytes over the step on the device, in its host's memory and on disk; a timeline."""

from __future__ import annotations

from html import escape

from jaxllm.compiler import program_charts
from jaxllm.compiler.program_report import STYLE
from jaxllm.plan.hardware import Cluster
from jaxllm.plan.layout_search import ParallelLayout
from jaxllm.plan.tiers.streamed_moments import KINDS, played_lanes, step_moments, step_tasks
from jaxllm.svg import page, table
from sharding.topology import GIB

COLORS: dict[str, str] = dict(zip(KINDS, ("k8", "c1", "c5", "c0", "k7"), strict=True))
TIERS = {
    "device": "memory of a device",
    "host": "memory of its host, one device's share",
    "disk": "files, one device's share; of state twice, as while a checkpoint is written",
}


def tier_page(layout: ParallelLayout, cluster: Cluster) -> str:
    """HTML page of a layout with files, by formula.

    Args:
        layout: whose run has files.
        cluster: devices.

    Raises:
        ConfigError: the planner has no formula for the optimizer.
    """
    moments = step_moments(layout.run, layout.mesh, cluster)
    title = f"{layout.run.name} on {cluster.name}, {layout.mesh}"
    parts = [
        STYLE,
        f"<h1>{escape(title)}</h1><p class=soft>a step with files, by formula: {layout.time.seconds:.3f} s, predicted"
        "</p>",
    ]
    most = []
    for tier, what in TIERS.items():
        series = {kind: [moment.tier(tier)[kind] / GIB for moment in moments] for kind in KINDS}
        series = {kind: values for kind, values in series.items() if any(values)}
        colors = {kind: COLORS[kind] for kind in series}
        picture = program_charts.areas(
            series,
            colors,
            title=what,
            unit="GiB",
            limit=layout.limit / GIB if tier == "device" else None,
            names=[moment.name for moment in moments],
            foot=f"the programs of a step, {len(moments)}, in their order",
        )
        parts.append(f"<h2>{tier.capitalize()}</h2><figure>{picture}{program_charts.legend(colors)}</figure>")
        fullest = max(moments, key=lambda moment, tier=tier: sum(moment.tier(tier).values()))
        most.append((tier, f"{sum(fullest.tier(tier).values()) / GIB:.3f}", fullest.name))
    lanes, seconds = played_lanes(step_tasks(layout.run, layout.mesh, cluster))
    colors = dict(zip(lanes, ("c0", "c2", "c1"), strict=True))
    bars = {
        lane: [program_charts.Bar(start, end, colors[lane], f"{name}: {1e3 * (end - start):.1f} ms")
               for start, end, name in spans]
        for lane, spans in lanes.items()
    }  # fmt: skip
    picture = program_charts.lanes(bars, title="programs, and reads and writes of files", seconds=seconds)
    parts += ["<h2>Time</h2>", f"<figure>{picture}{program_charts.legend(colors)}</figure>"]
    parts.append(f'<div class="panel wide gap"><h3>The most of each tier</h3>{table(most, ("", "GiB", "while"))}</div>')
    return page(title, "".join(parts))
