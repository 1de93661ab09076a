"""Recorder of a run: live view, metrics, events, norms by layer and profiles of its steps."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import jax

from jaxllm.compiler.device_peaks import peak_of
from jaxllm.config import to_dict
from jaxllm.models import param_count
from jaxllm.observe.event_log import EventLog
from jaxllm.observe.metric_sinks import JsonLines, MetricSinks
from jaxllm.observe.profiler import Profiler
from jaxllm.train.evaluate import evaluates_objective
from jaxllm.train.model_flops import hardware_flops_per_token, train_flops_per_token
from jaxllm.train.records.live_view import LiveView, memory_bytes
from jaxllm.train.records.receipt import git_commit, versions
from jaxllm.train.run import Run

NON_SCALAR = ("expert_load", "layers")
"""Metrics of a step that are arrays or trees instead of scalars."""


class Recorder:
    """Records one start of a run. ``open`` creates it and closes its files.

    Attributes:
        view: live view in the terminal or notebook.
        sinks: metrics.jsonl and trackers.
        events: event log.
        profiler: takes profiles of steps.
    """

    def __init__(self, run: Run, first: int, events: EventLog, sinks: MetricSinks, label: str = ""):
        config, files = run.config, run.directory
        self.view = make_live_view(run, first, label)
        self.events, self.sinks = events, sinks
        self.profiler = Profiler(files.profiles, config.observe.profiled_steps(), leads=files.writes)
        self._config = config
        self._layers = JsonLines(files.layers) if files.writes and config.observe.layers_every else None
        self._throughput = throughput_facts(run)
        self._mark = time.monotonic()
        self._waited: dict[int, float] = {}

    @classmethod
    @contextlib.contextmanager
    def open(cls, run: Run, first: int, events: EventLog, label: str = "") -> Iterator[Recorder]:
        """Context manager with a recorder; an exception that leaves the block is logged as the event "failed".

        Args:
            label: of the live view's lines, among those of other runs.

        Raises:
            SinkError: a tracker is not installed.
        """
        config, files = run.config, run.directory
        metrics = files.metrics if files.writes else None
        with MetricSinks(metrics, config.observe.sinks, config.name, to_dict(config)) as sinks:
            recorder = cls(run, first, events, sinks, label)
            try:
                with recorder.view, recorder.profiler.listen_for_signal():
                    yield recorder
            except BaseException as error:
                events.write("failed", why=(str(error).splitlines() or [""])[0] or type(error).__name__)
                raise

    def timed_batches(self, batches: Any, before: list[tuple[int, dict[str, Any]]]) -> Iterator[tuple[int, Any]]:
        """Iterates over (step, batch) and measures how long the loop waits for each batch.

        Args:
            batches: (step, batch) pairs.
            before: the dispatched step whose metrics have not been read. While it is still running, waiting costs
                nothing.
        """
        while True:
            began = time.monotonic()
            number, batch = next(batches)
            hidden = any(not value.is_ready() for _, metrics in before for value in on_devices(metrics)[:1])
            self._waited[number + 1] = 0.0 if hidden else time.monotonic() - began
            yield number, batch

    def start_clock(self) -> None:
        """Restarts the step clock, so that the time before does not count for the next step."""
        self._mark = time.monotonic()

    def step(self, number: int, values: dict[str, float], metrics: dict[str, Any]) -> None:
        """Shows and logs step ``number``.

        Args:
            number: of the step, from 1.
            values: its scalar metrics.
            metrics: all its metrics, on the devices.
        """
        now = time.monotonic()
        spent, self._mark = now - self._mark, now
        wait = self._waited.pop(number, 0.0)
        self.view.step(number, values)
        self.events.step(number, wait)
        row: dict[str, Any] = {key: value if math.isfinite(value) else None for key, value in values.items()}
        row |= {"step_seconds": round(spent, 6), "data_wait": round(wait, 6)}
        row |= {"memory_bytes": memory_bytes(), "tokens_per_second": self.view.tokens_per_second}
        if self._throughput["peak_flops"]:
            for name, each in (("mfu", "flops_per_token"), ("hfu", "hardware_flops_per_token")):
                row[name] = self._throughput[each] * self.view.tokens_per_second / self._throughput["peak_flops"]
        if "expert_load" in metrics and self._config.routing.log_loads:
            row["expert_load"] = metrics["expert_load"].tolist()
        self.sinks.log(number, row)
        if self._layers is not None and number % self._config.observe.layers_every == 0:
            self._layers.log(number, {name: arrays_by_path(tree) for name, tree in metrics["layers"].items()})


def on_devices(metrics: dict[str, Any]) -> list[Any]:
    """Metrics that are on the devices; others were counted by the host."""
    return [value for value in jax.tree.leaves(metrics) if isinstance(value, jax.Array)]


def arrays_by_path(tree: Any) -> dict[str, list[float]]:
    """Values of a tree's arrays by their path ("segments/0/...")."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): value.tolist() for path, value in leaves}


def throughput_facts(run: Run) -> dict[str, Any]:
    """Constants for throughput and MFU: tokens per step, FLOPs per token, peak FLOP/s of all devices."""
    config, devices = run.config, run.mesh.devices.flatten()
    peak = peak_of(devices[0].device_kind)
    return {
        "tokens_per_step": config.data.batch_size * config.data.seq_len,
        "flops_per_token": train_flops_per_token(config.model, config.data.seq_len),
        "hardware_flops_per_token": hardware_flops_per_token(config.model, config.data.seq_len),
        "peak_flops": peak and peak.flops * devices.size,
    }


def start_facts(run: Run) -> dict[str, Any]:
    """Facts about this start for the event log: devices, processes, parameters, FLOPs, versions, commit."""
    devices = run.mesh.devices.flatten()
    return {
        "devices": int(devices.size),
        "device_kind": devices[0].device_kind,
        "processes": run.group.size,
        "parameters": param_count(run.abstract.params),
        **throughput_facts(run),
        "versions": versions(),
        "commit": git_commit(),
    }


def make_live_view(run: Run, first: int, label: str = "") -> LiveView:
    """Live view of a run; its lines have a label among those of other runs."""
    known = throughput_facts(run)
    return LiveView(
        total=run.config.steps,
        first=first,
        tokens_per_step=known["tokens_per_step"],
        flops_per_token=known["flops_per_token"],
        peak=known["peak_flops"],
        log_every=run.config.log_every,
        quiet=not run.group.is_leader,
        shown="loss" if evaluates_objective(run.config) else "nll",
        label=label,
    )
