"""Taking a profile of some steps of a run: of those asked for, or of the next ones at a signal.

Every process takes its own; process 0 writes what it says in words beside it. A profile is opened by TensorBoard's
profile plugin, by xprof, or as ``*.trace.json.gz`` in Perfetto.
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
"""Steps that a signal asks for."""


class Profiler:
    """Begins and ends profiles around steps.

    Args:
        folder: each profile goes to a directory ``step_N`` in it.
        steps: whose profile is taken.
        leads: whether this process writes the summary.
    """

    def __init__(self, folder: Path, steps: range, *, leads: bool = True):
        self._folder, self._steps, self._leads = folder, steps, leads
        self._asked = False
        self._end: int | None = None
        self._where = folder

    def before_step(self, step: int, wait: Callable[[], Any]) -> contextlib.AbstractContextManager[Any]:
        """To be called before ``step`` is dispatched; what it returns is entered for the dispatch.

        Args:
            wait: returns when the step before has been computed on all devices: nothing of it is to be in the profile.
        """
        if self._end is None and not (step in self._steps or self._asked):
            return contextlib.nullcontext()
        import jax

        if self._end is None:
            self._end = self._steps.stop if step in self._steps else step + STEPS_AT_SIGNAL
            self._asked = False
            wait()
            self._where = self._folder / f"step_{step}"
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every call of Python would drown the rest
            jax.profiler.start_trace(str(self._where), profiler_options=options)
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def after_step(self, step: int, wait: Callable[[], Any]) -> str | None:
        """To be called when ``step`` is dispatched: ends a profile that is complete, and returns what it says.

        Args:
            wait: returns when the step has been computed on all devices.
        """
        if self._end is None or step + 1 < self._end:
            return None
        wait()
        return self.stop()

    def stop(self) -> str | None:
        """Ends a profile that is being taken; the steps after its last did not come."""
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
        """SIGUSR2 asks for a profile; and one that is being taken is ended, whatever happens."""

        def ask(number: int, frame: Any) -> None:
            self._asked = True

        old: Any = None
        with contextlib.suppress(ValueError):  # not the main thread: signals are not ours to take
            old = signal.signal(signal.SIGUSR2, ask)
        try:
            yield
        finally:
            self.stop()
            if old is not None:
                signal.signal(signal.SIGUSR2, old)
