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
from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.checkpoint.checkpoint_writer import StreamedLeaf
    from jaxllm.checkpoint.checkpointer import Checkpointer
    from jaxllm.checkpoint.memory.memory_snapshots import Snapshots
    from jaxllm.checkpoint.multihost_checkpointer import SharedCheckpointer
    from jaxllm.checkpoint.readonly import Resumed
    from jaxllm.checkpoint.restore import Reading, Source
    from jaxllm.checkpoint.state_providers import StateProvider
    from jaxllm.checkpoint.storage.checkpoint_manifest import LeafRecord, Manifest

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.checkpoint.checkpoint_writer": ("StreamedLeaf",),
        "jaxllm.checkpoint.checkpointer": ("Checkpointer",),
        "jaxllm.checkpoint.memory.memory_snapshots": ("Snapshots",),
        "jaxllm.checkpoint.multihost_checkpointer": ("SharedCheckpointer",),
        "jaxllm.checkpoint.readonly": ("Resumed",),
        "jaxllm.checkpoint.restore": (
            "Reading",
            "Source",
        ),
        "jaxllm.checkpoint.state_providers": ("StateProvider",),
        "jaxllm.checkpoint.storage.checkpoint_manifest": (
            "LeafRecord",
            "Manifest",
        ),
    },
)

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
