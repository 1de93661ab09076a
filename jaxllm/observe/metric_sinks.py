"""Where metrics go: lines of JSON always, and trackers that are asked for.

A tracker is imported only where it is named, and refused with the command that installs it where it is missing. One
that fails while a run goes on is reported once and left out: training does not stop for a tracker.
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
    """A tracker cannot be had; the message has the command that installs it."""


@runtime_checkable
class Sink(Protocol):
    """Takes the metrics of a step."""

    def log(self, step: int, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """A line of JSON for each call, written at once, with the seconds since the log was opened."""

    def __init__(self, file: Path):
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._start = file, time.monotonic()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        seconds = round(time.monotonic() - self._start, 3)
        # Opened anew for each line: rows of a step that is done again are dropped by putting another file in its place.
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"step": step, **values, "seconds": seconds}) + "\n")

    def close(self) -> None:
        """Nothing is held."""


class TensorBoard:
    """Scalars in event files under ``tensorboard/`` of the run's directory: `tensorboard --logdir runs`."""

    def __init__(self, directory: Path, name: str, config: Mapping[str, Any]):
        self._writer = import_tracker("tensorboard").SummaryWriter(logdir=str(directory / "tensorboard"))
        self._writer.add_text("config", f"```\n{json.dumps(config, indent=1)}\n```")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for key, value in scalars(values).items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, the same one at every start; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, directory: Path, name: str, config: Mapping[str, Any]):
        self._run = import_tracker("wandb").init(
            project="jaxllm", name=name, id=run_id(directory), resume="allow", config=dict(config), dir=str(directory)
        )

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(scalars(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio, on this machine unless it is told otherwise, the same one at every start."""

    def __init__(self, directory: Path, name: str, config: Mapping[str, Any]):
        self._run = import_tracker("trackio").init(project="jaxllm", name=name, resume="allow", config=dict(config))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(scalars(values), step=step)

    def close(self) -> None:
        self._run.finish()


KINDS = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


class MetricSinks:
    """All of a run's. Closed by its ``with`` block.

    Args:
        file: metrics.jsonl; None in processes that log nothing.
        names: of trackers.

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
        """Metrics of a step; what is no number goes to the lines of JSON only."""
        if self._lines is not None:
            self._lines.log(step, values)
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(step, values)
            except Exception as error:  # whatever a foreign package may raise
                _log.error("%s gets no more metrics: %s", name, error)
                del self._trackers[name]

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:
                _log.error("%s did not end well: %s", name, error)

    def __enter__(self) -> MetricSinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_sinks(names: Sequence[str]) -> None:
    """Refuses trackers that are not installed, before anything is computed.

    Raises:
        SinkError: names the command.
    """
    for name in names:
        import_tracker(name)


def import_tracker(name: str) -> Any:
    """The module of a tracker."""
    module = PACKAGES[name]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SinkError(f"observe.sinks: {name} needs a package: pip install {module} ({error})") from error


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Those that are single numbers."""
    return {key: value for key, value in values.items() if isinstance(value, (int, float))}


def run_id(directory: Path) -> str:
    """Of a run, the same at every start of it."""
    return hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]
