"""Crashes at any point, with any disk: the last good checkpoint is never lost, a bad one never selected."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from tests.checkpoint import crashing_together
from tests.checkpoint.crashing import memory_trial, trial
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


@proof("checkpoint", count=40, sample=1)
def crashes_with_snapshots(seed: int) -> None:
    """Three SIGKILLs of a trainer that makes snapshots in memory as fast as it can; the peer server survives."""
    with tempfile.TemporaryDirectory() as folder:
        memory_trial(Path(folder), seed)


@proof("checkpoint", count=60, sample=1)
def crashes_together(seed: int) -> None:
    """Two or three processes save together; a SIGKILL of one, any of them: between two steps, before it says something
    to the others or hears from them, half-way in a write, at an fsync, around the rename, half-way in a deletion, at a
    random time. The others end by themselves and name it, or are killed too. Twice; then a life that ends well."""
    with tempfile.TemporaryDirectory() as folder:
        crashing_together.trial(Path(folder), seed)
