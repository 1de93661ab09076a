"""Profiler: takes profiles of training steps, those configured or the next ones after a signal.

Each process writes its own; process 0 adds a text summary. A profile can be opened with TensorBoard's profile plugin,
with xprof, or, as ``*.trace.json.gz``, in Perfetto.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxllm.files import DataError
from jaxllm.observe.profile_summary import read_trace

STEPS_AT_SIGNAL = 3
"""Steps that a signal profiles."""


class Profiler:
    """Starts and stops profiles around steps.

    Args:
        folder: each profile goes to a directory ``step_N`` in it.
        steps: steps to profile.
        leads: whether this process writes the summary.
    """

    def __init__(self, folder: Path, steps: range, *, leads: bool = True):
        self._folder, self._steps, self._leads = folder, steps, leads
        self._requested = False
        self._end: int | None = None
        self._where = folder

    def before_step(self, step: int, wait: Callable[[], Any]) -> contextlib.AbstractContextManager[Any]:
        """Starts a profile if ``step`` is to be profiled; call before dispatching it.

        Args:
            step: number of the step, from 1.
            wait: blocks until the previous step has run on all devices, so that none of it is in the profile.

        Returns:
            context manager to dispatch the step in, which marks the step in the profile.
        """
        if self._end is None and not (step in self._steps or self._requested):
            return contextlib.nullcontext()
        import jax

        if self._end is None:
            self._end = self._steps.stop if step in self._steps else step + STEPS_AT_SIGNAL
            self._requested = False
            wait()
            self._where = self._folder / f"step_{step}"
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # Python calls would drown out the rest
            jax.profiler.start_trace(str(self._where), profiler_options=options)
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def after_step(self, step: int, wait: Callable[[], Any]) -> str | None:
        """Stops a profile that is complete and returns its summary, else None; call after dispatching ``step``.

        Args:
            step: number of the step.
            wait: blocks until the step has run on all devices.
        """
        if self._end is None or step + 1 < self._end:
            return None
        wait()
        return self.stop()

    def stop(self) -> str | None:
        """Stops a profile in progress, complete or not, and returns its summary in the leading process, else None."""
        if self._end is None:
            return None
        import jax

        self._end = None
        jax.profiler.stop_trace()
        if not self._leads:
            return None
        try:
            text = read_trace(self._where).text()
        except DataError as error:
            text = str(error)
        (self._where / "summary.txt").write_text(text + "\n")
        return f"profile of {self._where.name}: {self._where}\n{text}"

    @contextlib.contextmanager
    def listen_for_signal(self) -> Iterator[None]:
        """Context manager in which SIGUSR2 requests a profile; on exit a profile in progress is stopped."""

        def ask(number: int, frame: Any) -> None:
            self._requested = True

        old: Any = None
        with contextlib.suppress(ValueError):  # only the main thread can handle signals
            old = signal.signal(signal.SIGUSR2, ask)
        try:
            yield
        finally:
            self.stop()
            if old is not None:
                signal.signal(signal.SIGUSR2, old)
