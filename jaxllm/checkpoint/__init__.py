"""Checkpoints: asynchronous, atomic, verified; saved on one mesh, restored on any other.

    with Checkpointer("runs/a/checkpoints", CheckpointConfig(every=100)) as checkpointer:
        checkpointer.save(100, state, {"cursor": 12_800})
        ...
        found = checkpointer.resume(abstract_state)  # newest good one, or None

Orbax writes the arrays; a manifest of our own holds a hash for each of them. Nothing is ever unpickled.
"""

from typing import TYPE_CHECKING

from jaxllm.checkpoint.config import CheckpointConfig as CheckpointConfig
from jaxllm.checkpoint.config import MemoryConfig as MemoryConfig
from jaxllm.checkpoint.errors import CheckpointBusyError as CheckpointBusyError
from jaxllm.checkpoint.errors import CheckpointCorruptError as CheckpointCorruptError
from jaxllm.checkpoint.errors import CheckpointError as CheckpointError
from jaxllm.checkpoint.errors import CheckpointMismatchError as CheckpointMismatchError
from jaxllm.checkpoint.errors import CheckpointNotFoundError as CheckpointNotFoundError

if TYPE_CHECKING:
    from jaxllm.checkpoint.checkpointer import Checkpointer
    from jaxllm.checkpoint.looking import Resumed
    from jaxllm.checkpoint.manifest import LeafRecord, Manifest
    from jaxllm.checkpoint.memory.snapshots import Snapshots
    from jaxllm.checkpoint.providers import StateProvider
    from jaxllm.checkpoint.restore import Reading, Source
    from jaxllm.checkpoint.shared import SharedCheckpointer
    from jaxllm.checkpoint.writer import StreamedLeaf

# Orbax takes 0.4 s to import: a program that only needs the config, such as `--help`, does not pay for it.
_LAZY = {
    "Checkpointer": "jaxllm.checkpoint.checkpointer",
    "LeafRecord": "jaxllm.checkpoint.manifest",
    "Manifest": "jaxllm.checkpoint.manifest",
    "Reading": "jaxllm.checkpoint.restore",
    "Resumed": "jaxllm.checkpoint.looking",
    "StateProvider": "jaxllm.checkpoint.providers",
    "SharedCheckpointer": "jaxllm.checkpoint.shared",
    "Snapshots": "jaxllm.checkpoint.memory.snapshots",
    "Source": "jaxllm.checkpoint.restore",
    "StreamedLeaf": "jaxllm.checkpoint.writer",
}

__all__ = [
    "CheckpointBusyError",
    "CheckpointConfig",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "Checkpointer",
    "LeafRecord",
    "Manifest",
    "MemoryConfig",
    "Reading",
    "Resumed",
    "SharedCheckpointer",
    "Snapshots",
    "Source",
    "StateProvider",
    "StreamedLeaf",
]


def __getattr__(name: str):
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
