"""Charts of compiled programs as SVG: stacked areas, lanes of spans, a roofline. Colours are classes of the page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from jaxllm.svg import log_ticks, number, ticks

WIDTH = 1200
LEFT, RIGHT, TOP, BOTTOM = 76, 14, 34, 26
COLUMNS = 500
"""Most columns of an area chart: more than a screen can resolve."""


class Bar(NamedTuple):
    """Span in a lane: start, end, colour class, tooltip."""

    start: float
    end: float
    color: str
    what: str


class Point(NamedTuple):
    """Dot of a roofline: x, y, share of the total, colour class, label."""

    x: float
    y: float
    share: float
    color: str
    label: str


def areas(
    series: Mapping[str, Sequence[float]],
    colors: Mapping[str, str],
    *,
    title: str,
    unit: str,
    limit: float | None = None,
    loops: Sequence[tuple[int, int, str]] = (),
    names: Sequence[str] = (),
    foot: str = "",
) -> str:
    """Stacked area chart over the steps of a schedule, with a limit as a line and loops as brackets below.

    Args:
        series: values at each step, from the bottom up.
        limit: drawn where it is close to the values.
        loops: (first step, last step, label).
        names: names of the steps; that of the highest one is shown.
        foot: what the steps are; empty: those of a schedule.
    """
    height, base = 330, 330 - BOTTOM - 22
    steps = max((len(values) for values in series.values()), default=0)
    if not steps:
        return _svg(title, height, _head(title, unit))
    sums = [sum(values[i] for values in series.values()) for i in range(steps)]
    peak = max(range(steps), key=sums.__getitem__)
    top = max(sums[peak], 1e-12)
    near = limit is not None and limit < 2.5 * top
    high = 1.06 * max(top, limit if near and limit is not None else 0.0)

    def px(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def py(value: float) -> float:
        return base - (base - TOP) * value / high

    parts = [_head(title, unit), *_rows(ticks(0.0, high, 5), py)]
    chosen = _columns(sums)
    floor = [0.0] * len(chosen)
    for name, values in series.items():
        roof = [low + values[step] for low, step in zip(floor, chosen, strict=True)]
        corners = _outline(chosen, roof, steps) + _outline(chosen, floor, steps)[::-1]
        shape = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in corners)
        parts.append(f'<polygon class="{colors[name]}" points="{shape}"><title>{escape(name)}</title></polygon>')
        floor = roof
    if near and limit is not None:
        parts.append(
            f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(limit):.1f}" y2="{py(limit):.1f}"/>'
        )
        parts.append(
            f'<text x="{WIDTH - RIGHT}" y="{py(limit) - 4:.1f}" text-anchor="end">there are {number(limit)}</text>'
        )
    parts.append(f'<line class="mark" x1="{px(peak):.1f}" x2="{px(peak):.1f}" y1="{TOP}" y2="{base}"/>')
    anchor, at = ("end", px(peak) - 5) if peak > steps / 2 else ("start", px(peak) + 5)
    what = f" at {names[peak]}" if names else ""
    parts.append(
        f'<text class="said" x="{at:.1f}" y="{TOP - 5}" text-anchor="{anchor}">'
        f"{number(top)} {escape(unit)}{escape(what)}</text>"
    )
    parts += _brackets([(px(a), px(b + 1), label) for a, b, label in loops], base + 6)
    said = foot or f"the schedule, {steps:,} steps, one turn of each loop"
    parts.append(f'<text x="{LEFT}" y="{height - 5}">{escape(said)}</text>')
    return _svg(title, height, "".join(parts))


def lanes(
    rows: Mapping[str, Sequence[Bar]], *, title: str, seconds: float, loops: Sequence[tuple[float, float, str]] = ()
) -> str:
    """Spans in lanes over time.

    Args:
        seconds: time at the right end.
        loops: (start, end, label) of brackets above the time axis.
    """
    lane, gap = 26, 8
    base = TOP + len(rows) * (lane + gap)
    height = base + 22 + BOTTOM
    left = 190

    def px(at: float) -> float:
        return left + (WIDTH - left - RIGHT) * at / max(seconds, 1e-12)

    scale, unit = _time(seconds)
    parts = [_head(title, "")]
    for value in ticks(0.0, seconds * scale, 8):
        x = px(value / scale)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{base}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 5}" text-anchor="middle">{number(value)} {unit}</text>')
    for place, (name, bars) in enumerate(rows.items()):
        y = TOP + place * (lane + gap)
        parts.append(f'<text class="said" x="{left - 8}" y="{y + 17}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect class="lane" x="{left}" y="{y}" width="{WIDTH - left - RIGHT}" height="{lane}"/>')
        for bar in _merged(bars, seconds / (WIDTH - left - RIGHT)):
            width = max(0.6, px(bar.end) - px(bar.start))
            parts.append(
                f'<rect class="{bar.color}" x="{px(bar.start):.1f}" y="{y}" width="{width:.1f}" height="{lane}">'
                f"<title>{escape(bar.what)}</title></rect>"
            )
    parts += _brackets([(px(a), px(b), label) for a, b, label in loops], base + 2)
    return _svg(title, height, "".join(parts))


def roofline(points: Sequence[Point], *, title: str, peak: float, bandwidth: float) -> str:
    """Roofline chart: kernels by arithmetic intensity; the area of a dot is its share of the time."""
    height, base = 400, 400 - BOTTOM - 16
    shown = [point for point in points if point.x > 0 and point.y > 0]
    ridge = math.log10(peak / bandwidth)
    xs = [math.log10(point.x) for point in shown] + [ridge - 1, ridge + 1]
    low, right = min(xs) - 0.3, max(xs) + 0.3
    top = math.log10(peak) + 0.25
    floor = min([math.log10(point.y) for point in shown] + [math.log10(bandwidth) + low, top - 2.5]) - 0.2
    floor = max(floor, top - 6)

    def px(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - low) / (right - low)

    def py(y: float) -> float:
        return base - (base - TOP) * (max(y, floor) - floor) / (top - floor)

    parts = [_head(title, "FLOP/s over FLOPs a byte of memory")]
    parts += _rows(log_ticks(floor, top), py, log=True)
    for value in log_ticks(low, right):
        parts.append(f'<text x="{px(value):.1f}" y="{base + 15}" text-anchor="middle">{number(10**value)}</text>')
    start = max(low, floor - math.log10(bandwidth))
    roof = [(start, math.log10(bandwidth) + start), (ridge, math.log10(peak)), (right, math.log10(peak))]
    parts.append(f'<path class="roof" d="M{"L".join(f"{px(x):.1f} {py(y):.1f}" for x, y in roof)}"/>')
    parts.append(
        f'<text class="said" x="{WIDTH - RIGHT}" y="{py(math.log10(peak)) - 6:.1f}" text-anchor="end">'
        f"{number(peak)} FLOP/s, {number(bandwidth)} bytes/s; the ridge is at {number(peak / bandwidth)}</text>"
    )
    for point in sorted(shown, key=lambda point: -point.share):
        radius = max(2.5, 40 * math.sqrt(point.share / math.pi))
        parts.append(
            f'<circle class="{point.color} seen" cx="{px(math.log10(point.x)):.1f}" '
            f'cy="{py(math.log10(point.y)):.1f}" r="{radius:.1f}"><title>{escape(point.label)}</title></circle>'
        )
    parts.append(f'<text x="{LEFT}" y="{height - 5}">FLOPs a byte</text>')
    return _svg(title, height, "".join(parts))


def legend(colors: Mapping[str, str]) -> str:
    """Legend: names beside their colours."""
    words = "".join(f'<span><i class="{color}"></i>{escape(name)}</span>' for name, color in colors.items())
    return f'<p class="legend">{words}</p>'


def _time(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 2 else (1e3, "ms") if seconds >= 2e-3 else (1e6, "us")


def _head(title: str, unit: str) -> str:
    return f'<text class="title" x="4" y="15">{escape(title)}<tspan class="unit"> {escape(unit)}</tspan></text>'


def _rows(values: Sequence[float], py, log: bool = False) -> list[str]:
    parts = []
    for value in values:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(value):.1f}" y2="{py(value):.1f}"/>')
        said = number(10**value if log else value)
        parts.append(f'<text x="{LEFT - 6}" y="{py(value) + 4:.1f}" text-anchor="end">{said}</text>')
    return parts


def _columns(sums: Sequence[float]) -> list[int]:
    """Steps to draw: the fullest step of each stretch, so that no peak is lost."""
    steps = len(sums)
    if steps <= COLUMNS:
        return list(range(steps))
    cuts = [n * steps // COLUMNS for n in range(COLUMNS + 1)]
    return [max(range(a, b), key=sums.__getitem__) for a, b in itertools.pairwise(cuts)]


def _outline(chosen: Sequence[int], values: Sequence[float], steps: int) -> list[tuple[float, float]]:
    """Corners of a staircase: each value holds until the next step drawn."""
    ends = [*chosen[1:], steps]
    starts = [0, *chosen[1:]]
    return [corner for a, b, y in zip(starts, ends, values, strict=True) for corner in ((a, y), (b, y))]


def _brackets(spans: Sequence[tuple[float, float, str]], y: float) -> list[str]:
    """Brackets of loops, with the trip count where there is room."""
    parts, taken = [], -1e9
    for start, end, label in sorted(spans):
        parts.append(f'<path class="loop" d="M{start:.1f} {y}v5H{end:.1f}v-5"><title>{escape(label)}</title></path>')
        middle = (start + end) / 2
        if end - start > 6 * len(label) and middle - 3 * len(label) > taken:
            parts.append(f'<text x="{middle:.1f}" y="{y + 16}" text-anchor="middle">{escape(label)}</text>')
            taken = middle + 3 * len(label)
    return parts


def _merged(bars: Sequence[Bar], pixel: float) -> list[Bar]:
    """Neighbouring bars of one colour that are closer than a pixel, merged."""
    out: list[Bar] = []
    for bar in sorted(bars):
        last = out[-1] if out else None
        small = bar.end - bar.start < 2 * pixel
        if last is not None and small and bar.color == last.color and bar.start - last.end < 0.5 * pixel:
            what = last.what if last.what.endswith("and more") else f"{last.what} and more"
            out[-1] = Bar(last.start, max(last.end, bar.end), bar.color, what)
        else:
            out.append(bar)
    return out


def _svg(title: str, height: float, inside: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{inside}</svg>'
