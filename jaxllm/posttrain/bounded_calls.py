"""Bounded calls: functions of users run in daemon threads, so many at a time, each for at most so long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

AT_A_TIME = 8


@dataclass(frozen=True)
class CallResult:
    """Result of a call, or why there is none."""

    value: Any = None
    failure: str = ""


class _Call(threading.Thread):
    def __init__(self, function: Callable[[], Any], gate: threading.Semaphore):
        super().__init__(daemon=True)
        self._function, self._gate = function, gate
        self.began: float | None = None
        self.result = CallResult()

    def run(self) -> None:
        with self._gate:
            self.began = time.monotonic()
            try:
                self.result = CallResult(self._function())
            except Exception as error:
                self.result = CallResult(failure=f"raised {type(error).__name__}: {error}")


def bounded_calls(functions: Sequence[Callable[[], Any]], seconds: float) -> list[CallResult]:
    """Results of functions, in order; never raises.

    Args:
        functions: run in threads, ``AT_A_TIME`` of them at the same time.
        seconds: that each may take; 0: any. One that takes longer has failed, and is left running in its thread, which
            ends with the program.
    """
    gate = threading.Semaphore(AT_A_TIME)
    calls = [_Call(function, gate) for function in functions]
    for call in calls:
        call.start()
    results = []
    for call in calls:
        late = False
        while call.is_alive() and not late:
            left = seconds - (time.monotonic() - call.began) if seconds and call.began is not None else 0.1
            late = left <= 0
            call.join(min(max(left, 0.0), 0.1))
        if late and call.is_alive():
            gate.release()  # its place is another's now
            results.append(CallResult(failure=f"took longer than rollout.reward_timeout = {seconds:g} s"))
        else:
            results.append(call.result)
    return results
