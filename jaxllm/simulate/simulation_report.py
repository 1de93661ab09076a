"""Report of a simulation: a table for the terminal, and one HTML page with curves and the timeline of batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from jaxllm.serve import load_benchmark
from jaxllm.simulate.fleet.fleet_report import fleet_charts, fleet_lines
from jaxllm.simulate.fleet.fleet_simulator import FleetSimulation
from jaxllm.simulate.simulator import Simulation
from jaxllm.svg import Line, chart, number, page, stacked_bar, table

Figures = Mapping[str, Any]
RateCurve = Sequence[tuple[float, Figures]]
"""(requests per second, figures) at several rates."""


def use_lines(figures: Figures) -> list[tuple[str, str]]:
    """(name, value) of what the devices did and what it cost; "-" where price or watts are not known."""
    price, joules = figures["dollars_per_million_tokens"], figures["joules_per_token"]
    parts = ", ".join(f"{k} {v:.0%}" for k, v in figures["time"].items())
    return [
        ("prompt tokens/s", f"{figures['prompt_tokens_per_second']:,.0f}"),
        ("goodput per device", f"{figures['goodput_per_device']:.3g} requests/s"),
        ("steps", f"{figures['steps']:,}, {figures['batch']:.1f} sequences on average"),
        ("KV cache in use", f"{figures['cache_use']:.0%} on average, {figures['cache_peak']:.0%} at most"),
        ("prompt tokens from the prefix cache", f"{figures['prefix_hit_share']:.0%}"),
        ("preemptions", f"{figures['preemptions']:,}"),
        ("devices busy", f"{figures['busy']:.0%}" + (f": {parts}" if parts else "")),
        ("cost per million output tokens", "-" if price is None else f"${price:,.2f}"),
        ("energy per output token", "-" if joules is None else f"{joules:.2f} J"),
        *_transfers(figures),
        *fleet_lines(figures),
    ]


def _transfers(figures: Figures) -> list[tuple[str, str]]:
    if "transferred_bytes" not in figures:
        return []
    sent = f"{figures['transferred_bytes'] / 2**30:.2f} GiB, {1e3 * figures['transfer_seconds']:.2f} ms a request"
    return [("KV cache sent to decode engines", sent)]


def text_report(simulation: Simulation, figures: Figures, knee: float | None = None) -> str:
    """Table of a simulation: the one of ``jaxllm bench serve``, use of the devices, cost and energy."""
    lines = [f"{simulation.deployment.name} on {simulation.deployment.where}, {simulation.trace.name}"]
    lines.append(load_benchmark.show(figures))
    lines += [f"{name:36}{value}" for name, value in use_lines(figures)]
    if knee is not None:
        share = f"{figures['slo']['share']:.0%} of the requests within the objective"
        lines.append(
            f"{'knee':36}{knee:.3g} requests/s, the largest rate with {share}" if knee else f"no rate has {share}"
        )
    return "\n".join(lines)


def router_table(simulations: Mapping[str, Simulation]) -> str:
    """Table of a trace served with several routers: latencies of served requests, and prefix cache hits."""
    lines = [f"{'router':18}{'mean s':>10}{'p99 s':>10}{'TTFT mean':>11}{'from cache':>12}"]
    for name, one in simulations.items():
        good = [r for r in one.results if not r.error]
        times = [r.end - r.due for r in good]
        first = float(np.mean([r.ttft for r in good]))
        hits = one.hit_tokens / sum(r.request.prompt for r in one.requests)
        lines.append(f"{name:18}{np.mean(times):>10.4f}{np.percentile(times, 99):>10.4f}{first:>11.4f}{hits:>12.0%}")
    return "\n".join(lines)


def html_report(simulation: Simulation, figures: Figures, curve: RateCurve = (), knee: float = 0.0) -> str:
    """Report of a simulation, as HTML."""
    title = f"{simulation.deployment.name} on {simulation.deployment.where}"
    slo = figures["slo"]
    tiles = [
        ("requests/s", f"{figures['requests_per_second']:.3g}"),
        ("output tokens/s", number(float(figures["tokens_per_second"]))),
        (f"within {slo['ttft']} s and {slo['tpot']} s", f"{figures['within_slo']:.0%}"),
        ("TTFT, median", f"{figures['ttft']['p50']:.3f} s"),
        ("TPOT, median", f"{1e3 * figures['tpot']['p50']:.1f} ms"),
    ]
    if knee:
        tiles.append(("knee", f"{knee:.3g} requests/s"))
    body = [
        f"<h1>{escape(title)}</h1><p class='soft'>{escape(simulation.trace.name)}; {len(simulation.requests):,} "
        "requests, simulated</p>",
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{b}</b><span class="soft">{a}</span></div>' for a, b in tiles)
        + "</div>",
    ]
    if figures["time"]:
        parts = [(k, float(v), i) for i, (k, v) in enumerate(figures["time"].items())]
        body.append(stacked_bar(parts, title="time of steps"))
    if curve:
        body.append('<h2>Over the rate</h2><div class="grid-of">' + "".join(map(_panel, rate_charts(curve, knee))))
        body.append("</div>")
    body.append('<h2>Latencies</h2><div class="grid-of">' + "".join(map(_panel, latency_charts(simulation, slo))))
    if isinstance(simulation, FleetSimulation):
        body.append('</div><h2>Replicas</h2><div class="grid-of">' + "".join(map(_panel, fleet_charts(simulation))))
    for name, number_of in simulation.shown.items():
        charts = "".join(map(_panel, timeline_charts(simulation, number_of)))
        body.append(f'</div><h2>{name}</h2><div class="grid-of">{charts}')
    rows = [(name, *(f"{figures[name][c]:.4f}" for c in ("mean", "p50", "p90", "p99"))) for name in
            ("ttft", "itl", "tpot", "latency") if figures[name] is not None]  # fmt: skip
    body.append("</div><h2>Figures</h2>" + _panel(table(rows, ("seconds", "mean", "p50", "p90", "p99"))))
    body.append(_panel(table(use_lines(figures))))
    return page(title, "".join(body))


def rate_charts(curve: RateCurve, knee: float) -> list[str]:
    """Charts over the arrival rate: goodput with its knee, share within the objective, TTFT and TPOT."""
    rates = [rate for rate, _ in curve]
    marks = [(knee, "knee")] if knee else []

    def line(name: str, values: list[float], color: int = 0) -> Line:
        return Line(name, rates, values, color, "points")

    def percentiles(key: str, factor: float) -> list[Line]:
        return [
            line(column, [factor * one[key][column] for _, one in curve], color)
            for color, column in enumerate(("p50", "p90", "p99"))
        ]

    goodput = [
        line("within the objective", [one["goodput"] for _, one in curve]),
        line("all", [one["requests_per_second"] for _, one in curve], 1),
    ]
    return [
        chart(goodput, title="goodput", unit="requests/s over the arrival rate", zero=True, marks=marks),
        chart([line("", [100 * one["within_slo"] for _, one in curve])], title="within the objective", unit="%",
              zero=True, marks=marks),
        chart(percentiles("ttft", 1.0), title="time to first token", unit="s", log=True, marks=marks),
        chart(percentiles("tpot", 1e3), title="time per output token", unit="ms", zero=True, marks=marks),
    ]  # fmt: skip


def latency_charts(simulation: Simulation, slo: Mapping[str, float]) -> list[str]:
    """Cumulative distributions of TTFT and TPOT over the served requests, with the objective."""
    out = []
    for name, factor, unit in (("ttft", 1.0, "s"), ("tpot", 1e3, "ms")):
        values = np.sort([factor * getattr(one, name) for one in simulation.results if not one.error])
        share = 100 * np.arange(1, len(values) + 1) / len(values)
        lines = [Line("", values.tolist(), share.tolist())]
        out.append(
            chart(lines, title=name.upper(), unit=f"% of requests over {unit}", zero=True,
                  marks=[(factor * slo[name], "objective")])
        )  # fmt: skip
    return out


def timeline_charts(simulation: Simulation, engine: int = 0) -> list[str]:
    """Timelines of an engine: sequences and queue, prefill tokens of steps, KV cache, step time."""
    steps = simulation.engines[engine]
    times = [step.start for step in steps]

    def line(name: str, values: list[float], color: int = 0) -> Line:
        return Line(name, times, values, color)

    batch = [
        line("decoding", [float(step.decoding) for step in steps]),
        line("waiting", [float(step.waiting) for step in steps], 1),
    ]
    return [
        chart(batch, title="sequences", unit="of a step, over seconds", zero=True),
        chart([line("", [float(step.prefill_tokens) for step in steps])], title="prefill tokens", unit="of a step",
              zero=True),
        chart([line("", [100 * step.cache_use for step in steps])], title="KV cache in use", unit="%", zero=True),
        chart([line("", [1e3 * step.cost.seconds / step.passes for step in steps])], title="step time",
              unit="ms a pass", zero=True),
    ]  # fmt: skip


def _panel(inner: str) -> str:
    return f'<div class="panel">{inner}</div>'
