"""Metric sinks: metrics.jsonl always, and the trackers (TensorBoard, Weights & Biases, trackio) that are configured.

A tracker's package is imported only if the tracker is configured; if it is missing, the error names the command that
installs it. A tracker that fails during training is reported once and dropped: training does not stop for it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
_log = logging.getLogger("jaxllm.observe")


class SinkError(ValueError):
    """A tracker's package is not installed; the message has the command that installs it."""


@runtime_checkable
class Sink(Protocol):
    """Receiver of the metrics of steps."""

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Receives the metrics of one step."""

    def close(self) -> None:
        """Flushes and closes."""


class JsonLines:
    """JSON lines file: one line per call, written at once, with the seconds since it was opened."""

    def __init__(self, file: Path):
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._start = file, time.monotonic()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends a line."""
        seconds = round(time.monotonic() - self._start, 3)
        # Opened for each line: to drop the rows of repeated steps, the file is replaced by another.
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"step": step, **values, "seconds": seconds}) + "\n")

    def close(self) -> None:
        """Does nothing; no file is held open."""


class TensorBoard:
    """TensorBoard event files under ``tensorboard/`` of the run directory: `tensorboard --logdir runs`."""

    def __init__(self, directory: Path, name: str, config: Mapping[str, Any]):
        self._writer = import_tracker("tensorboard").SummaryWriter(logdir=str(directory / "tensorboard"))
        self._writer.add_text("config", f"```\n{json.dumps(config, indent=1)}\n```")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the scalars of a step."""
        for key, value in scalars(values).items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class Wandb:
    """Weights & Biases run, resumed at each start; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, directory: Path, name: str, config: Mapping[str, Any]):
        self._run = import_tracker("wandb").init(
            project="jaxllm", name=name, id=run_id(directory), resume="allow", config=dict(config), dir=str(directory)
        )

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs the scalars of a step."""
        self._run.log(scalars(values), step=step)

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


class Trackio:
    """trackio run, resumed at each start; on this machine unless trackio is configured otherwise."""

    def __init__(self, directory: Path, name: str, config: Mapping[str, Any]):
        self._run = import_tracker("trackio").init(project="jaxllm", name=name, resume="allow", config=dict(config))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs the scalars of a step."""
        self._run.log(scalars(values), step=step)

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


KINDS = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


class MetricSinks:
    """All metric sinks of a run; a context manager that closes them.

    Args:
        file: metrics.jsonl; None in processes that log nothing.
        names: trackers.
        name: of the run.
        config: of the run, as JSON.

    Raises:
        SinkError: a tracker is not installed.
    """

    def __init__(self, file: Path | None, names: Sequence[str], name: str, config: Mapping[str, Any]):
        self._lines = JsonLines(file) if file is not None else None
        self._trackers: dict[str, Sink] = {}
        try:
            if file is not None:
                for each in names:
                    self._trackers[each] = KINDS[each](file.parent, name, config)
        except BaseException:
            self.close()
            raise

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs the metrics of a step; trackers receive scalars only."""
        if self._lines is not None:
            self._lines.log(step, values)
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(step, values)
            except Exception as error:  # whatever a foreign package may raise
                _log.error("tracker %s failed and gets no more metrics: %s", name, error)
                del self._trackers[name]

    def close(self) -> None:
        """Closes all sinks; a tracker's failure is logged."""
        if self._lines is not None:
            self._lines.close()
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:
                _log.error("tracker %s failed to close: %s", name, error)

    def __enter__(self) -> MetricSinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_sinks(names: Sequence[str]) -> None:
    """Checks that trackers are installed, before anything is computed.

    Raises:
        SinkError: names the command that installs it.
    """
    for name in names:
        import_tracker(name)


def import_tracker(name: str) -> Any:
    """Module of a tracker; raises SinkError if it is not installed."""
    module = PACKAGES[name]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SinkError(f"observe.sinks: {name} needs a package: pip install {module} ({error})") from error


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """The values that are single numbers."""
    return {key: value for key, value in values.items() if isinstance(value, (int, float))}


def run_id(directory: Path) -> str:
    """Identifier of a run directory, the same at every start: 16 hex digits."""
    return hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]
