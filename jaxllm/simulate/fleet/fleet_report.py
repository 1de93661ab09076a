"""Report of a simulated fleet: rows of the table, and charts of replicas over time and lost requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.simulate.fleet.fleet_simulator import PAID, FleetSimulation
from jaxllm.svg import Line, chart


def fleet_lines(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) rows of a fleet's figures; none for the figures of another simulation."""
    if "fleet" not in figures:
        return []
    fleet = figures["fleet"]
    cost = "" if fleet["dollars"] is None else f", ${fleet['dollars']:,.2f}"
    return [
        ("replicas", f"{fleet['replicas']:.2f} on average, {fleet['fewest']} to {fleet['most']}"),
        ("replica-hours", f"{fleet['replica_hours']:.3f}{cost}"),
        ("availability of a replica", f"{fleet['availability']:.3%}; {fleet['failures']:,} failed"),
        ("time without a ready replica", f"{fleet['without_replica']:.3%}"),
        ("requests lost", f"{fleet['lost']:,}; {fleet['resent']:,} sent again"),
    ]


def steps(counts: Sequence[tuple[float, int]], end: float) -> tuple[list[float], list[float]]:
    """Points of a line that stays at each count until the next one.

    Args:
        counts: each with the second of its begin, in order.
        end: last second of the line.
    """
    times = [*(at for at, _ in counts for _ in range(2)), end][1:]
    return times, [float(count) for _, count in counts for _ in range(2)]


def fleet_charts(found: FleetSimulation) -> list[str]:
    """Charts over the seconds of the trace: replicas in each state, and requests that were lost so far."""
    end = found.end
    kept = [(at, counts) for at, counts in found.timeline if at <= end]
    states = [
        Line(state, *steps([(at, counts[state]) for at, counts in kept], end), color)
        for color, state in enumerate(PAID)
        if state in ("ready", "failed") or any(counts[state] for _, counts in kept)
    ]
    lost = sorted(one.end for one in found.results if one.error)
    sums = steps([(found.begin, 0), *((at, count) for count, at in enumerate(lost, 1))], end)
    return [
        chart(states, title="replicas", unit="over seconds", zero=True),
        chart([Line("", *sums)], title="requests lost", unit="so far, over seconds", zero=True),
    ]
