"""Generations of snapshots: an elastic run reads the snapshots of a generation with other hosts, and rebuilds them.

The peer servers outlive the trainers, so a generation finds in them what the one before has saved, whatever its number
of processes: the reader resolves any layout, and parity replaces the hosts that are gone. ``generations.json`` beside
the servers' addresses lists the generations, so that a generation that fails before its first snapshot does not hide
the one before. The first snapshot of a generation frees those of all earlier ones.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.checkpoint.memory.host_parity import StripeLayout, newest_snapshot, rebuild_lost_hosts
from jaxllm.checkpoint.memory.peer_storage import BytesRead, PeerClient, PeerLost, PeerStorage
from jaxllm.checkpoint.multihost_checkpointer import CheckpointGroup
from jaxllm.checkpoint.readonly import ReadOnlyCheckpointer
from jaxllm.files import read_json, write_json

TABLE = "generations.json"


@dataclass(frozen=True)
class SnapshotGeneration:
    """Generation of hosts that save snapshots together.

    Attributes:
        name: no other generation has it; empty for runs that are not elastic.
        slots: number in the name of each host's address file, by rank.
        parity: as in ``MemoryConfig``.
    """

    name: str
    slots: tuple[int, ...]
    parity: int

    def storage(self, folder: Path, slot: int | None = None) -> PeerStorage:
        """The memory of its hosts, as the host of a slot of any generation sees it; None: as one that has none."""
        rank = self.slots.index(slot) if slot in self.slots else None
        return PeerStorage(folder, rank, len(self.slots), self.slots, self.name)


class EarlierGenerations:
    """Snapshots of the generations before one; all processes of a group open it together.

    Args:
        folder: folder of the servers' address files.
        own: generation of this group.

    Attributes:
        step: step of the newest snapshot that is whole or could be rebuilt; None if there is none.
        reader: reads it; None if there is none.
    """

    def __init__(self, folder: Path, own: SnapshotGeneration, group: CheckpointGroup):
        self._folder, self._own = folder, own
        listed: list[dict[str, Any]] = []
        if group.rank == 0:
            if (folder / TABLE).exists():
                listed = [one for one in read_json(folder / TABLE) if one["name"] != own.name]
            mine = {"name": own.name, "slots": list(own.slots), "parity": own.parity}
            write_json(folder / TABLE, [*listed, mine])
            listed = self._newest_first(listed)
        listed = json.loads(group.broadcast("generations", json.dumps(listed)))
        self.step: int | None = None
        self.reader: ReadOnlyCheckpointer | None = None
        self._storage: PeerStorage | None = None
        for one in listed:
            of = SnapshotGeneration(one["name"], tuple(one["slots"]), one["parity"])
            storage = of.storage(folder, own.slots[group.rank])
            rebuild_lost_hosts(storage, StripeLayout(len(of.slots), of.parity), group)
            found = ReadOnlyCheckpointer(storage).latest() if group.rank == 0 else None
            found = json.loads(group.broadcast("generations/step", json.dumps(found)))
            if found is not None:
                self.step, self.reader, self._storage = found, ReadOnlyCheckpointer(storage), storage
                return
            storage.close()

    @property
    def bytes_read(self) -> BytesRead:
        """Bytes of arrays that this process has read of them."""
        return BytesRead() if self._storage is None else self._storage.bytes_read

    def drop(self) -> None:
        """Frees the snapshots of all earlier generations; called by process 0 after a snapshot of its own."""
        listed = [one for one in read_json(self._folder / TABLE) if one["name"] != self._own.name]
        if not listed:
            return
        for slot in sorted({slot for one in listed for slot in one["slots"]}):
            address = self._folder / f"{slot}.json"
            with contextlib.closing(PeerClient(slot, address)) as client, contextlib.suppress(PeerLost):
                for one in listed:
                    client.request("drop", name=one["name"])
        mine = {"name": self._own.name, "slots": list(self._own.slots), "parity": self._own.parity}
        write_json(self._folder / TABLE, [mine])

    def end_servers(self) -> None:
        """Ends the servers of hosts that are not in this generation."""
        for file in self._folder.glob("*.json"):
            if file.stem.isdecimal() and int(file.stem) not in self._own.slots:
                with contextlib.closing(PeerClient(int(file.stem), file)) as client, contextlib.suppress(PeerLost):
                    client.request("end")

    def close(self) -> None:
        """Closes the connections; the servers keep running."""
        if self._storage is not None:
            self._storage.close()

    def _newest_first(self, listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The generations that have a snapshot, the newest one first."""
        found = []
        for number, one in enumerate(listed):
            of = SnapshotGeneration(one["name"], tuple(one["slots"]), one["parity"])
            with contextlib.closing(of.storage(self._folder)) as storage:
                if (folder := newest_snapshot(storage)) is not None:
                    found.append((folder, number, one))
        return [one for _, _, one in sorted(found, key=lambda each: each[:2], reverse=True)]
