"""In-memory checkpointer: snapshots in the memory of peer servers, with erasure-coded parity on other hosts.

Every process writes its part of a snapshot into the peer server of its own host. Then it cuts these files, one after
another, into pieces, and sends each piece to the servers that keep parity of that piece's stripe. With N hosts and
parity m there are N stripes; stripe g has its parity on the hosts g, g+1, .. g+m-1 (mod N) and its data on the others,
so that all hold as much, and any m hosts may be lost with all that they hold. The manifest, which makes a snapshot of
the files, is on every server and is written last.

    Reliable and Efficient In-Memory Fault Tolerance of Large Language Model Pretraining (separate processes, erasure
    coding); GEMINI (SOSP 2023: peers' memory before disk).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoint.config import CheckpointConfig, MemoryConfig
from jaxllm.checkpoint.errors import CheckpointError
from jaxllm.checkpoint.memory.erasure_coding import decode, parity_coefficients
from jaxllm.checkpoint.memory.peer_storage import REPLICATED_FILES, PeerClient, PeerLost, PeerStorage
from jaxllm.checkpoint.multihost_checkpointer import CheckpointGroup, MultihostCheckpointer
from jaxllm.checkpoint.snapshot_leaf import SnapshotLeaf
from jaxllm.checkpoint.storage import checkpoint_manifest as manifest_lib
from jaxllm.checkpoint.storage.checkpoint_manifest import FileRecord, LeafRecord

FileTable = list[tuple[str, int]]
"""Names and bytes of a host's files of one snapshot, in order."""


class StripeLayout:
    """Layout of stripes: the hosts that hold data and parity of each.

    Args:
        hosts: number of hosts.
        parity: number of hosts that may be lost.
    """

    def __init__(self, hosts: int, parity: int):
        self.hosts, self.parity = hosts, min(parity, hosts - 1)

    def parity_hosts(self, stripe: int) -> list[int]:
        """Hosts that hold the parity of a stripe."""
        return [(stripe + i) % self.hosts for i in range(self.parity)]

    def data_hosts(self, stripe: int) -> list[int]:
        """Hosts that hold the data of a stripe."""
        return [host for host in range(self.hosts) if host not in self.parity_hosts(stripe)]

    def pieces(self, host: int, size: int) -> list[tuple[int, int, int]]:
        """(stripe, begin, end) of each piece of a host's bytes."""
        stripes = [g for g in range(self.hosts) if host in self.data_hosts(g)]
        each = -(-size // len(stripes))
        return [(g, min(n * each, size), min((n + 1) * each, size)) for n, g in enumerate(stripes)]


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
    """

    def __init__(
        self,
        folder: Path,
        config: MemoryConfig,
        group: CheckpointGroup,
        *,
        saving: Any = "auto",
        host_bytes: int = 2**32,
    ):
        group = PrefixedGroup(group)
        self._storage = PeerStorage(folder, group.rank, group.size)
        self._stripes = StripeLayout(group.size, config.parity)
        self._storage.own.ensure(config.linger)
        group.gather("start", "")
        group.broadcast("start")
        _rebuild_lost_hosts(self._storage, self._stripes, group)
        super().__init__(self._storage, CheckpointConfig(keep_last=1, saving=saving, host_bytes=host_bytes), group)

    def close(self) -> None:
        """Same as `Checkpointer.close`; the servers keep running."""
        try:
            super().close()
        finally:
            self._storage.close()

    def stop_server(self) -> None:
        """Ends this host's server: the run is complete, or its snapshots are obsolete."""
        self.wait()
        with contextlib.suppress(PeerLost):
            self._storage.own.request("end")

    def _records(
        self, folder: str, leaves: Mapping[str, SnapshotLeaf], chunks: Mapping[str, FileRecord]
    ) -> dict[str, LeafRecord]:
        """Also sends parity. A leaf in several processes has no hash of its own: its chunks have."""
        self._gather_results("parity", lambda: _send_parity(self._storage, self._stripes, folder))
        return {path: LeafRecord(leaf.shape, leaf.dtype, "", leaf.key_impl) for path, leaf in leaves.items()}


def _send_parity(held: PeerStorage, stripes: StripeLayout, folder: str) -> None:
    """Sends this host's pieces to the hosts that keep their parity."""
    if not stripes.parity:
        return
    table = _file_table(held.own, folder)
    about = {"files": table}
    for stripe, begin, end in stripes.pieces(held.rank, sum(size for _, size in table)):
        piece = _read_range(held.own, table, begin, end)
        column = stripes.data_hosts(stripe).index(held.rank)
        factors = parity_coefficients(stripes.hosts - stripes.parity, stripes.parity)[:, column]
        for row, host in enumerate(stripes.parity_hosts(stripe)):
            name, who = _parity_name(folder, stripe, row), str(held.rank)
            held.clients[host].request("add", piece, name=name, who=who, about=about, coefficient=int(factors[row]))


def _rebuild_lost_hosts(held: PeerStorage, stripes: StripeLayout, group: CheckpointGroup) -> None:
    """Restores this host's files of the newest snapshot from its peers; drops a snapshot that cannot be rebuilt."""
    folder = _newest(held) if group.rank == 0 else None
    folder = json.loads(group.broadcast("newest", json.dumps(folder)))
    if folder is None:
        return
    try:
        lost = _missing_files(held, stripes, folder)
    except OSError as error:
        lost = str(error)
    said = [json.loads(one) for one in group.gather("lost", json.dumps(lost))]
    hosts = json.loads(group.broadcast("lost", json.dumps([rank for rank, one in enumerate(said) if one])))
    problem = ""
    if held.rank in hosts:
        try:
            if not isinstance(lost, list):
                raise CheckpointError(f"nothing says what host {held.rank} had: {lost}")
            _rebuild_own(held, stripes, folder, [(name, size) for name, size in lost], hosts)
        except (OSError, ValueError, CheckpointError) as error:
            problem = str(error)
    problems = [one for one in group.gather("rebuilt", problem) if one]
    if json.loads(group.broadcast("rebuilt", json.dumps(bool(problems)))):
        held.own.request("drop", name=folder)


def _newest(held: PeerStorage) -> str | None:
    """Folder of the newest snapshot."""
    whole = [name for name in held.names() if held.size(f"{name}/{manifest_lib.NAME}") is not None]
    return max(whole, default=None)


def _missing_files(held: PeerStorage, stripes: StripeLayout, folder: str) -> FileTable | None:
    """Files that this host had and its server lacks; None if it has all.

    Raises:
        PeerLost: no server knows.
    """
    there = _file_table(held.own, folder)
    here = held.own.request("get", name=f"{folder}/{manifest_lib.NAME}", begin=0, end=1)[0]
    if here:
        return None
    for stripe in range(stripes.hosts):
        for row, host in enumerate(stripes.parity_hosts(stripe)):
            about, _ = held.clients[host].request("sum", name=_parity_name(folder, stripe, row))
            if about and str(held.rank) in about:
                return [(name, size) for name, size in about[str(held.rank)]["files"]]
    raise PeerLost(f"no parity is left; {len(there)} files are here")


def _rebuild_own(held: PeerStorage, stripes: StripeLayout, folder: str, table: FileTable, lost: list[int]) -> None:
    size = sum(count for _, count in table)
    out = np.empty(size, np.uint8)
    count = stripes.hosts - stripes.parity
    for stripe, begin, end in stripes.pieces(held.rank, size):
        known: dict[int, np.ndarray] = {}
        length, tables = 0, {}
        for row, host in enumerate(stripes.parity_hosts(stripe)):
            if host in lost:
                continue
            about, total = held.clients[host].request("sum", name=_parity_name(folder, stripe, row))
            if about is not None and len(about) == count:
                known[count + row], length, tables = total, len(total), about
        for column, host in enumerate(stripes.data_hosts(stripe)):
            if host in lost or str(host) not in tables:
                continue
            theirs = [(name, n) for name, n in tables[str(host)]["files"]]
            first, last = next((b, e) for g, b, e in stripes.pieces(host, sum(n for _, n in theirs)) if g == stripe)
            known[column] = np.zeros(length, np.uint8)
            known[column][: last - first] = _read_range(held.clients[host], theirs, first, last)
        mine = stripes.data_hosts(stripe).index(held.rank)
        out[begin:end] = decode(known, count, stripes.parity)[mine][: end - begin]
    begin = 0
    for name, count in table:
        held.own.request("put", out[begin : begin + count], name=name)
        begin += count
    for last in REPLICATED_FILES:
        data = held.read(f"{folder}/{last}")
        held.own.request("put", data, name=f"{folder}/{last}")


def _file_table(client: PeerClient, folder: str) -> FileTable:
    sizes, _ = client.request("sizes", name=f"{folder}/")
    return [(name, size) for name, size in sorted(sizes.items()) if name.rsplit("/", 1)[-1] not in REPLICATED_FILES]


def _read_range(client: PeerClient, table: FileTable, begin: int, end: int) -> np.ndarray:
    """A range of bytes of a host's files, one after another.

    Raises:
        PeerLost: one of the files is missing.
    """
    parts, at = [], 0
    for name, size in table:
        low, high = max(begin, at), min(end, at + size)
        if low < high:
            found, data = client.request("get", name=name, begin=low - at, end=high - at)
            if not found:
                raise PeerLost(f"{name} is not on the peer server of host {client.rank}")
            parts.append(data)
        at += size
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def _parity_name(folder: str, stripe: int, row: int) -> str:
    return f"{folder}/parity/{stripe}.{row}"
