"""Prefix groups: prompts that are known ahead, in groups that share one prefix each (BatchLLM, arXiv:2412.03594).

The prompts' prefix tree has many levels, such as instructions, a document behind them, and questions about it. A group
is the unit that runs together, and one prefix is common to all of it. A dynamic programme over the tree chooses the
prefixes: those with which the fewest tokens are computed if every group computes its prefix once and every prompt the
rest, which the paper calls the reuse of the first level. So prompts about several documents that begin with the same
instructions are in the groups of their documents, and not all in one. What groups have in common is computed once as
well, because its pages are held, see ``Grouped``. The paper compares each node of the tree with the one two levels
below; here the choice is exact.

Legend: a prompt is a row of digests, one of each of its whole pages and all before them, as the prefix cache has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Row = Sequence[bytes]


@dataclass(frozen=True)
class PrefixGroup:
    """Group of prompts.

    Attributes:
        members: ids of its prompts, in the order of a walk through the prefix tree.
        pages: length of the prefix that all of them have, in pages; of a prompt alone, of what it has in common with
            any other.
    """

    members: tuple[int, ...]
    pages: int


@dataclass
class _Node:
    """Node of the prefix tree: the rows from ``first`` to ``stop`` have their first ``depth`` pages in common.

    Attributes:
        above: depths of the nodes above it, the root's first.
        best: pages that its rows save, for each of these depths that a group around the node may have.
        splits: whether it is a group of its own then.
    """

    depth: int
    first: int
    stop: int = 0
    children: list[_Node] = field(default_factory=list)
    above: tuple[int, ...] = ()
    best: list[int] = field(default_factory=list)
    splits: list[bool] = field(default_factory=list)

    @property
    def own(self) -> list[int]:
        """Rows that are in none of its children."""
        rows, at = list[int](), self.first
        for child in self.children:
            rows += range(at, child.first)
            at = child.stop
        return [*rows, *range(at, self.stop)]


def prefix_groups(prompts: Mapping[int, Row]) -> list[PrefixGroup]:
    """Groups of prompts with which the fewest pages are computed, if each group computes its prefix once.

    Args:
        prompts: digests of each prompt's pages, by the id of the prompt.

    Returns:
        the groups in the order of a walk through the prefix tree; every prompt is in one.
    """
    walk = sorted(prompts, key=lambda one: (list(prompts[one]), one))
    if not walk:
        return []
    nodes, shared = _prefix_tree([prompts[one] for one in walk])
    for node in reversed(nodes):
        for child in node.children:
            child.above = (*node.above, node.depth)
    for node in nodes:  # children before the nodes above them
        # A row saves the pages of its group's prefix; a group computes them once.
        saved = [len(node.own) * depth for depth in (*node.above, node.depth)]
        for child in node.children:
            saved = [ours + theirs for ours, theirs in zip(saved, child.best, strict=True)]
        alone = saved.pop() - node.depth
        node.best, node.splits = [max(alone, one) for one in saved], [alone > one for one in saved]
    members: dict[tuple[int, int], list[int]] = {}
    pending: list[tuple[_Node, int, _Node | None]] = [(nodes[-1], 0, None)]
    while pending:
        node, level, group = pending.pop()
        if level < len(node.above) and node.splits[level]:
            level, group = len(node.above), node
        for row in node.own:
            own = (row, max(shared[row : row + 2])) if group is None else (group.first, group.depth)
            members.setdefault(own, []).append(row)
        pending += [(child, level, group) for child in node.children]
    return [
        PrefixGroup(tuple(walk[row] for row in sorted(rows)), pages) for (_, pages), rows in sorted(members.items())
    ]


def common_pages(one: Row, other: Row) -> int:
    """Number of first pages that two prompts have in common."""
    # A digest is of all tokens before its page too.
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[middle - 1] == other[middle - 1] else (low, middle - 1)
    return low


def _prefix_tree(rows: Sequence[Row]) -> tuple[list[_Node], list[int]]:
    """Nodes of the prefix tree of sorted rows, at which it branches or rows end, the root last; and the number of pages
    that each row has in common with the one before it, and 0 at the end."""
    shared = [0, *(common_pages(one, other) for one, other in itertools.pairwise(rows)), 0]
    open_, closed = [_Node(0, 0)], list[_Node]()
    for row in range(1, len(rows) + 1):
        first = row - 1
        while open_[-1].depth > shared[row]:
            node = open_.pop()
            node.stop, first = row, node.first
            closed.append(node)
            if open_[-1].depth < shared[row]:
                open_.append(_Node(shared[row], first))
            open_[-1].children.append(node)
        if open_[-1].depth < shared[row]:
            open_.append(_Node(shared[row], first))
    open_[0].stop = len(rows)
    return [*closed, open_[0]], shared
