"""Progress line on the terminal, for commands that wait for a compiler."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharding.isolate import Progress


def progress_line(before: str = "") -> Progress | None:
    """Callback that shows stage and elapsed seconds on the terminal; None if stderr is not a terminal."""
    if not sys.stderr.isatty():
        return None

    def show(seconds: float, stage: str) -> None:
        end = "\r\x1b[K" if stage == "done" else ""
        print(f"\r\x1b[K{before}{stage}, {seconds:.0f} s{end}", end="", file=sys.stderr, flush=True)

    return show
