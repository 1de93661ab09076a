"""Asynchronous checkpointing: atomic commit, verified content hashes, resharding on restore to any mesh.

    with Checkpointer("runs/a/checkpoints", CheckpointConfig(every=100)) as checkpointer:
        checkpointer.save(100, state, {"cursor": 12_800})
        ...
        found = checkpointer.resume(abstract_state)  # the newest good checkpoint, or None

The arrays are in Orbax's format; a manifest holds the content hash of each. Nothing is ever unpickled.
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
    from jaxllm.checkpoint.memory.memory_snapshots import MemoryCheckpointer
    from jaxllm.checkpoint.multihost_checkpointer import MultihostCheckpointer
    from jaxllm.checkpoint.readonly import RestoredCheckpoint
    from jaxllm.checkpoint.restore import LeafSource, RestoreOptions
    from jaxllm.checkpoint.state_fragments import StateFragment, StateFragments
    from jaxllm.checkpoint.state_providers import StateProvider
    from jaxllm.checkpoint.storage.checkpoint_manifest import LeafRecord, Manifest

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.checkpoint.checkpoint_writer": ("StreamedLeaf",),
        "jaxllm.checkpoint.checkpointer": ("Checkpointer",),
        "jaxllm.checkpoint.memory.memory_snapshots": ("MemoryCheckpointer",),
        "jaxllm.checkpoint.multihost_checkpointer": ("MultihostCheckpointer",),
        "jaxllm.checkpoint.readonly": ("RestoredCheckpoint",),
        "jaxllm.checkpoint.restore": (
            "RestoreOptions",
            "LeafSource",
        ),
        "jaxllm.checkpoint.state_fragments": ("StateFragment", "StateFragments"),
        "jaxllm.checkpoint.state_providers": ("StateProvider",),
        "jaxllm.checkpoint.storage.checkpoint_manifest": (
            "LeafRecord",
            "Manifest",
        ),
    },
    renamed={
        "Reading": "RestoreOptions",
        "Resumed": "RestoredCheckpoint",
        "SharedCheckpointer": "MultihostCheckpointer",
        "Snapshots": "MemoryCheckpointer",
        "Source": "LeafSource",
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
    "LeafSource",
    "Manifest",
    "MemoryCheckpointer",
    "MemoryConfig",
    "MultihostCheckpointer",
    "RestoreOptions",
    "RestoredCheckpoint",
    "StateFragment",
    "StateFragments",
    "StateProvider",
    "StreamedLeaf",
]
