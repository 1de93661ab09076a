"""Page store: tiers of the KV cache behind the device, in host memory and on a disk, found by the hash of their tokens.

A page that the prefix cache evicts on the device is copied to the store, and copied back when a sequence needs it
again: a later request with its prefix, or a preempted sequence that continues. Host memory is bounded; what leaves
it, the least recently used first, goes to the disk, where it is found again after a restart. A page on the disk is a
file with a checksum; a file that is damaged is deleted, named in a warning, and counted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.files import atomic, make_directory

Page = dict[str, np.ndarray]
"""Contents of a page of one layer group: arrays by the names of the fields of ``Slots``."""
Key = tuple[bytes, int]
"""Hash of a page's tokens and all before them, and the layer group."""
_LOG = logging.getLogger("jaxllm.infer")
SUFFIX = ".page"


@dataclass
class PageStoreCounts:
    """Counts of a page store.

    Attributes:
        stored: pages that have been copied from the device.
        host_hits, disk_hits: pages that were found in host memory, and on the disk.
        dropped: pages that left without a copy elsewhere: for want of room, or because the disk refused them.
        damaged: files that did not match their checksum.
    """

    stored: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    dropped: int = 0
    damaged: int = 0


class PageStore:
    """Pages of the KV cache in host memory and on a disk.

    Args:
        host_bytes: most bytes in host memory.
        disk: directory for pages that leave it; None: they are dropped.
        disk_bytes: most bytes there.
        identity: digest of everything that the pages' numbers depend on besides the tokens: model, weights, formats.
            Pages of another identity are in another directory and not found.

    Attributes:
        counts: what has happened so far.
    """

    def __init__(self, host_bytes: int, disk: Path | None = None, disk_bytes: int = 1 << 40, identity: str = ""):
        self.host_bytes, self.disk_bytes, self._root = host_bytes, disk_bytes, disk
        self.counts = PageStoreCounts()
        self.restart(identity)

    def restart(self, identity: str) -> None:
        """Forgets the pages in memory, and finds those of this identity on the disk."""
        self._host: OrderedDict[Key, Page] = OrderedDict()
        self._held = self._on_disk_bytes = 0
        self._disk: OrderedDict[Key, int] = OrderedDict()
        self.folder = None if self._root is None else self._root / (identity or "pages")
        if self.folder is None:
            return
        make_directory(self.folder)
        found = [(file, file.stat()) for file in self.folder.glob(f"*{SUFFIX}")]
        for file, facts in sorted(found, key=lambda one: one[1].st_mtime_ns):
            digest, _, group = file.name.removesuffix(SUFFIX).partition("-")
            self._disk[bytes.fromhex(digest), int(group)] = facts.st_size
            self._on_disk_bytes += facts.st_size

    def __contains__(self, key: Key) -> bool:
        return key in self._host or key in self._disk

    def put(self, key: Key, page: Page) -> None:
        """Keeps a page; the least recently used ones make room."""
        self.counts.stored += 1
        if key in self:
            if key in self._host:
                self._host.move_to_end(key)
            return
        self._host[key] = page
        self._held += _bytes_of(page)
        while self._held > self.host_bytes:
            old, page = self._host.popitem(last=False)
            self._held -= _bytes_of(page)
            self._write(old, page)

    def get(self, key: Key) -> Page | None:
        """A page; None if there is none, or it is damaged, which drops it."""
        if (page := self._host.get(key)) is not None:
            self._host.move_to_end(key)
            self.counts.host_hits += 1
            return page
        if key not in self._disk or (page := self._read(key)) is None:
            return None
        self._disk.move_to_end(key)
        self.counts.disk_hits += 1
        return page

    def flush(self) -> None:
        """Writes the pages in host memory to the disk, where there is one, to be found after a restart."""
        for key in list(self._host) if self.folder is not None else ():
            self._write(key, self._host.pop(key))
        self._held = sum(map(_bytes_of, self._host.values()))

    def report(self) -> dict[str, Any]:
        """Pages and bytes of each tier, and the counts."""
        return {
            "host_pages": len(self._host), "host_bytes": self._held, "disk_pages": len(self._disk),
            "disk_bytes": self._on_disk_bytes, **asdict(self.counts),
        }  # fmt: skip

    def _file(self, key: Key) -> Path:
        assert self.folder is not None
        return self.folder / f"{key[0].hex()}-{key[1]}{SUFFIX}"

    def _write(self, key: Key, page: Page) -> None:
        if self.folder is None:
            self.counts.dropped += 1
            return
        if key in self._disk:
            return
        body = b"".join(np.ascontiguousarray(x).tobytes() for x in page.values())
        header = {
            "arrays": [[name, str(x.dtype), list(x.shape)] for name, x in page.items()],
            "checksum": hashlib.blake2b(body, digest_size=16).hexdigest(),
        }
        line = json.dumps(header).encode() + b"\n"
        size = len(line) + len(body)
        while self._disk and self._on_disk_bytes + size > self.disk_bytes:
            self._forget(next(iter(self._disk)))
            self.counts.dropped += 1
        try:
            if size > self.disk_bytes:
                raise OSError(f"a page has {size} bytes, and the disk tier {self.disk_bytes}")
            with atomic(self._file(key)) as file:
                file.write(line + body)
        except OSError as error:
            self.counts.dropped += 1
            _LOG.warning("a page of the KV cache could not be written to %s: %s", self.folder, error)
            return
        self._disk[key] = size
        self._on_disk_bytes += size

    def _read(self, key: Key) -> Page | None:
        file = self._file(key)
        try:
            line, _, body = file.read_bytes().partition(b"\n")
            header = json.loads(line)
            if hashlib.blake2b(body, digest_size=16).hexdigest() != header["checksum"]:
                raise ValueError("its contents do not match its checksum")
            page, at = Page(), 0
            for name, dtype, shape in header["arrays"]:
                count = int(np.prod(shape)) * np.dtype(dtype).itemsize
                page[name] = np.frombuffer(body[at : at + count], dtype).reshape(shape)
                at += count
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.counts.damaged += 1
            _LOG.warning("dropped the damaged page %s of the KV cache: %s", file, error)
            self._forget(key)
            return None
        return page

    def _forget(self, key: Key) -> None:
        self._on_disk_bytes -= self._disk.pop(key)
        self._file(key).unlink(missing_ok=True)


def weights_digest(leaves: Any) -> str:
    """Digest of arrays: shapes, dtypes and contents, for the identity of pages that outlive the process."""
    whole = hashlib.blake2b(digest_size=16)
    for leaf in leaves:
        x = np.asarray(leaf)
        whole.update(f"{x.dtype}{x.shape}".encode())
        whole.update(np.ascontiguousarray(x).view(np.uint8).data)
    return whole.hexdigest()


def free_bytes(folder: Path) -> int:
    """Bytes that are free on the disk of a directory, or of the nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def _bytes_of(page: Page) -> int:
    return sum(x.nbytes for x in page.values())
