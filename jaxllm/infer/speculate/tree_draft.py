"""Draft trees of a draft model: the likeliest continuations of a sequence, by best-first search (SpecExec).

SpecExec (arXiv:2406.02532, section 3) drafts a tree and not a chain: the continuations to which the draft model gives
the highest probability, whatever their depth. The tree grows from the sequence's end: a pass of the draft model reads
the tokens whose children may be among the likeliest, up to ``EXPANDED`` of each sequence, and finds the ``BRANCHES``
likeliest tokens after each. The search ends when no child can be better than the worst of the tree, or after ``DEPTH``
passes. Probabilities are the draft model's own, at temperature 1.

The served model verifies the tree in one step, and samples along it: the tree is a cache of its probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Any

from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.length_limits import check_branches
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.infer.scheduling.step_plan import ScheduledChunk
from jaxllm.infer.speculate.draft_model import DraftModelProposer, ServedModel, load_draft_model
from jaxllm.infer.speculate.draft_tree import DraftTree
from jaxllm.models import Functional

BUDGET = 32
"""Tokens of a tree, unless another number is given."""
BRANCHES = 8
"""Most children of a token."""
EXPANDED = 16
"""Most tokens of a sequence's tree that a pass of the draft model reads."""
DEPTH = 16
"""Most passes of the draft model for a tree, and so its depth."""


@dataclass(frozen=True)
class TreeArgument:
    """Argument of the proposer ``tree``.

    Attributes:
        name: draft model.
        budget: tokens of a tree.
    """

    name: str
    budget: int


@dataclass(eq=False)
class _Node:
    """Token of a growing tree; ``slot`` is its place among those that the draft model has read, -1 before that."""

    token: int
    logprob: float
    parent: _Node | None
    depth: int
    slot: int = -1

    @property
    def order(self) -> tuple[float, int]:
        """The likeliest first, and parents before children."""
        return -self.logprob, self.depth


@dataclass
class _Search:
    """Best-first search of one sequence.

    Attributes:
        sequence: sequence that the tree follows.
        budget: most tokens of the tree.
        most: most tokens that the draft model may read.
        found: all tokens seen so far.
        read: those that the draft model has read, in the order of their slots.
    """

    sequence: Sequence
    budget: int
    most: int
    found: list[_Node] = field(default_factory=list)
    read: list[_Node] = field(default_factory=list)

    def add(self, parent: _Node | None, ids: list[int], logprobs: list[float]) -> None:
        """Adds the children of a token, or those of the sequence itself."""
        before, depth = (0.0, 1) if parent is None else (parent.logprob, parent.depth + 1)
        pairs = zip(ids, logprobs, strict=True)
        self.found += [_Node(token, before + own, parent, depth) for token, own in pairs if own > float("-inf")]
        # No token beyond the best of so many can be in the tree, since none becomes likelier.
        kept = sorted(self.found, key=lambda node: node.order)[: self.budget]
        self.found = kept + [node for node in self.read if node not in kept]

    def best(self) -> list[_Node]:
        """The tree: parents come before children."""
        return sorted(self.found, key=lambda node: node.order)[: self.budget]

    def frontier(self) -> list[_Node]:
        """Tokens to read next: those of the tree whose children may be in it."""
        best, stops = self.best(), self.sequence.request.stop_ids
        if len(best) == self.budget:
            best = [node for node in best if node.order < best[-1].order]
        unread = [node for node in best if node.slot < 0 and node.depth < DEPTH and node.token not in stops]
        return unread[: max(0, min(EXPANDED, self.most - len(self.read)))]

    def read_tree(self) -> DraftTree:
        """Tree of the tokens that the draft model has read."""
        return _tree(self.read)


class TreeDraftProposer(DraftModelProposer):
    """Draft trees of an engine, see ``BatchProposer``.

    Args:
        model, params: draft model and its weights.
        served: model that the proposals are for; its configuration has ``draft_trees``.

    Raises:
        ValueError: see ``DraftModelProposer``; or a sliding window of the draft model is shorter than a branch.
    """

    def __init__(self, model: Functional, params: Any, served: ServedModel):
        budget = served.config.verify_tokens
        check_branches(model.config, min(budget, DEPTH))
        # Tokens that a likelier one has driven out of the tree stay in the draft's KV cache.
        self._most = min(2 * budget, served.config.max_batched_tokens)
        rows = min(EXPANDED, budget, served.config.max_batched_tokens - 1)
        super().__init__(model, params, served, branches=BRANCHES, rows=rows, tree_tokens=self._most)

    def propose_all(self, wanted: list[tuple[Sequence, int]]) -> Many[DraftTree | None]:
        """Proposes a tree of up to so many tokens for each sequence; None for those not read to their end yet."""
        counts = dict(wanted)
        ready, step = self._read({one: self._known(one) for one in counts})
        searches = []
        for one in ready:
            assert step is not None
            room = self.runner.spec.max_len - len(one.tokens)
            search = _Search(one, counts[one], min(self._most, room))
            search.add(None, *step.branches(one, 1)[0])
            searches.append(search)
        for _ in range(DEPTH - 1):
            if not self._grow(searches):
                break
        for search in searches:
            chain = next((i for i, parent in enumerate(search.read_tree().parents) if parent != i - 1), None)
            drafted = [node.token for node in search.read[:chain]]
            self._remember(search.sequence, drafted)
        trees = {search.sequence: _tree(search.best()) for search in searches}
        return [trees.get(one) for one in counts]

    def _grow(self, searches: list[_Search]) -> bool:
        """Reads the frontier of every search, as far as one pass has room; whether there was any."""
        room, chunks, grown = self.runner.config.max_batched_tokens, [], []
        for search in searches:
            if not (nodes := search.frontier()[:room]):
                continue
            room -= len(nodes)
            for node in nodes:
                node.slot = len(search.read)
                search.read.append(node)
            start = len(search.sequence.tokens) + len(search.read) - len(nodes)
            proposed = tuple(node.token for node in nodes)
            tree = search.read_tree()
            chunks.append(
                ScheduledChunk(search.sequence, start, len(nodes), samples=True, proposed=proposed, tree=tree)
            )
            grown.append((search, nodes))
        if not chunks:
            return False
        step = self._start(chunks, 1, decode=False)
        for search, nodes in grown:
            for node, (ids, logprobs) in zip(nodes, step.branches(search.sequence, len(nodes)), strict=True):
                search.add(node, ids, logprobs)
        return True


def _tree(nodes: list[_Node]) -> DraftTree:
    """Tree of nodes, each after its parent."""
    places = {id(node): number for number, node in enumerate(nodes)}
    parents = (-1 if node.parent is None else places[id(node.parent)] for node in nodes)
    return DraftTree(tuple(node.token for node in nodes), tuple(parents))


def parse_tree(text: str) -> TreeArgument:
    """Draft model and budget, from the text after ``tree:``.

    Raises:
        ValueError: there is no model, or the budget is no number of 1 or more.
    """
    name, comma, budget = text.rpartition(",")
    if not comma:
        name, budget = text, str(BUDGET)
    if not name or not budget.isdecimal() or int(budget) < 1:
        raise ValueError(
            f"tree:{text}; give a draft model and the number of tokens of a tree, such as tree:smollm2,{BUDGET}."
        )
    return TreeArgument(name, int(budget))


def with_trees(config: EngineConfig, argument: TreeArgument) -> EngineConfig:
    """Configuration of an engine that verifies the trees."""
    return replace(config, verify_tokens=argument.budget, draft_trees=True, draft_length="fixed")


def load_tree_draft(argument: TreeArgument, served: ServedModel) -> TreeDraftProposer:
    """Loads a draft model and makes its proposer.

    Raises:
        ValueError: see ``load_draft_model`` and ``TreeDraftProposer``.
    """
    return TreeDraftProposer(*load_draft_model(argument.name, served), served)
