"""Checkpoint errors. Each message names the step, the leaf or file, and what to do."""

from __future__ import annotations


class CheckpointError(Exception):
    """Base of all checkpoint errors; also a save or a read that the system refused (disk full, permissions)."""


class CheckpointNotFoundError(CheckpointError):
    """Error: there is no complete checkpoint of that step, or none at all."""


class CheckpointCorruptError(CheckpointError):
    """Error: files are missing, truncated or changed. Only `resume` and `latest_good` skip such a checkpoint."""

    def __init__(self, finding: str, advice: str, *, step: int, leaf: str | None = None, file: str | None = None):
        super().__init__(f"{finding} {advice}")
        self.finding = finding
        """The message without its advice."""
        self.step = step
        """The step of the bad checkpoint."""
        self.leaf = leaf
        """Path of the corrupt leaf in the state, such as `params/blocks/wq`; None if it is not a single leaf."""
        self.file = file
        """Corrupt file, relative to the checkpoint's folder, if known."""


class CheckpointMismatchError(CheckpointError):
    """Error: the checkpoint is valid but differs from the requested state: other leaves, shapes or dtypes."""


class CheckpointBusyError(CheckpointError):
    """Error: another Checkpointer is already writing into the directory."""
