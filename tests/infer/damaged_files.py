"""Damage to files of weights while a model is served, and its end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Damage = Literal["changed", "bits", "removed"]
SAID: dict[Damage, str] = {"changed": "was changed", "bits": "checksum differs", "removed": "cannot be read"}
"""What the error says."""


@contextlib.contextmanager
def damaged(file: Path, damage: Damage) -> Iterator[None]:
    """A file that somebody has written to, of which bits are others though its time is the same, or that is gone."""
    good, stat = file.read_bytes(), file.stat()
    if damage == "removed":
        file.unlink()
    else:
        file.write_bytes(good[::-1])
        if damage == "bits":
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    yield
    file.write_bytes(good)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
