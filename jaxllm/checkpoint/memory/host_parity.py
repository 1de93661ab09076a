"""Parity between hosts: stripes of the hosts' files, and the rebuilding of what lost hosts had.

With N hosts and parity m there are N stripes; stripe g has its parity on the hosts g, g+1, .. g+m-1 (mod N) and its
data on the others, so that all hold as much, and any m hosts may be lost with all that they hold.
"""

from __future__ import annotations

import contextlib
import json

import numpy as np

from jaxllm.checkpoint.errors import CheckpointError
from jaxllm.checkpoint.memory.erasure_coding import decode, parity_coefficients
from jaxllm.checkpoint.memory.peer_storage import REPLICATED_FILES, PeerClient, PeerLost, PeerStorage
from jaxllm.checkpoint.multihost_checkpointer import CheckpointGroup
from jaxllm.checkpoint.storage import checkpoint_manifest as manifest_lib

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


def send_parity(held: PeerStorage, stripes: StripeLayout, folder: str) -> None:
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


def rebuild_lost_hosts(held: PeerStorage, stripes: StripeLayout, group: CheckpointGroup) -> None:
    """Restores the files that lost hosts had of the newest snapshot; drops a snapshot that cannot be rebuilt.

    The processes of the group share the lost hosts. There may be fewer processes than hosts, if these are of an earlier
    generation; then what a host had that is gone is put on the first server that answers.
    """
    folder = newest_snapshot(held) if group.rank == 0 else None
    folder = json.loads(group.broadcast("newest", json.dumps(folder)))
    if folder is None:
        return
    mine: dict[int, FileTable | str] = {}
    for host in range(group.rank, stripes.hosts, group.size):
        try:
            if (lost := _missing_files(held, stripes, folder, host)) is not None:
                mine[host] = lost
        except OSError as error:
            mine[host] = str(error)
    said = [json.loads(one) for one in group.gather("lost", json.dumps(sorted(mine)))]
    hosts = json.loads(group.broadcast("lost", json.dumps([host for one in said for host in one])))
    problem = ""
    for host, lost in mine.items():
        try:
            if isinstance(lost, str):
                raise CheckpointError(f"nothing says what host {host} had: {lost}")
            _rebuild_host(held, stripes, folder, host, lost, hosts)
        except (OSError, ValueError, CheckpointError) as error:
            problem = str(error)
    problems = [one for one in group.gather("rebuilt", problem) if one]
    if json.loads(group.broadcast("rebuilt", json.dumps(bool(problems)))):
        for host in range(group.rank, stripes.hosts, group.size):
            with contextlib.suppress(PeerLost):
                held.clients[host].request("drop", name=folder)


def newest_snapshot(held: PeerStorage) -> str | None:
    """Folder of the newest snapshot."""
    whole = [name for name in held.names() if held.size(f"{name}/{manifest_lib.NAME}") is not None]
    return max(whole, default=None)


def _missing_files(held: PeerStorage, stripes: StripeLayout, folder: str, host: int) -> FileTable | None:
    """Files that a host had and its server lacks; None if it has all.

    Raises:
        PeerLost: no server knows.
    """
    with contextlib.suppress(PeerLost):
        if held.clients[host].request("get", name=f"{folder}/{manifest_lib.NAME}", begin=0, end=1)[0]:
            return None
    for stripe in range(stripes.hosts):
        for row, other in enumerate(stripes.parity_hosts(stripe)):
            with contextlib.suppress(PeerLost):
                about, _ = held.clients[other].request("sum", name=_parity_name(folder, stripe, row))
                if about and str(host) in about:
                    return [(name, size) for name, size in about[str(host)]["files"]]
    raise PeerLost("no parity is left")


def _rebuild_host(
    held: PeerStorage, stripes: StripeLayout, folder: str, host: int, table: FileTable, lost: list[int]
) -> None:
    size = sum(count for _, count in table)
    out = np.empty(size, np.uint8)
    count = stripes.hosts - stripes.parity
    for stripe, begin, end in stripes.pieces(host, size):
        known: dict[int, np.ndarray] = {}
        length, tables = 0, {}
        for row, other in enumerate(stripes.parity_hosts(stripe)):
            if other in lost:
                continue
            about, total = held.clients[other].request("sum", name=_parity_name(folder, stripe, row))
            if about is not None and len(about) == count:
                known[count + row], length, tables = total, len(total), about
        for column, other in enumerate(stripes.data_hosts(stripe)):
            if other in lost or str(other) not in tables:
                continue
            theirs = [(name, n) for name, n in tables[str(other)]["files"]]
            first, last = next((b, e) for g, b, e in stripes.pieces(other, sum(n for _, n in theirs)) if g == stripe)
            known[column] = np.zeros(length, np.uint8)
            known[column][: last - first] = _read_range(held.clients[other], theirs, first, last)
        mine = stripes.data_hosts(stripe).index(host)
        out[begin:end] = decode(known, count, stripes.parity)[mine][: end - begin]
    target = next(client for client in (held.clients[host], *held.clients) if client.alive())
    begin = 0
    for name, count in table:
        target.request("put", out[begin : begin + count], name=name)
        begin += count
    for last in REPLICATED_FILES:
        data = held.read(f"{folder}/{last}")
        target.request("put", data, name=f"{folder}/{last}")


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
