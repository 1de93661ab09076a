"""Proposer: guesses the next tokens of a sequence, which a step then verifies (speculative decoding, arXiv:2211.17192).

Verification samples after each proposed token with the seed of its position and keeps the tokens up to the first that
differs, so a completion is the same token by token, whatever is proposed.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxllm.infer.engine.sequence import Sequence
from jaxllm.infer.engine_config import EngineConfig


@runtime_checkable
class Proposer(Protocol):
    """Proposer of an engine, see ``Engine(proposer=)``."""

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        """Proposes up to ``count`` tokens that may follow ``sequence.tokens``, which are all known; or none."""
        ...


def check_proposer(config: EngineConfig, proposer: Proposer | None) -> None:
    """Checks that an engine with this configuration can use a proposer.

    Raises:
        ValueError: there is a proposer but no step verifies tokens, or the other way round.
    """
    if (proposer is not None) != (config.verify_tokens > 0):
        raise ValueError(
            f"engine: verify_tokens = {config.verify_tokens} and proposer = {proposer}: give both for speculative "
            "decoding, or neither."
        )


def proposals(proposer: Proposer, wanted: list[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
    """Tokens that a proposer proposes for each (sequence, most tokens) of a step, see ``proposed_tokens``."""
    return [proposed_tokens(proposer, sequence, count) for sequence, count in wanted]


def proposed_tokens(proposer: Proposer, sequence: Sequence, count: int) -> tuple[int, ...]:
    """Tokens that a proposer proposes, up to the first that the sequence's grammar forbids.

    Raises:
        ValueError: the proposer returned more tokens than asked, or one that is no token.
    """
    if count < 1:
        return ()
    found = [int(token) for token in proposer.propose(sequence, count)]
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
