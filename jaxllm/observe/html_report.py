"""HTML report of a run, or comparison of several: one self-contained page."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jaxllm.files import atomic
from jaxllm.observe.policy_phases import BOTH, SHARES, Phase, phase_seconds
from jaxllm.observe.run_record import RunRecord, flat
from jaxllm.svg import Line, chart, histogram, lanes, number, page, stacked_bar, table

Series = Callable[[RunRecord], tuple[list[float], list[float | None]]]


def metric_series(key: str, factor: float = 1.0) -> Series:
    """Series of the metric ``key``, multiplied by ``factor``."""

    def read(run: RunRecord) -> tuple[list[float], list[float | None]]:
        steps, values = run.series(key)
        return steps, [None if value is None else factor * value for value in values]

    return read


def model_flops(run: RunRecord) -> tuple[list[float], list[float | None]]:
    """Series of model FLOP/s, for devices whose peak is unknown (otherwise MFU is shown)."""
    steps, rates = run.series("tokens_per_second")
    each = run.facts.get("flops_per_token")
    if each is None or run.facts.get("peak_flops"):
        return [], []
    return steps, [None if rate is None else rate * each for rate in rates]


CHARTS: tuple[tuple[str, str, Series, dict[str, Any]], ...] = (
    ("learning rate", "", metric_series("learning_rate"), {"zero": True}),
    ("gradient norm", "before clipping", metric_series("grad_norm"), {"log": True}),
    ("parameter norm", "", metric_series("param_norm"), {}),
    ("update norm", "", metric_series("update_norm"), {"log": True}),
    ("tokens per second", "", metric_series("tokens_per_second"), {"zero": True}),
    ("MFU", "% of the devices' peak", metric_series("mfu", 100), {"zero": True}),
    ("HFU", "% of the devices' peak", metric_series("hfu", 100), {"zero": True}),
    ("model FLOP/s", "", model_flops, {"zero": True}),
    ("step time", "s", metric_series("step_seconds"), {"zero": True}),
    ("waiting for data", "s a step", metric_series("data_wait"), {"zero": True}),
    ("memory", "GiB on the fullest device", metric_series("memory_bytes", 2**-30), {"zero": True}),
    ("disk reads", "GiB of streamed layers in a step", metric_series("disk_read_bytes", 2**-30), {"zero": True}),
    ("disk writes", "GiB of streamed layers in a step", metric_series("disk_written_bytes", 2**-30), {"zero": True}),
    # Post-training
    ("accuracy", "share of pairs in the right order", metric_series("accuracy"), {"zero": True}),
    ("margin", "difference of the implicit rewards", metric_series("margin"), {}),
    ("reward", "mean over completions", metric_series("reward"), {}),
    ("length", "tokens of a completion", metric_series("completion_tokens"), {"zero": True}),
    ("entropy", "nats per token", metric_series("entropy"), {"zero": True}),
    ("KL", "nats per token, from the reference", metric_series("kl"), {}),
    ("clipped", "share of tokens", metric_series("clipped"), {"zero": True}),
    ("staleness", "updates, mean over tokens", metric_series("staleness"), {"zero": True}),
    ("value loss", "half the squared error", metric_series("value_loss"), {"zero": True}),
    ("explained variance", "of returns, by the values before the step", metric_series("explained_variance"), {}),
    ("mismatch", "nats per token, rollout and training", metric_series("mismatch"), {"zero": True}),
    ("groups of equal rewards", "", metric_series("equal_groups"), {"zero": True}),
    ("rollouts", "s a step", metric_series("rollout_seconds"), {"zero": True}),
    ("weight swap", "s a step", metric_series("swap_seconds"), {"zero": True}),
)
EPISODES_SHOWN = 8
"""Episodes of the last step that a report shows: those with the highest and with the lowest rewards."""


def html_report(run: RunRecord) -> str:
    """Report of one run, as HTML."""
    body = [f"<h1>{escape(run.name)}</h1><p>{escape(headline(run))}</p>", tiles(run)]
    body.append(f'<div class="grid-of">{loss_chart([run])}{"".join(charts([run]))}</div>')
    body.append(goodput_section(run))
    body.append(phase_section(run))
    if run.episodes:
        advantages = [row["advantage"] for row in run.episodes if row["reward"] is not None]
        shown = histogram(advantages, title="advantages", unit="completions")
        body.append(
            f'<h2>Episodes of step {run.episodes[-1]["step"]}</h2><div class="grid-of"><figure>{shown}</figure></div>'
            f'<div class="panel gap">{episode_table(run)}</div>'
        )
    if run.layers:
        body.append(f'<h2>Layers, step {run.layers[-1]["step"]}</h2><div class="grid-of">{layer_charts(run)}</div>')
    for name, text in run.profiles.items():
        body.append(f'<h2>Profile {escape(name)}</h2><div class="panel"><pre>{escape(text)}</pre></div>')
    body.append("<h2>What was run</h2>" + details("configuration", table(flat(run.config).items())))
    for title, value in (("start", run.facts), ("receipt", run.receipt)):
        if value:
            body.append(details(title, f"<pre>{escape(json.dumps(value, indent=1))}</pre>"))
    return page(run.name, "".join(body))


def html_comparison(runs: Sequence[RunRecord]) -> str:
    """Comparison of several runs, with overlaid curves, as HTML.

    Raises:
        ValueError: fewer than two runs.
    """
    if len(runs) < 2:
        raise ValueError("compare takes two runs or more; `jaxllm report RUN` shows one.")
    names = labels(runs)
    rows = [("", *names)]
    for title, value in figures(runs[0]).items():
        others = [figures(run).get(title, "") for run in runs[1:]]
        rows.append((title, value, *others))
    flats = [flat(run.config) for run in runs]
    changed = [
        (key, *(json.dumps(one.get(key, "absent")) for one in flats))
        for key in dict.fromkeys(key for one in flats for key in one)
        if len({json.dumps(one.get(key, "absent")) for one in flats}) > 1
    ]
    title = " / ".join(names)
    body = [f"<h1>{escape(title)}</h1>", f'<div class="panel wide">{table(rows[1:], rows[0])}</div>']
    body.append(f'<h2>Curves</h2><div class="grid-of">{loss_chart(runs)}{"".join(charts(runs))}</div>')
    body.append("<h2>Where the time went</h2>")
    body += [
        f'<div class="panel"><p>{escape(name)}</p>{time_bar(run)}</div>' for name, run in zip(names, runs, strict=True)
    ]
    body.append("<h2>Settings that differ</h2>")
    body.append(f'<div class="panel wide">{table(changed, ("setting", *names))}</div>' if changed else "<p>None.</p>")
    return page(title, "".join(body))


def write(html: str, file: Path) -> None:
    """Writes a page to a file, atomically."""
    with atomic(file) as out:
        out.write(html.encode())


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """Names of the runs, or their directories where two have the same name."""
    names = [run.name for run in runs]
    return [run.name if names.count(run.name) == 1 else str(run.path) for run in runs]


def headline(run: RunRecord) -> str:
    """One line about a run: state, size, devices, versions, commit."""
    facts, receipt = run.facts, run.receipt or {}
    device = receipt.get("device", {})
    parts = [run.state]
    if facts.get("parameters"):
        parts.append(f"{number(facts['parameters'])} parameters")
    count, kind = facts.get("devices", device.get("count")), facts.get("device_kind", device.get("kind"))
    if count:
        parts.append(f"{count} x {kind}, mesh {run.config.get('mesh')}")
    versions = facts.get("versions", receipt.get("versions", {}))
    if versions:
        parts.append(f"jax {versions['jax']}, Python {versions['python']}")
    commit = facts.get("commit", receipt.get("commit"))
    if commit:
        parts.append(f"commit {commit[:12]}{'+changes' if '+' in commit else ''}")
    return "; ".join(parts)


def figures(run: RunRecord) -> dict[str, str]:
    """Key figures of a run, formatted."""
    out = {"state": run.state}
    if run.steps:
        out["steps"] = f"{run.steps[-1]['step']:,} of {run.config.get('steps', 0):,}"
        out["training loss"] = f"{run.steps[-1]['nll']:.4f}"
    if run.heldout:
        out["held-out loss"] = f"{run.heldout[-1]['heldout_nll']:.4f}"
        if (bits := run.heldout[-1].get("heldout_bits_per_byte")) is not None:
            out["bits per byte"] = f"{bits:.4f}"
        if (accuracy := run.heldout[-1].get("heldout_accuracy")) is not None:
            out["held-out accuracy"] = f"{100 * accuracy:.1f}%"
    for title, key, text in (
        ("tokens per second", "tokens_per_second", lambda v: f"{v:,.0f}"),
        ("MFU", "mfu", lambda v: f"{100 * v:.1f}%"),
        ("memory", "memory_bytes", lambda v: f"{v / 2**30:.2f} GiB"),
        ("disk reads a step", "disk_read_bytes", lambda v: f"{v / 2**30:.3f} GiB"),
        ("disk writes a step", "disk_written_bytes", lambda v: f"{v / 2**30:.3f} GiB"),
    ):
        value = run.typical(key)
        if value is not None:
            out[title] = text(value)
    account = run.goodput
    if account is not None:
        out["goodput"] = f"{100 * account.fraction:.1f}% of {duration(account.total)}"
        out["starts"] = str(account.starts)
    if run.spikes:
        out["spikes"] = str(len(run.spikes))
    return out


def tiles(run: RunRecord) -> str:
    """Key figures as HTML tiles."""
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span class="soft">{escape(name)}</span></div>'
        for name, value in figures(run).items()
        if name != "state"
    )
    return f'<div class="tiles">{cells}</div>'


def loss_chart(runs: Sequence[RunRecord]) -> str:
    """Chart of the training loss, per batch and smoothed, and of the held-out loss."""
    lines, alone = [], len(runs) == 1
    for n, (name, run) in enumerate(zip(labels(runs), runs, strict=True)):
        steps, nll = run.series("nll")
        color = 0 if alone else n
        if alone:
            lines.append(Line("training batch", steps, nll, color, "faint"))
        lines.append(Line("training, smoothed" if alone else name, steps, smoothed(nll), color))
        if run.heldout:
            xs, ys = [row["step"] for row in run.heldout], [row["heldout_nll"] for row in run.heldout]
            lines.append(Line("held out" if alone else "", xs, ys, 1 if alone else n, "points"))
    marks = [*restart_marks(runs[0]), *((one["step"], spike_line(one)) for one in runs[0].spikes)] if alone else ()
    unit = "nats per token" if alone else "nats per token, smoothed; points are held out"
    return f"<figure>{chart(lines, title='loss', unit=unit, marks=marks)}</figure>"


def charts(runs: Sequence[RunRecord]) -> list[str]:
    """Charts of ``CHARTS``, for those metrics that some run has."""
    out = []
    for title, unit, read, options in CHARTS:
        found = [(n, name, *read(run)) for n, (name, run) in enumerate(zip(labels(runs), runs, strict=True))]
        lines = [Line(name if len(runs) > 1 else "", xs, ys, n) for n, name, xs, ys in found if xs]
        if lines:
            out.append(f"<figure>{chart(lines, title=title, unit=unit, **options)}</figure>")
    return out


def episode_table(run: RunRecord) -> str:
    """Table of episodes of the last step: those with the highest and the lowest rewards, and those without one."""
    ordered = sorted(run.episodes, key=lambda row: (row["reward"] is None, -(row["reward"] or 0.0)))
    half = EPISODES_SHOWN // 2
    shown = ordered if len(ordered) <= EPISODES_SHOWN else ordered[:half] + ordered[-half:]
    cells = "".join(
        f"<tr><td>{'none' if row['reward'] is None else format(row['reward'], '.3g')}</td>"
        f"<td>{row['advantage']:.2f}</td><td>{row['tokens']}</td>"
        f"<td><pre>{escape(row['prompt'][-400:])}</pre></td>"
        f"<td><pre>{escape(row['completion'][:800])}</pre>{escape(row.get('failure', ''))}</td></tr>"
        for row in shown
    )
    head = "".join(f"<th>{name}</th>" for name in ("reward", "advantage", "tokens", "prompt", "completion"))
    return f"<table><tr>{head}</tr>{cells}</table>"


def layer_charts(run: RunRecord) -> str:
    """Norms by layer in the newest row: a line per kind of parameter, and a table of parameters outside the layers."""
    out, row = [], run.layers[-1]
    names = {"grad": "gradient", "param": "parameters", "update": "update"}
    for what, name in names.items():
        deep = [(path, values) for path, values in row[what].items() if len(values) > 1]
        lines = [
            Line(path.split("/", 3)[-1], list(range(len(values))), values, n) for n, (path, values) in enumerate(deep)
        ]
        if lines:
            out.append(f"<figure>{chart(lines, title=f'norm of {name}', unit='by layer', log=True)}</figure>")
    single = [path for path, values in row["grad"].items() if len(values) == 1]
    if single:
        rows = [(path, *(float(row[what][path][0]) for what in names)) for path in single]
        out.append(f'<div class="panel wide">{table(rows, ("norm of", *names.values()))}</div>')
    return "".join(out)


def restart_marks(run: RunRecord) -> list[tuple[float, str]]:
    """Chart marks at the steps that a start resumed from."""
    account = run.goodput
    if account is None:
        return []
    return [(at, f"resumed after step {at}, {before - at} steps repeated") for before, at in account.restarts]


def spike_line(event: dict[str, Any]) -> str:
    """One line about a loss spike and the action taken."""
    done = {"skip": "skipped", "lower_rate": "learning rate lowered"}.get(event["action"])
    if done is None:
        first, last = event["batches"]
        done = f"rolled back to step {event['from']}; batches {first} to {last} skipped from step {event['to']} on"
    return f"spike at step {event['step']}: {done}"


def failure_line(event: dict[str, Any]) -> str:
    """One line about a process of an elastic run."""
    if event["event"] == "recovered":
        return f"step {event['step']} done {event['seconds']:.1f} s after the failure"
    if event["event"] == "restored":
        own, moved = (f"{event[name] / 2**20:,.2f} MiB" for name in ("own_bytes", "peer_bytes"))
        return f"state of step {event['step']} read from memory: {own} of the readers' own hosts, {moved} of others"
    if event["event"] == "returned":
        return f"slot {event['slot']} returned"
    place = event.get("place") or f"slot {event['slot']}"  # older logs have the slot alone
    return (
        f"process {event['rank']} ({place}) {event['event']} after step {event['step']}: {event['what']}; "
        f"named after {event['named_after']:.1f} s"
    )


PHASE_COLORS = {"rollout": 0, BOTH: 3, "train": 2, "swap": 1, "idle": 10}
"""Colours of the phases of reinforcement learning; those after the sixth are pale."""
STEPS_SHOWN = 6
"""Steps whose phases a report draws."""
TIME_COLORS = (
    "compiling", "repeated steps", "steps", "down", "waiting for data", "evaluating",
    "initialising", "starting", "ending", "restoring", "saving",
)  # fmt: skip
"""Categories of time in the order of colours; those of the second row are pale."""


def time_bar(run: RunRecord) -> str:
    """Bar of the run's time by category."""
    account = run.goodput
    if account is None:
        return '<p class="soft">This run has no log of events.</p>'
    parts = [(name, size, TIME_COLORS.index(name)) for name, size in account.parts() if size > 0]
    return stacked_bar(parts, title="where the time went")


def goodput_section(run: RunRecord) -> str:
    """Section about goodput, restarts, checkpoints and loss spikes."""
    found = run.goodput
    if found is None:
        return ""
    rows = [(name, duration(size), f"{100 * size / found.total:.1f}%") for name, size in found.parts() if size > 0]
    saved = [event for event in run.events if event["event"] == "saved" and "place" in event]
    listed = [(f"step {event['step']}", event["place"], clock(event["time"])) for event in saved]
    again = [
        (f"start {n + 2}", f"after step {at}", f"{before - at} steps repeated")
        for n, (before, at) in enumerate(found.restarts)
    ]
    text = f"Goodput {100 * found.fraction:.1f}%: the share of {duration(found.total)} that went into steps that count."
    lists = [
        ("Time", table(rows)),
        ("Starts", table(again) if again else '<p class="soft">Never restarted.</p>'),
        ("Checkpoints", table(listed[-12:]) if listed else '<p class="soft">None.</p>'),
    ]
    if run.spikes:
        lists.append(("Spikes", table([(spike_line(one), clock(one["time"])) for one in run.spikes])))
    if run.failures:
        lists.append(("Processes", table([(failure_line(one), clock(one["time"])) for one in run.failures])))
    columns = "".join(f'<div class="panel"><b>{name}</b>{inside}</div>' for name, inside in lists)
    bar = f'<div class="panel">{time_bar(run)}</div>'
    return f'<h2>Where the time went</h2><p>{escape(text)}</p>{bar}<div class="grid-of gap">{columns}</div>'


def phase_section(run: RunRecord) -> str:
    """Section about rollouts and updates of reinforcement learning: shares of wall time, and the last steps' phases."""
    if not run.phases:
        return ""
    found = phase_seconds(run.phases)
    bar = stacked_bar(
        [(name, found[name], PHASE_COLORS[name]) for name in SHARES if found[name] > 0],
        title="wall time of rollouts and updates",
    )
    last = [one for one in run.phases[-1] if one.step > run.phases[-1][-1].step - STEPS_SHOWN]
    begin = min((one.begin for one in last), default=0.0)
    rows = [
        (title, [_block(one, begin) for one in last if one.name in names])
        for title, names in (("engine", ("rollout", "swap")), ("trainer", ("train",)))
    ]
    drawn = lanes(rows, title="last steps", unit="s")
    return (
        f'<h2>Rollouts and updates</h2><div class="panel">{bar}</div>'
        f'<div class="grid-of gap"><figure>{drawn}</figure></div>'
    )


def _block(one: Phase, begin: float) -> tuple[float, float, int, str]:
    text = f"step {one.step}: {one.name}, {duration(one.seconds)}"
    return one.begin - begin, one.end - begin, PHASE_COLORS[one.name], text


def details(title: str, inside: str) -> str:
    """Collapsible HTML section."""
    return f'<details class="panel"><summary>{escape(title)}</summary><div class="wide">{inside}</div></details>'


def text_report(run: RunRecord) -> str:
    """Report of one run for a terminal, without curves."""
    lines = [f"{run.name}: {headline(run)}"]
    lines += [f"  {name:18} {value}" for name, value in figures(run).items() if name != "state"]
    found = run.goodput
    if found is not None:
        lines.append("  time")
        lines += [
            f"    {name:18} {duration(size):>9} {100 * size / found.total:6.1f}%"
            for name, size in found.parts()
            if size > 0
        ]
        lines += [f"  resumed after step {at}, {before - at} steps repeated" for before, at in found.restarts]
    if run.phases:
        shares = phase_seconds(run.phases)
        total = sum(shares.values()) or 1.0
        lines.append("  rollouts and updates")
        lines += [
            f"    {name:18} {duration(size):>9} {100 * size / total:6.1f}%" for name, size in shares.items() if size
        ]
    lines += [f"  {spike_line(one)}" for one in run.spikes]
    lines += [f"  {failure_line(one)}" for one in run.failures]
    for name, summary in run.profiles.items():
        lines += [f"  profile {name}", *(f"    {line}" for line in summary.splitlines())]
    return "\n".join(lines)


def smoothed(values: Sequence[float | None], weight: float = 0.9) -> list[float | None]:
    """Exponential moving average with bias correction; missing values have no weight."""
    out: list[float | None] = []
    mean = seen = 0.0
    for value in values:
        if value is not None:
            mean, seen = weight * mean + (1 - weight) * value, weight * seen + (1 - weight)
        out.append(mean / seen if seen else None)
    return out


def duration(seconds: float) -> str:
    """Duration as ``1h02m``, ``3m07s`` or ``4.2 s``."""
    if seconds >= 3600:
        return f"{int(seconds) // 3600}h{int(seconds) % 3600 // 60:02d}m"
    return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s" if seconds >= 60 else f"{seconds:.1f} s"


def clock(when: float) -> str:
    """Time of a timestamp, in UTC."""
    import datetime

    return datetime.datetime.fromtimestamp(when, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
