"""Proposer: guesses the next tokens of a sequence, which a step then verifies (speculative decoding, arXiv:2211.17192).

Verification samples after each proposed token with the seed of its position and keeps the tokens up to the first that
differs, so a completion is the same token by token, whatever is proposed. A proposal may be a tree (``DraftTree``):
verification then follows the branch that is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, Protocol, runtime_checkable

from jaxllm.config import ConfigError
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.grammar import Guide
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.infer.speculate.draft_tree import DraftTree


@runtime_checkable
class Proposer(Protocol):
    """Proposer of an engine, see ``Engine(proposer=)``; it proposes for one sequence after the other."""

    def propose(self, sequence: Sequence, count: int) -> list[int] | DraftTree:
        """Proposes up to ``count`` tokens that may follow ``sequence.tokens``, which are all known; or none.

        An engine with ``EngineConfig.draft_trees`` takes a ``DraftTree`` too, of so many tokens in all.
        """
        ...


@runtime_checkable
class BatchProposer(Protocol):
    """Proposer that proposes for all sequences of a step together, such as a draft model."""

    def propose_all(self, wanted: list[tuple[Sequence, int]]) -> Many[list[int] | DraftTree | None]:
        """Proposes for each (sequence, most tokens), as ``Proposer.propose`` does for one; None: not ready for it."""
        ...

    def swap(self, params: Any) -> None:
        """Takes notice of new weights of the served model, see ``Engine.swap``."""
        ...


AnyProposer = Proposer | BatchProposer


def check_proposer(config: EngineConfig, proposer: AnyProposer | None) -> None:
    """Checks that an engine with this configuration can use a proposer.

    Raises:
        ValueError: there is a proposer but no step verifies tokens, or the other way round.
    """
    if (proposer is not None) != (config.verify_tokens > 0):
        raise ConfigError(
            f"engine: verify_tokens = {config.verify_tokens} and proposer = {proposer}: give both for speculative "
            "decoding, or neither."
        )


def proposals(proposer: AnyProposer, wanted: list[tuple[Sequence, int]]) -> list[DraftTree | None]:
    """Draft that a proposer proposes for each (sequence, most tokens) of a step; None where it is not ready yet.

    Each branch ends before the first token that the sequence's grammar forbids.

    Raises:
        ValueError: the proposer returned more tokens than asked, or one that is no token.
    """
    if isinstance(proposer, BatchProposer):
        found = proposer.propose_all(wanted)
    else:
        found = [proposer.propose(sequence, count) for sequence, count in wanted]
    return [
        None if draft is None else _legal(proposer, sequence, count, draft)
        for (sequence, count), draft in zip(wanted, found, strict=True)
    ]


def _legal(proposer: AnyProposer, sequence: Sequence, count: int, draft: list[int] | DraftTree) -> DraftTree:
    """Draft, each branch up to the first token that the sequence's grammar forbids."""
    tree = draft if isinstance(draft, DraftTree) else DraftTree.chain(tuple(int(token) for token in draft))
    found = list(tree.tokens)
    if len(found) > count or min(found, default=0) < 0:
        raise ValueError(
            f"{type(proposer).__name__}.propose returned {found} for request {sequence.request.id}; "
            f"give at most {count} token ids, none negative."
        )
    if any(not -1 <= parent < number for number, parent in enumerate(tree.parents)):
        raise ValueError(
            f"{type(proposer).__name__}.propose returned a tree with parents {tree.parents} for request "
            f"{sequence.request.id}; give parents before children, and -1 for tokens that follow the sequence."
        )
    return tree if sequence.guide is None else _allowed(tree, sequence.guide)


def _allowed(tree: DraftTree, guide: Guide) -> DraftTree:
    """Tokens of a draft that a grammar allows after those before them."""
    guides, places = {-1: guide}, {-1: -1}
    tokens, parents = list[int](), list[int]()
    for number, (token, parent) in enumerate(zip(*tree, strict=True)):
        if parent in guides and (own := guides[parent].copy()).allows(token) and own.advance(token):
            guides[number], places[number] = own, len(tokens)
            tokens.append(token)
            parents.append(places[parent])
    return DraftTree(tuple(tokens), tuple(parents))
