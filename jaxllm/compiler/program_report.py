"""HTML report of a compiled program: memory over its schedule, timeline, roofline of its kernels, collectives.

    report = ProgramReport(compile_report, program_walker.read(text, placement), live_ranges.read(text), rates)
    Path("step.html").write_text(report.html())

In a notebook the object shows itself. The page needs no network, no script and no library.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape

from jaxllm.compiler import live_ranges, program_charts
from jaxllm.compiler.aot import CompileReport
from jaxllm.compiler.program_walker import KernelOp, Loop, Program, Step
from jaxllm.compiler.timeline import Rates, Span, Timeline, timeline
from jaxllm.svg import number, page, table

GIB = 2**30
_COLORS = {
    "arguments": "k8",
    "saved for the backward pass": "c0",
    "forward": "c2",
    "recomputed": "c4",
    "backward": "c1",
    "received": "c3",
    "optimizer": "c5",
    "results": "k6",
    "other": "k7",
}
STYLE = """<style>
polygon{fill:var(--own);stroke:none}.k6{--own:#8795a3}.k7{--own:#a9b4bf}.k8{--own:#c9d1d9}.k9{--own:#cf222e}
@media (prefers-color-scheme:dark){.k6{--own:#74828f}.k7{--own:#56626d}.k8{--own:#36424d}.k9{--own:#ff6b6b}}
h3{font-size:.95rem;margin:.3em 0}
svg .said{fill:var(--ink)}svg .limit{stroke:var(--c1);stroke-width:1.5}
svg path.loop{stroke:var(--soft);stroke-width:1}svg path.roof{stroke:var(--ink);stroke-width:1.8}
rect.lane{fill:var(--rule);opacity:.45}circle.seen{opacity:.72;stroke:var(--panel);stroke-width:1}
.legend i{height:10px;width:12px;border-radius:3px;margin-bottom:-1px}
</style>"""
_GPU = (
    "Seconds of kernels are by roofline alone, the longer of products at the peak and bytes at the memory's bandwidth: "
    "a lower bound. No compiler estimate exists for this platform."
)
_TPU = "Seconds of kernels are the TPU compiler's estimated cycles at the chip's clock."


@dataclass(frozen=True)
class KernelTable:
    """Kernels that come from one place of the program, summed.

    Attributes:
        label: the place, from jax's ``op_name``.
        times: number of runs.
        flops: FLOPs of all runs.
        bytes: bytes of all runs.
        seconds: seconds of all runs.
    """

    label: str
    times: int
    flops: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class ProgramReport:
    """Report on a compiled program.

    Attributes:
        report: memory, versions and compile time, as the compiler gives them.
        program: the schedule.
        memory: the live ranges.
        rates: rates of the devices, for seconds; None shows sizes alone.
    """

    report: CompileReport
    program: Program
    memory: live_ranges.LiveMemory
    rates: Rates | None = None

    @cached_property
    def timeline(self) -> Timeline | None:
        """Predicted timeline of one run."""
        return None if self.rates is None else timeline(self.program, self.rates)

    def kernels(self) -> list[KernelTable]:
        """Kernels by the place that they come from, longest first."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0, 0.0])
        for op, times in self.program.ops:
            seconds = self.rates.seconds(op) if self.rates is not None else float(op.bytes)
            for place, amount in enumerate((times, op.flops * times, op.bytes * times, seconds * times)):
                sums[short(op)][place] += amount
        rows = [KernelTable(label, int(n), int(f), int(b), s) for label, (n, f, b, s) in sums.items()]
        return sorted(rows, key=lambda row: -row.seconds)

    def html(self) -> str:
        """The report as one HTML page."""
        title = f"{self.report.name} on {self.report.topology}"
        return page(title, STYLE + "".join(self._parts()))

    def _repr_html_(self) -> str:
        """The page in a frame, so that its style and the notebook's do not mix."""
        return f'<iframe style="width:100%;height:900px;border:0" srcdoc="{escape(self.html())}"></iframe>'

    def _parts(self) -> list[str]:
        report = self.report
        head = (
            f"<h1>{escape(report.name)} on {escape(report.topology)}</h1><p class=soft>{report.num_devices} devices; "
            f"jax {escape(report.jax)}, {escape(report.compiler)}; traced in {report.lower_seconds:.1f} s, "
            f"compiled in {report.compile_seconds:.1f} s</p>"
        )
        parts = [head, self._tiles(), "<h2>Memory of a device</h2>", self._memory()]
        if self.timeline is not None:
            parts += ["<h2>Time</h2>", self._time()]
            parts += ["<h2>Kernels</h2>", self._kernels()]
        parts += ["<h2>Collectives</h2>", self._collectives()]
        return parts

    def _tiles(self) -> str:
        report, played = self.report, self.timeline
        there = "" if report.hbm_bytes is None else f" of {report.hbm_bytes / GIB:.2f}"
        tiles = [(f"{report.total_bytes / GIB:.2f} GiB{there}", "memory of a device")]
        if played is not None and self.rates is not None and played.seconds > 0:
            used = self.program.flops / played.seconds / self.rates.flops
            tiles += [
                (_seconds(played.seconds), "a step, predicted"),
                (f"{100 * played.compute / played.seconds:.0f}%", "computing"),
                (f"{100 * sum(played.exposed.values()) / played.seconds:.0f}%", "waiting for other devices"),
                (f"{100 * used:.0f}%", "of the peak, all products counted"),
            ]
        tiles += [
            (number(float(self.program.flops)), "FLOPs of products"),
            (number(float(self.program.bytes)), "bytes of memory"),
        ]
        boxes = [f"<div class=tile><b>{escape(value)}</b><span class=soft>{name}</span></div>" for value, name in tiles]
        return f'<div class="tiles">{"".join(boxes)}</div>{self._notes()}'

    def _notes(self) -> str:
        notes = []
        if self.program.unknown:
            named = ", ".join(f"{name} ({times} runs)" for name, times in sorted(self.program.unknown.items()))
            notes.append(f"Kernels that do not say what they cost, counted as nothing: {named}.")
        if self.program.unknown_loops:
            notes.append(f"{self.program.unknown_loops} loops of unknown length are counted as one turn.")
        if self.rates is not None:
            notes.append(_GPU if self.program.cycles is None else _TPU)
        return "".join(f"<p class=soft>{escape(note)}</p>" for note in notes)

    def _memory(self) -> str:
        report, memory = self.report, self.memory
        series = {"arguments": [report.argument_bytes / GIB] * len(memory.steps)}
        series |= {kind: (memory.live[kind] / GIB).tolist() for kind in live_ranges.KINDS if kind in memory.live}
        colors = {name: _COLORS[name] for name in series}
        turns = {loop.name: loop.turns for loop in _loops(self.program.steps)}
        picture = program_charts.areas(
            series,
            colors,
            title="memory over the schedule",
            unit="GiB",
            limit=None if report.hbm_bytes is None else report.hbm_bytes / GIB,
            loops=[(a, b, f"x {turns.get(name, 1)}") for a, b, name in memory.loops],
            names=memory.steps,
        )
        peak = {"arguments": report.argument_bytes, **memory.at_peak()}
        rows = [(kind, f"{size / GIB:.3f}", f"{100 * size / sum(peak.values()):.1f}%") for kind, size in peak.items()]
        largest = [
            (f"{buffer.bytes / GIB:.3f}", buffer.kind, _plain(buffer.shape), _tail(buffer.label), buffer.name)
            for buffer in memory.largest(12)
        ]
        fullest = (report.argument_bytes + memory.peak_bytes) / GIB
        packed = memory.packed().bytes
        said = (
            f"Live ranges give {fullest:.3f} GiB at the fullest step; the compiler allocates "
            f"{report.total_bytes / GIB:.3f}, of which {report.temp_bytes / GIB:.3f} are temporaries. Beside the "
            f"arguments, {memory.peak_bytes / GIB:.3f} GiB are live at once; placed one by one in a block, these "
            f"arrays take {packed / GIB:.3f}."
        )
        return (
            f"<figure>{picture}{program_charts.legend(colors)}</figure><p class=soft>{said}</p>{self._host_memory()}"
            f'<div class="grid-of"><div class="panel"><h3>At the fullest step</h3>{table(rows, ("", "GiB", "share"))}'
            f'</div></div><div class="panel wide gap"><h3>The largest there, GiB</h3>'
            f"{table(largest, ('GiB', 'belongs to', 'array', 'from', 'instruction'))}</div>"
        )

    def _host_memory(self) -> str:
        """Chart of what a device has in its host's memory, if it has something there."""
        host, memory = self.memory.host, self.memory
        if not host:
            return ""
        colors = {name: _COLORS[name] for name in host}
        picture = program_charts.areas(
            {name: (live / GIB).tolist() for name, live in host.items()},
            colors,
            title="memory of the host over the schedule, one device's share",
            unit="GiB",
            loops=[(a, b, "") for a, b, _ in memory.loops],
            names=memory.steps,
        )
        return f"<figure>{picture}{program_charts.legend(colors)}</figure>"

    def _time(self) -> str:
        played = self.timeline
        assert played is not None
        assert self.rates is not None
        once = timeline(_once(self.program), self.rates)
        rows: dict[str, list[program_charts.Bar]] = {"compute": []}
        waits: list[program_charts.Bar] = []
        for span in once.spans:
            what = f"{span.name}: {_seconds(span.end - span.start)} {_tail(span.label)}"
            color = _COLORS.get(live_ranges.phase(span.label) or "other", "k7") if span.lane == "compute" else "c3"
            rows.setdefault(_lane(span), []).append(program_charts.Bar(span.start, span.end, color, what))
            if span.waited:
                waits.append(program_charts.Bar(span.end - span.waited, span.end, "k9", f"waiting for {what}"))
        if waits:
            rows["waiting"] = waits
        turns = {loop.name: loop.turns for loop in _loops(self.program.steps)}
        picture = program_charts.lanes(
            rows,
            title="one turn of each loop",
            seconds=once.seconds,
            loops=[(span.start, span.end, f"x {turns.get(span.name, 1)}") for span in once.loops],
        )
        phases = {
            name: _COLORS[name]
            for name in ("forward", "recomputed", "backward", "optimizer", "other")
            if any(
                _COLORS.get(live_ranges.phase(s.label) or "other") == _COLORS[name]
                for s in once.spans
                if s.lane == "compute"
            )
        }
        colors = {**phases, "sent, or fetched ahead": "c3", "the schedule waits": "k9"}
        parts = [("computing", played.compute)]
        parts += [(f"waiting: {where}", seconds) for where, seconds in sorted(played.exposed.items())]
        parts += [("waiting for copies", played.other)] if played.other > 0 else []
        parts += [(f"hidden: {where}", seconds) for where, seconds in sorted(played.hidden.items()) if seconds > 1e-9]
        rows_of = [
            (name, _seconds(seconds), f"{100 * seconds / max(played.seconds, 1e-30):.1f}%") for name, seconds in parts
        ]
        return (
            f"<figure>{picture}{program_charts.legend(colors)}</figure>"
            f'<div class="grid-of gap"><div class="panel"><h3>A step, {_seconds(played.seconds)}</h3>'
            f"{table(rows_of, ('', 'time', 'share'))}</div></div>"
        )

    def _kernels(self) -> str:
        rates = self.rates
        assert rates is not None
        rows = self.kernels()
        total = sum(row.seconds for row in rows) or 1.0
        points = [
            program_charts.Point(
                row.flops / row.bytes,
                row.flops / row.seconds,
                row.seconds / total,
                "c0" if row.flops / row.bytes > rates.flops / rates.bandwidth else "c1",
                f"{row.label}: {_seconds(row.seconds)}, {100 * row.seconds / total:.1f}% of the time",
            )
            for row in rows
            if row.bytes and row.seconds and row.flops
        ]
        picture = program_charts.roofline(points, title="roofline", peak=rates.flops, bandwidth=rates.bandwidth)
        listed = [
            (
                row.label,
                f"{row.times:,}",
                _seconds(row.seconds),
                f"{100 * row.seconds / total:.1f}%",
                number(float(row.flops)),
                number(float(row.bytes)),
                f"{row.flops / row.bytes:.1f}" if row.bytes else "",
                bound(row, rates),
            )
            for row in rows[:24]
        ]
        head = ("kernels from", "runs", "time", "share", "FLOPs", "bytes", "FLOPs a byte", "bound by")
        colors = {"more FLOPs a byte than the ridge": "c0", "fewer": "c1"}
        legend = program_charts.legend(colors)
        return f'<figure>{picture}{legend}</figure><div class="panel wide gap">{table(listed, head)}</div>'

    def _collectives(self) -> str:
        if not self.program.exchanges:
            return "<p>none</p>"
        sums: dict[tuple[str, str, int, bool], list[float]] = defaultdict(lambda: [0, 0, 0.0])
        for one, times in self.program.exchanges:
            kind = f"{one.kind}, summed" if one.summed else one.kind
            row = sums[kind, one.where, one.group_size, one.asynchronous]
            row[0] += times
            row[1] += one.bytes * times
            row[2] += self.rates.send(one) * times if self.rates is not None else 0.0
        rows = [
            (
                kind,
                where,
                str(size),
                "beside kernels" if free else "alone",
                f"{int(n):,}",
                f"{moved / GIB:.3f}",
                _seconds(seconds),
            )
            for (kind, where, size, free), (n, moved, seconds) in sorted(sums.items(), key=lambda item: -item[1][1])
        ]
        head = ("kind", "over", "devices", "runs", "times", "GiB", "on the network")
        return f'<div class="panel wide">{table(rows, head)}</div>'


def bound(row: KernelTable, rates: Rates) -> str:
    """Bound of a kernel: "products" (matmuls) or "memory" if that takes half of its time or more, else "other work"."""
    products, moved = row.flops / rates.flops, row.bytes / rates.bandwidth
    if max(products, moved) < 0.5 * row.seconds:
        return "other work"
    return "products" if products >= moved else "memory"


def short(op: KernelOp) -> str:
    """Short name of the place a kernel comes from: its pass and the last parts of jax's name; else its opcode."""
    passed, last = live_ranges.phase(op.label), _tail(op.label, 2)
    return f"{passed}: {last}" if passed and last else last or op.opcode


def _tail(label: str, count: int = 3) -> str:
    """Last informative parts of a name."""
    parts = [p for p in label.split("/") if p and p not in ("body", "closed_call", "while", "cond", "checkpoint")]
    parts = [p for p in parts if not re.fullmatch(r"(jit|jvp|transpose|vmap|shard_map|rematted_computation).*", p)]
    return "/".join(parts[-count:])


def _plain(shape: str) -> str:
    return shape.split("{")[0]


def _lane(span: Span) -> str:
    names = {"compute": "compute", "memory": "copies ahead", "host": "to and from the host"}
    return names.get(span.lane, f"over {span.lane}")


def _seconds(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}" if seconds * scale < 1000 else f"{seconds * scale:,.0f} {unit}"
    return f"{seconds * 1e6:.2g} us"


def _loops(steps: tuple[Step, ...]) -> list[Loop]:
    found = [step for step in steps if isinstance(step, Loop)]
    return found + [inner for loop in found for inner in _loops(loop.steps)]


def _once(program: Program) -> Program:
    """The program with one iteration of each loop."""

    def steps(given: tuple[Step, ...]) -> tuple[Step, ...]:
        return tuple(
            replace(s, turns=min(s.turns, 1), steps=steps(s.steps)) if isinstance(s, Loop) else s for s in given
        )

    return replace(program, steps=steps(program.steps))
