"""Live view of a run: a panel in a terminal or notebook, plain lines in a log file."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from typing import Any

import jax
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

BARS = "▁▂▃▄▅▆▇█"


class LiveView:
    """Shows steps as they finish: loss, gradient norm, throughput, MFU, memory and time left.

    Args:
        total: steps of the run.
        first: steps done before this start.
        tokens_per_step: target tokens in a batch.
        flops_per_token: model FLOPs of one token in training.
        peak: peak FLOP/s of all devices together; None where unknown.
        log_every: steps between two lines where the output is not interactive.
        quiet: show nothing; for all processes but one.
        shown: metric that is shown as the loss.
        label: in front of each line, where the views of several runs share the output; there is no panel then.
    """

    def __init__(
        self,
        total: int,
        first: int,
        tokens_per_step: int,
        flops_per_token: float,
        peak: float | None,
        log_every: int,
        *,
        quiet: bool = False,
        shown: str = "nll",
        label: str = "",
    ):
        self.console, self._shown, self._label = Console(quiet=quiet), shown, label
        self._total, self._first = total, first
        self._tokens, self._flops, self._peak = tokens_per_step, flops_per_token, peak
        self._log_every = log_every
        self._times: deque[tuple[int, float]] = deque([(first, time.monotonic())], maxlen=50)
        self._losses: deque[float] = deque(maxlen=60)
        self._bar = Progress(TextColumn("step"), BarColumn(None), MofNCompleteColumn(), expand=True)
        self._task = self._bar.add_task("", total=total, completed=first)
        self._live: Live | None = None
        self._last_log = first

    def __enter__(self) -> LiveView:
        if not self._label and (self.console.is_terminal or self.console.is_jupyter):
            self._live = Live(self._bar, console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Prints a line above the panel."""
        self.console.print(text, highlight=False, soft_wrap=True)
        sys.stdout.flush()

    def rewind_to(self, step: int) -> None:
        """Goes back to ``step`` after a rollback; later steps are shown again."""
        self._first = self._last_log = step

    def start_clock(self) -> None:
        """Restarts the clock of tokens per second, so that compilation does not count."""
        self._times = deque([(self._first, time.monotonic())], maxlen=50)

    @property
    def tokens_per_second(self) -> float:
        """Throughput over the last steps shown, at most 50."""
        (step0, time0), (step1, time1) = self._times[0], self._times[-1]
        return (step1 - step0) * self._tokens / (time1 - time0) if step1 > step0 else 0.0

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Shows the metrics of step ``step``."""
        self._times.append((step, time.monotonic()))
        self._losses.append(metrics[self._shown])
        if self._live is not None:
            self._bar.update(self._task, completed=step)
            self._live.update(Group(self._bar, self._panel(step, metrics)))
        elif step - self._last_log >= self._log_every or step == self._total or step == self._first + 1:
            self._last_log = step
            named = [self._label] if self._label else []
            self.say(
                "  ".join(
                    [*named, f"step {step}/{self._total}", *(f"{k} {v}" for k, v in self._figures(step, metrics))]
                )
            )

    def _panel(self, step: int, metrics: dict[str, float]) -> Table:
        table = Table.grid(padding=(0, 2))
        figures = self._figures(step, metrics)
        table.add_row(*(f"[dim]{name}[/] [bold]{value}[/]" for name, value in figures))
        return Group(table, f"[blue]{sparkline(self._losses)}[/]")  # type: ignore[return-value]

    def _figures(self, step: int, metrics: dict[str, float]) -> list[tuple[str, str]]:
        rate = self.tokens_per_second
        left = (self._total - step) * self._tokens / rate if rate else 0.0
        figures = [
            ("loss", f"{metrics[self._shown]:.4f}"),
            ("grad", f"{metrics['grad_norm']:.2f}"),
            ("lr", f"{metrics['learning_rate']:.1e}"),
            ("tok/s", f"{rate:,.0f}"),
            ("ETA", duration(left)),
            ("memory", f"{memory_bytes() / 2**30:.2f} GiB"),
        ]
        if self._peak:
            figures.append(("MFU", f"{100 * rate * self._flops / self._peak:.1f}%"))
        else:
            figures.append(("GFLOP/s", f"{rate * self._flops / 1e9:,.0f}"))
        return figures


def sparkline(values: Any) -> str:
    """Line chart in one row of text: a bar per value, scaled to their range; "?" for non-finite values."""
    values = list(values)
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return "?" * len(values)
    low, high = min(known), max(known)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((v - low) * scale)] if math.isfinite(v) else "?" for v in values)


def duration(seconds: float) -> str:
    """Duration as ``1h02m`` or ``3m07s``."""
    seconds = int(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 60}m{seconds % 60:02d}s"


def memory_bytes() -> int:
    """Bytes in use on the fullest local device; on CPU, which reports none, the resident memory of the process."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    used = [s["bytes_in_use"] for s in stats if s]
    if used:
        return max(used)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: the standard library only knows the peak
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
