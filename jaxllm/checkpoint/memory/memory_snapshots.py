"""In-memory checkpointer: snapshots in the memory of peer servers, with erasure-coded parity on other hosts.

Every process writes its part of a snapshot into the peer server of its own host. Then it cuts these files, one after
another, into pieces, and sends each piece to the servers that keep parity of that piece's stripe (``host_parity``). The
manifest, which makes a snapshot of the files, is on every server and is written last.

    Reliable and Efficient In-Memory Fault Tolerance of Large Language Model Pretraining (separate processes, erasure
    coding); GEMINI (SOSP 2023: peers' memory before disk).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.checkpoint.config import CheckpointConfig, MemoryConfig
from jaxllm.checkpoint.memory.host_parity import StripeLayout, rebuild_lost_hosts, send_parity
from jaxllm.checkpoint.memory.peer_storage import BytesRead, PeerLost
from jaxllm.checkpoint.memory.snapshot_generations import EarlierGenerations, SnapshotGeneration
from jaxllm.checkpoint.multihost_checkpointer import CheckpointGroup, MultihostCheckpointer
from jaxllm.checkpoint.readonly import RestoredCheckpoint
from jaxllm.checkpoint.snapshot_leaf import SnapshotLeaf
from jaxllm.checkpoint.storage.checkpoint_manifest import FileRecord, LeafRecord


class PrefixedGroup:
    """Process group whose topics are a snapshot's own, because a checkpoint may be under way at the same time."""

    def __init__(self, group: CheckpointGroup):
        self._group = group
        self.rank, self.size = group.rank, group.size

    def gather(self, topic: str, text: str) -> list[str]:
        """Gathers a value of every process."""
        return self._group.gather(f"memory/{topic}", text)

    def broadcast(self, topic: str, text: str = "") -> str:
        """Sends a value of process 0 to all."""
        return self._group.broadcast(f"memory/{topic}", text)


class MemoryCheckpointer(MultihostCheckpointer):
    """In-memory checkpointer: a `MultihostCheckpointer` that saves the newest state into the memory of peer servers.

    Opening it starts this host's server if it does not run, and rebuilds what lost hosts had of the newest snapshot.

    Args:
        folder: folder for the servers' addresses, visible to all hosts.
        config: parity, and how long servers wait.
        group: the processes, one per host.
        saving, host_bytes: as in `CheckpointConfig`.
        generation: of the hosts of an elastic run; None: every start has the same hosts.
    """

    def __init__(
        self,
        folder: Path,
        config: MemoryConfig,
        group: CheckpointGroup,
        *,
        saving: Any = "auto",
        host_bytes: int = 2**32,
        generation: SnapshotGeneration | None = None,
    ):
        group = PrefixedGroup(group)
        of = generation or SnapshotGeneration("", tuple(range(group.size)), config.parity)
        self._storage = of.storage(folder, of.slots[group.rank])
        self._stripes = StripeLayout(group.size, config.parity)
        self._linger = config.linger
        self.ensure_server()
        group.gather("start", "")
        group.broadcast("start")
        self._earlier = EarlierGenerations(folder, of, group) if of.name else None
        rebuild_lost_hosts(self._storage, self._stripes, group)
        super().__init__(self._storage, CheckpointConfig(keep_last=1, saving=saving, host_bytes=host_bytes), group)

    def latest(self) -> int | None:
        """Same as in `MultihostCheckpointer`; of an elastic run, also in the memory of an earlier generation."""
        if (own := super().latest()) is not None or self._earlier is None:
            return own
        return self._earlier.step

    def read_meta(self, step: int | None = None) -> dict[str, Any]:
        """Same as in `Checkpointer`; of an elastic run, also from the memory of an earlier generation."""
        if super().latest() is None and self._earlier is not None and self._earlier.reader is not None:
            return self._earlier.reader.read_meta(step)
        return super().read_meta(step)

    def resume(self, abstract_state: Any) -> RestoredCheckpoint | None:
        """Same as in `MultihostCheckpointer`; of an elastic run, also from the memory of an earlier generation."""
        if super().latest() is not None or self._earlier is None or self._earlier.reader is None:
            return super().resume(abstract_state)
        step = self._earlier.step
        assert step is not None
        return RestoredCheckpoint(step, *self._earlier.reader.restore(abstract_state, step))

    @property
    def bytes_read(self) -> BytesRead:
        """Bytes of arrays that this process has read from its own host's server, and from those of others."""
        own = self._storage.bytes_read
        earlier = BytesRead() if self._earlier is None else self._earlier.bytes_read
        return BytesRead(own.own + earlier.own, own.peers + earlier.peers)

    def close(self) -> None:
        """Same as `Checkpointer.close`; the servers keep running."""
        try:
            super().close()
        finally:
            self._storage.close()
            if self._earlier is not None:
                self._earlier.close()

    def ensure_server(self) -> None:
        """Starts this host's server if it does not run; snapshots after that have a place again."""
        self._storage.own.ensure(self._linger)

    def stop_server(self) -> None:
        """Ends this host's server: the run is complete, or its snapshots are obsolete."""
        self.wait()
        with contextlib.suppress(PeerLost):
            self._storage.own.request("end")
        if self._earlier is not None and self._is_lead:
            self._earlier.end_servers()

    def _retain(self, saved: int) -> None:
        super()._retain(saved)
        if self._earlier is not None:
            self._earlier.drop()

    def _records(
        self, folder: str, leaves: Mapping[str, SnapshotLeaf], chunks: Mapping[str, FileRecord]
    ) -> dict[str, LeafRecord]:
        """Also sends parity. A leaf in several processes has no hash of its own: its chunks have."""
        self._gather_results("parity", lambda: send_parity(self._storage, self._stripes, folder))
        return {path: LeafRecord(leaf.shape, leaf.dtype, "", leaf.key_impl) for path, leaf in leaves.items()}
