"""Killed at any point, with any disk: the last good checkpoint is never lost, a wrong one never selected."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from tests.checkpoint.crashing import trial
from tests.proofs.harness import proof


@proof("checkpoint", count=300, sample=2)
def crash_matrix(seed: int) -> None:
    """One SIGKILL: mid-step, in the snapshot, half-way in a write, at an fsync, before or after a rename, half-way in a
    deletion, at a random time, on a slow disk; three times in ten after the disk was full or read-only for a moment. A
    second life in the same directory follows, and a second SIGKILL."""
    logging.getLogger("jaxllm.checkpoint").disabled = True
    try:
        with tempfile.TemporaryDirectory() as folder:
            trial(Path(folder), seed)
    finally:
        logging.getLogger("jaxllm.checkpoint").disabled = False
