"""Recording file system: what a power cut may leave of a folder, at every moment of what a block does in it.

The block runs on the real file system. Beside it a model keeps what POSIX promises: the contents of a file survive from
its last fsync on, a directory's entries from the directory's last fsync on. Whatever happened since may be lost, in any
order: a rename may survive the contents that it names. An operation on one directory, such as a rename within it, is
atomic, as on a file system with a journal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HOOKED = ("fsync", "rename", "replace", "link", "unlink", "remove", "rmdir")
"""Functions of `os` before and after which the disk is looked at; files and folders that appear are seen there."""


@dataclasses.dataclass(eq=False)
class _Node:
    """File or directory of the model. synced: contents, or entries by name, that a power cut leaves for certain.

    changes: of a directory, the operations since its last fsync, each as name -> node, or None where it is removed.
    """

    folder: bool
    synced: Any
    live: Any
    changes: list[dict[str, _Node | None]] = dataclasses.field(default_factory=list)


Tree = dict[str, bytes | None]
"""Relative path -> contents; None for a folder."""


class PowerCut:
    """Record of one block: the trees that a power cut could have left.

    Attributes:
        states: (trees, mark) pairs in order of time, where `mark` is what the block had last given to `mark`.
    """

    def __init__(self, root: Path, seed: int = 0):
        self.root, self.states = root, []
        self._rng, self._lock, self._mark = random.Random(seed), threading.RLock(), None
        self._nodes: dict[int, _Node] = {}
        self._top = self._node(root)
        self._look()
        self._settle(self._top)

    def mark(self, value: Any) -> None:
        """What the block has been promised from here on, for example that a save has returned."""
        with self._lock:
            self._look()
            self._mark = value
            self._cut()

    @contextlib.contextmanager
    def recording(self) -> Iterator[PowerCut]:
        """Records what this process does below the root."""
        with pytest.MonkeyPatch.context() as patch:
            for name in HOOKED:
                patch.setattr(os, name, self._hooked(name, getattr(os, name)))
            yield self
        self._look()
        self._cut()

    def _hooked(self, name: str, call: Any) -> Any:
        def hooked(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self._look()
                self._cut()
                inode = os.fstat(arguments[0]).st_ino if name == "fsync" else None
                try:
                    return call(*arguments, **options)
                finally:
                    if inode is None:
                        self._look(one=name in ("rename", "replace"))
                    elif (node := self._nodes.get(inode)) is not None:
                        node.synced, node.changes = node.live if not node.folder else dict(node.live), []

        return hooked

    def _node(self, path: Path) -> _Node:
        return self._nodes.setdefault(
            path.stat().st_ino, _Node(path.is_dir(), {} if path.is_dir() else b"", {} if path.is_dir() else b"")
        )

    def _look(self, one: bool = False) -> None:
        """Brings the model up to what lies on disk. `one`: the changes of a directory are one operation, a rename."""
        seen: set[int] = set()

        def visit(path: Path, node: _Node) -> None:
            seen.add(path.stat().st_ino)
            if not node.folder:
                node.live = path.read_bytes()
                return
            there = {child.name: self._node(child) for child in sorted(path.iterdir())}
            changed = {
                name: there.get(name) for name in {*there, *node.live} if there.get(name) is not node.live.get(name)
            }
            if changed:
                node.changes += [changed] if one else [{name: to} for name, to in changed.items()]
            node.live = there
            for name, child in there.items():
                visit(path / name, child)

        visit(self.root, self._top)
        self._nodes = {number: node for number, node in self._nodes.items() if number in seen}  # numbers are used again

    def _settle(self, node: _Node) -> None:
        """All that is there now is on disk."""
        node.synced, node.changes = node.live if not node.folder else dict(node.live), []
        for child in node.live.values() if node.folder else ():
            self._settle(child)

    def _cut(self) -> None:
        for entries, contents in ((0.0, 0.0), (1.0, 0.0), (0.5, 0.5)):
            tree = self._left(entries, contents)
            if (tree, self._mark) not in self.states:
                self.states.append((tree, self._mark))

    def _left(self, entries_chance: float, contents_chance: float) -> Tree:
        """A tree that a power cut may leave now.

        Each operation on a directory survives with a chance, unless it was synced; contents that were not synced are
        lost, or with a chance there in full or in part.
        """
        found: Tree = {}

        def visit(at: str, node: _Node) -> None:
            if not node.folder:
                found[at] = node.synced
                if node.live != node.synced and self._rng.random() < contents_chance:
                    found[at] = node.live[: self._rng.randint(0, len(node.live))]
                return
            found[at] = None
            entries: dict[str, _Node | None] = dict(node.synced)
            for change in node.changes:
                if self._rng.random() < entries_chance:
                    entries |= change
            for name, child in entries.items():
                if child is not None:
                    visit(f"{at}/{name}" if at else name, child)

        visit("", self._top)
        return found


def write_tree(tree: Tree, root: Path) -> Path:
    """Writes a tree to an empty folder, and returns the folder."""
    for name, contents in tree.items():
        path = root / name
        if contents is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents)
    return root
