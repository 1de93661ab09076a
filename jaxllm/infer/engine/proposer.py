"""Proposer: guesses the next tokens of a sequence, which a step then verifies (speculative decoding, arXiv:2211.17192).

Verification samples after each proposed token with the seed of its position and keeps the tokens up to the first that
differs, so a completion is the same token by token, whatever is proposed.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jaxllm.infer.engine.sequence import Sequence
from jaxllm.infer.engine_config import EngineConfig


@runtime_checkable
class Proposer(Protocol):
    """Proposer of an engine, see ``Engine(proposer=)``; it proposes for one sequence after the other."""

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        """Proposes up to ``count`` tokens that may follow ``sequence.tokens``, which are all known; or none."""
        ...


@runtime_checkable
class BatchProposer(Protocol):
    """Proposer that proposes for all sequences of a step together, such as a draft model."""

    def propose_all(self, wanted: list[tuple[Sequence, int]]) -> list[list[int] | None]:
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
        raise ValueError(
            f"engine: verify_tokens = {config.verify_tokens} and proposer = {proposer}: give both for speculative "
            "decoding, or neither."
        )


def proposals(proposer: AnyProposer, wanted: list[tuple[Sequence, int]]) -> list[tuple[int, ...] | None]:
    """Tokens that a proposer proposes for each (sequence, most tokens) of a step; None where it is not ready yet.

    Each proposal ends before the first token that the sequence's grammar forbids.

    Raises:
        ValueError: the proposer returned more tokens than asked, or one that is no token.
    """
    if isinstance(proposer, BatchProposer):
        found = proposer.propose_all(wanted)
    else:
        found = [proposer.propose(sequence, count) for sequence, count in wanted]
    return [
        None if tokens is None else _legal(proposer, sequence, count, [int(token) for token in tokens])
        for (sequence, count), tokens in zip(wanted, found, strict=True)
    ]


def _legal(proposer: AnyProposer, sequence: Sequence, count: int, found: list[int]) -> tuple[int, ...]:
    """Proposed tokens up to the first that the sequence's grammar forbids."""
    if len(found) > count or min(found, default=0) < 0:
        raise ValueError(
            f"{type(proposer).__name__}.propose returned {found} for request {sequence.request.id}; "
            f"give at most {count} token ids, none negative."
        )
    if sequence.guide is not None:
        guide = sequence.guide.copy()
        for number, token in enumerate(found):
            if not guide.allows(token) or not guide.advance(token):
                return tuple(found[:number])
    return tuple(found)
