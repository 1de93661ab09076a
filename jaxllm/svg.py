"""SVG charts and the HTML page around them: self-contained text, without network, scripts or libraries.

    page("a run", chart([Line("loss", steps, values)], title="loss"))

Colours are CSS classes that the page's style defines, light or dark as the reader's system is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Literal

WIDTH, HEIGHT = 420, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 30, 24
COLORS = 6
MOST_POINTS = 400
"""Points drawn per line at most: more than a screen can show."""


@dataclass(frozen=True)
class Line:
    """Line of a chart.

    Attributes:
        name: for the legend; empty: not in the legend.
        x: ascending values.
        y: one value for each x; None and non-finite values leave a gap.
        color: index of the colour; after the sixth they repeat, dashed.
        style: "line", "faint" for a line behind others, or "points" for few values, joined.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    color: int = 0
    style: Literal["line", "faint", "points"] = "line"

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"line {self.name!r} has {len(self.x)} values of x and {len(self.y)} of y.")


def chart(
    lines: Sequence[Line],
    *,
    title: str,
    unit: str = "",
    log: bool = False,
    zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Line chart over a common x axis, as an SVG element with a legend.

    Args:
        unit: shown after the title.
        log: logarithmic y axis; values of zero and less leave a gap.
        zero: the y axis begins at zero.
        marks: (x, text) of vertical lines; the text is shown on hover.
    """
    lines = [replace(one, y=[_legal(y, log) for y in one.y]) for one in lines]
    seen = [y for one in lines for y in one.y if y is not None]
    across = [x for one in lines for x in one.x] + [x for x, _ in marks]
    head = f'<text class="title" x="4" y="15">{escape(title)}<tspan class="unit"> {escape(unit)}</tspan></text>'
    if not seen:
        return _svg(title, head + f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no values</text>')
    low_x, high_x = _room(min(across), max(across))
    low, high = _room(*_range(seen, log, [y for one in lines if one.style == "points" for y in one.y]))
    if zero:
        low = min(low, 0.0)
    else:
        margin = 0.04 * (high - low)
        low, high = low - margin, high + margin

    def px(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - low_x) / (high_x - low_x)

    def py(y: float) -> float:
        at = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (y - low) / (high - low)
        return min(max(at, TOP - 2), HEIGHT - BOTTOM + 2)

    parts = [head]
    for value in log_ticks(low, high) if log else ticks(low, high, 5):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(value):.1f}" y2="{py(value):.1f}"/>')
        label = number(10**value if log else value)
        parts.append(f'<text x="{LEFT - 5}" y="{py(value) + 4:.1f}" text-anchor="end">{label}</text>')
    whole = all(float(x).is_integer() for x in across)  # steps and layers: no ticks between integers
    for value in ticks(low_x, high_x, 5):
        if whole and not math.isclose(value, round(value), abs_tol=1e-9):
            continue
        parts.append(f'<text x="{px(value):.1f}" y="{HEIGHT - 7}" text-anchor="middle">{number(value)}</text>')
    for x, what in marks:
        parts.append(
            f'<line class="mark" x1="{px(x):.1f}" x2="{px(x):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
            f"<title>{escape(what)}</title></line>"
        )
    for one in lines:
        parts += _drawn(one, px, py)
    return _svg(title, "".join(parts)) + _legend(lines)


def stacked_bar(parts: Sequence[tuple[str, float, int]], *, title: str) -> str:
    """Bar divided in proportion to (name, size, colour), with percentages below; colours after the sixth are pale."""
    total = sum(size for _, size, _ in parts) or 1.0
    x, pieces, labels = 0.0, [], []
    for name, size, color in parts:
        width = 100 * size / total
        tone = f"c{color % COLORS}" if color < COLORS else f"c{color % COLORS} pale"
        pieces.append(
            f'<rect class="{tone}" x="{x:.2f}" width="{width:.2f}" height="10">'
            f"<title>{escape(name)} {width:.1f}%</title></rect>"
        )
        labels.append(f'<span><i class="{tone}"></i>{escape(name)} {width:.1f}%</span>')
        x += width
    return (
        f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f'{"".join(pieces)}</svg><p class="legend">{"".join(labels)}</p>'
    )


def lanes(rows: Sequence[tuple[str, Sequence[tuple[float, float, int, str]]]], *, title: str, unit: str = "") -> str:
    """Blocks of time in rows below each other, as an SVG element; the time axis begins at the first block.

    Args:
        rows: name, and blocks (begin, end, colour, text); the text is shown on hover.
        unit: shown after the title.
    """
    edges = [at for _, blocks in rows for begin, end, *_ in blocks for at in (begin, end)] or [0.0]
    low, high = _room(min(edges), max(edges))

    def px(at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (at - low) / (high - low)

    head = f'<text class="title" x="4" y="15">{escape(title)}<tspan class="unit"> {escape(unit)}</tspan></text>'
    parts, height = [head], 22
    for number_of, (name, blocks) in enumerate(rows):
        top = TOP + number_of * (height + 8)
        parts.append(f'<text x="{LEFT - 5}" y="{top + 15}" text-anchor="end">{escape(name)}</text>')
        parts += [
            f'<rect class="c{color % COLORS}" x="{px(begin):.1f}" y="{top}" height="{height}" '
            f'width="{max(px(end) - px(begin), 0.5):.1f}"><title>{escape(text)}</title></rect>'
            for begin, end, color, text in blocks
        ]
    bottom = TOP + len(rows) * (height + 8)
    for value in ticks(0.0, high - low, 5):
        x = f"{px(low + value):.1f}"
        parts.append(f'<text x="{x}" y="{bottom + 12}" text-anchor="middle">{number(value)}</text>')
    size = f"0 0 {WIDTH} {bottom + 18}"
    return f'<svg class="lanes" viewBox="{size}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def histogram(values: Sequence[float], *, title: str, unit: str = "", bins: int = 24) -> str:
    """Histogram of values with bins of equal width, as an SVG element."""
    low, high = _room(min(values), max(values)) if values else (0.0, 1.0)
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / (high - low) * bins), bins - 1)] += 1
    tallest = max(counts) or 1
    across, up = (WIDTH - LEFT - RIGHT) / bins, HEIGHT - TOP - BOTTOM
    parts = [f'<text class="title" x="4" y="15">{escape(title)}<tspan class="unit"> {escape(unit)}</tspan></text>']
    for n, count in enumerate(counts):
        tall, left = up * count / tallest, low + n * (high - low) / bins
        right = low + (n + 1) * (high - low) / bins
        parts.append(
            f'<rect class="c0" x="{LEFT + n * across:.1f}" y="{HEIGHT - BOTTOM - tall:.1f}" height="{tall:.1f}" '
            f'width="{across * 0.92:.1f}"><title>{number(left)} to {number(right)}: {count}</title></rect>'
        )
    parts.append(f'<text x="{LEFT - 5}" y="{TOP + 4}" text-anchor="end">{tallest}</text>')
    for value in ticks(low, high, 5):
        x = LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 7}" text-anchor="middle">{number(value)}</text>')
    return _svg(title, "".join(parts))


def table(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> str:
    """HTML table; numbers are right-aligned."""

    def cell(value: object, tag: str = "td") -> str:
        right = ' class="n"' if isinstance(value, (int, float)) else ""
        text = number(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
        return f"<{tag}{right}>{escape(text)}</{tag}>"

    top = f"<tr>{''.join(cell(name, 'th') for name in head)}</tr>" if head else ""
    lines = ["<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows]
    return f"<table>{top}{''.join(lines)}</table>"


def page(title: str, body: str) -> str:
    """Complete, self-contained HTML document."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def number(value: float) -> str:
    """Number in short form: ``1.2M``, ``0.035``, ``3e-04``."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for suffix, unit in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if size >= unit:
            return f"{value / (1e3 if suffix == 'k' else unit):.4g}{suffix}"
    return f"{value:.1e}" if 0 < size < 1e-3 else f"{value:.4g}"


def ticks(low: float, high: float, about: int) -> list[float]:
    """Axis ticks: about ``about`` round numbers from ``low`` to ``high``."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [count * step for count in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis, as logarithms: powers of ten, or 1, 2 and 5 times them, or other round numbers."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    some = [p for p in powers if low <= p <= high]
    if len(some) > 2:
        return [float(p) for p in some[:: max(1, len(some) // 5)]]
    fine = [p + math.log10(factor) for p in powers for factor in (1, 2, 5)]
    fine = [value for value in fine if low <= value <= high]
    return fine if len(fine) > 2 else [math.log10(value) for value in ticks(10**low, 10**high, 4)]


def downsample(xs: Sequence[float], ys: Sequence[float | None]) -> list[tuple[float, float | None]]:
    """At most ``MOST_POINTS`` of the points; each interval keeps its lowest and highest, so that no spike is lost."""
    points = list(zip(xs, ys, strict=True))
    if len(points) <= MOST_POINTS:
        return points
    intervals = MOST_POINTS // 4
    kept: list[tuple[float, float | None]] = []
    for n in range(intervals):
        part = points[n * len(points) // intervals : (n + 1) * len(points) // intervals]
        there = [index for index, (_, y) in enumerate(part) if y is not None]
        chosen = {0, len(part) - 1}
        if there:
            chosen |= {min(there, key=lambda i: part[i][1] or 0.0), max(there, key=lambda i: part[i][1] or 0.0)}
        kept += [part[index] for index in sorted(chosen)]
    return kept


def _legal(y: float | None, log: bool) -> float | None:
    if y is None or not math.isfinite(y) or (log and y <= 0):
        return None
    return math.log10(y) if log else y


def _range(values: list[float], log: bool, always: list[float | None]) -> tuple[float, float]:
    """Range of the y axis; cuts off the first steps of a run, which lie far above the rest."""
    low, high = min(values), max(values)
    if not log and len(values) >= 20:
        usual = sorted(values)[int(0.98 * (len(values) - 1))]
        if high - low > 1.5 * (usual - low) > 0:
            high = max([usual + 0.1 * (usual - low), *(y for y in always if y is not None)])
    return low, high


def _room(low: float, high: float) -> tuple[float, float]:
    """Range with a positive width, also around a single value."""
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    half = 0.5 * abs(low) or 0.5
    return low - half, high + half


def _drawn(line: Line, px: Callable[[float], float], py: Callable[[float], float]) -> list[str]:
    points = downsample(line.x, line.y)
    path, pen = [], "M"
    for x, y in points:
        if y is None:
            pen = "M"
        else:
            path.append(f"{pen}{px(x):.1f} {py(y):.1f}")
            pen = "L"
    out = [f'<path class="{_classes(line)}" d="{"".join(path)}"/>']
    if line.style == "points" or len(path) == 1:
        out += [
            f'<circle class="c{line.color % COLORS}" cx="{px(x):.1f}" cy="{py(y):.1f}" r="2.5"/>'
            for x, y in points
            if y is not None
        ]
    return out


def _classes(line: Line) -> str:
    dashed = " dashed" if line.color >= COLORS else ""
    return f"{line.style} c{line.color % COLORS}{dashed}"


def _legend(lines: Sequence[Line]) -> str:
    named = [one for one in lines if one.name]
    if not named:
        return ""
    labels = [
        f'<span><i class="{_classes(one)}"></i>{escape(one.name)}</span>' for one in named
    ]  # fmt: skip
    return f'<p class="legend">{"".join(labels)}</p>'


def _svg(title: str, inside: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{inside}</svg>'


STYLE = """
:root{color-scheme:light dark;--ink:#1c2733;--soft:#66727f;--ground:#fff;--panel:#f6f8fa;--rule:#dde3e9;
--c0:#1f5fae;--c1:#c4501b;--c2:#3f7d33;--c3:#7a4fa3;--c4:#a8811a;--c5:#2b8a8a}
@media (prefers-color-scheme:dark){:root{--ink:#dfe6ee;--soft:#93a1b0;--ground:#11161c;--panel:#19212a;--rule:#2b3642;
--c0:#6aa9f0;--c1:#f0895a;--c2:#86c878;--c3:#bd97e6;--c4:#dfba55;--c5:#64c8c8}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.45 system-ui,sans-serif}
main{max-width:1320px;margin:0 auto;padding:16px}
h1{font-size:1.5rem;margin:.2em 0}h2{font-size:1.1rem;margin:1.6em 0 .5em}
p{margin:.4em 0}.soft{color:var(--soft)}
.grid-of{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,380px),1fr));gap:12px}
.panel,figure{background:var(--panel);border:1px solid var(--rule);border-radius:8px;padding:8px;margin:0;min-width:0}
.wide{overflow-x:auto}.gap{margin-top:12px}details{margin:8px 0}
.tiles{display:flex;flex-wrap:wrap;gap:8px;margin:12px 0}
.tile{background:var(--panel);border:1px solid var(--rule);border-radius:8px;padding:8px 14px}
.tile b{display:block;font-size:1.15rem}.tile span{font-size:12px}
svg{display:block;width:100%;height:auto}
svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
svg .title{font-size:13px;font-weight:600;fill:var(--ink)}svg .unit{font-weight:400;fill:var(--soft)}
svg .grid{stroke:var(--rule);stroke-width:1}svg .mark{stroke:var(--soft);stroke-width:1.5;stroke-dasharray:3 3}
svg path{fill:none;stroke-width:1.6;stroke-linejoin:round}svg path.faint{stroke-width:.9;opacity:.45}
svg path.dashed{stroke-dasharray:5 3}
svg.bar{height:18px;border-radius:4px}
.c0{stroke:var(--c0);--own:var(--c0)}.c1{stroke:var(--c1);--own:var(--c1)}.c2{stroke:var(--c2);--own:var(--c2)}
.c3{stroke:var(--c3);--own:var(--c3)}.c4{stroke:var(--c4);--own:var(--c4)}.c5{stroke:var(--c5);--own:var(--c5)}
circle,rect{fill:var(--own)}.bar rect,.lanes rect{stroke:none}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12px;color:var(--soft);margin:2px 4px}
.legend i{display:inline-block;width:14px;height:4px;border-radius:2px;background:var(--own);margin:0 5px 3px 0}
.legend i.faint,.pale{opacity:.45}
.legend i.dashed{background:none;height:0;border-top:3px dashed var(--own);border-radius:0}
table{border-collapse:collapse;font-size:13px;width:100%}
td,th{text-align:left;padding:3px 8px 3px 0;border-bottom:1px solid var(--rule);vertical-align:top;
overflow-wrap:anywhere}th{white-space:nowrap}.n{text-align:right;font-variant-numeric:tabular-nums}
details summary{cursor:pointer;color:var(--soft)}
pre{overflow-x:auto;font-size:12px}
""".strip()
