"""Pipeline schedule as text and as a PNG: one row per stage, time to the right."""

from __future__ import annotations

import math
from pathlib import Path

from jaxllm.parallel.pipeline.schedule import UNIT, OpCosts, PipelineOp, Schedule

COLORS = {"F": ("#9db4d0", "#d3deec"), "B": ("#c4501b", "#e9a37f"), "W": ("#5f8a3c", "#b4d196")}
KIND_LABELS = {"F": "forward", "B": "backward", "W": "weight gradients"}


def text(schedule: Schedule, costs: OpCosts = UNIT, *, width: int = 160) -> str:
    """Schedule as text: summary and, where it fits ``width`` characters, a row for each stage.

    A cell is an operation: F, B or W and the index of its micro-batch, in lower case for later chunks (with more than
    two chunks, followed by the index of the chunk). Its width is its duration.
    """
    rows = schedule.timeline(costs)
    unit = min(schedule.duration(op, costs) for op in schedule.orders[0])
    cells = [[(_name(t.op, schedule), round(t.start / unit), round(t.end / unit)) for t in row] for row in rows]
    whole = all(math.isclose(t.start / unit, round(t.start / unit), abs_tol=1e-6) for row in rows for t in row)
    size = 1 + max(len(name) for row in cells for name, _, _ in row)
    end = max(stop for row in cells for _, _, stop in row)
    lines = [facts(schedule, costs)]
    if not whole:
        lines.append("Not drawn as text: the durations of the operations have no common unit. --png draws them.")
    elif 10 + end * size > width:
        lines.append(
            f"Not drawn as text: it is {10 + end * size} characters wide. --width {10 + end * size}, or --png."
        )
    else:
        for stage, row in enumerate(cells):
            line = [" "] * (end * size)
            for name, start, stop in row:
                line[start * size : stop * size - 1] = list(name.ljust(stop * size - start * size - 1, "-"))
            lines.append(f"stage {stage:<3} " + "".join(line).rstrip())
    return "\n".join(lines)


def facts(schedule: Schedule, costs: OpCosts = UNIT) -> str:
    """Summary of a schedule: sizes, pipeline bubble and activation memory."""
    s = schedule
    peaks = ", ".join(f"{peak:g}" for peak in s.peaks)
    return "\n".join(
        [
            f"{s.name}: {s.stages} stages, {s.micro_batches} micro-batches"
            + (f", {s.chunks} chunks per stage{' in V' if s.vee else ''}" if s.chunks > 1 else ""),
            f"bubble {s.bubble(costs):.1%} of the busiest stage, {s.idle(costs):.1%} of all stages from first to last"
            f" (F {costs.F:g}, B {costs.B:g}, W {costs.W:g})",
            f"peak of saved activations: {s.peak:g} micro-batches of a stage's layers ({peaks} by stage); "
            f"gpipe would hold {s.micro_batches}, 1f1b {min(s.stages, s.micro_batches)}",
        ]
    )


def draw(schedule: Schedule, file: Path, costs: OpCosts = UNIT) -> None:
    """Draws the schedule, and below it the saved activations of each stage over time, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = schedule.timeline(costs)
    end = max(row[-1].end for row in rows)
    inches = min(30.0, max(9.0, end / 3.2))
    figure = Figure(figsize=(inches, 1.7 + 0.36 * schedule.stages + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[0.4 + 0.36 * schedule.stages, 1.6])
    room = 72 * (inches - 1) / end  # points of a unit of time
    for stage, row in enumerate(rows):
        for op, start, stop in row:
            color = COLORS[op.kind][min(op.chunk, 1)]
            top.barh(stage, stop - start, left=start, height=0.92, color=color, edgecolor="white", linewidth=0.6)
            if room * (stop - start) > 9:
                dark = color in (COLORS["B"][0], COLORS["W"][0])
                top.text((start + stop) / 2, stage, str(op.micro), ha="center", va="center", fontsize=7,
                         color="white" if dark else "black")  # fmt: skip
        held = [count / schedule.chunks for count in schedule.live(stage)]
        # An activation is live from the start of F to the end of its last use.
        times = [t.start if t.op.kind == "F" else t.end for t in row]
        shade = 0.15 + 0.75 * stage / max(1, schedule.stages - 1)
        color = (0.1, 0.7 * shade, 0.6 - 0.4 * shade)
        bottom.step([0.0, *times, end], [0.0, *held, held[-1]], where="post", color=color, linewidth=1.2)
    top.set_ylim(schedule.stages - 0.5, -0.5)
    top.set_yticks(range(schedule.stages), [f"stage {s}" for s in range(schedule.stages)])
    bottom.set_ylabel("micro-batches held")
    bottom.set_ylim(bottom=0)
    bottom.set_xlim(0, end)
    bottom.set_xlabel(f"time (F {costs.F:g}, B {costs.B:g}, W {costs.W:g}); below, a line for each stage")
    title, bubble, memory = facts(schedule, costs).split("\n")
    top.set_title(f"{title}\n{bubble}\n{memory}", fontsize=9, loc="left")
    legend = []
    for kind in schedule.kinds:
        what = KIND_LABELS[kind] if schedule.split or kind == "F" else "backward, with weight gradients"
        legend.append(Patch(color=COLORS[kind][0], label=what))
        if schedule.chunks > 1:
            legend.append(Patch(color=COLORS[kind][1], label=f"{KIND_LABELS[kind]}, later chunk"))
    figure.legend(handles=legend, frameon=False, fontsize=7, ncols=len(legend), loc="outside lower center")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    bottom.grid(alpha=0.25)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}")
    figure.savefig(temporary, dpi=110, format="png")
    temporary.replace(file)


def _name(op: PipelineOp, schedule: Schedule) -> str:
    letter = op.kind if op.chunk == 0 else op.kind.lower()
    return f"{letter}{op.micro}" + (f".{op.chunk}" if schedule.chunks > 2 and op.chunk else "")
