"""Draft runs: pipelined speculation, which fills a pipeline with one sequence (PipeInfer, arXiv:2407.11798).

A run takes one token of a sequence, or a few, through all stages. The first has the last known token, and enters at
once. While it travels the proposer drafts on after what it has drafted already, and every few tokens enter as a run of
their own (continuous asynchronous speculation). Each run samples after all of its tokens, with the seeds of their
positions: what it samples verifies the drafts that came after. At the first one that differs all runs behind are
invalid, and are cancelled between two stages (early inference cancellation).

The paper keeps several buffers of the KV cache, so that runs do not disturb each other (pipelined KV cache
multibuffering). Here one suffices: every stage computes runs in order, and a valid run overwrites the entries of
invalid ones, from the first wrong token on, before anything reads them.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass, field

from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.scheduling.sequence import Sequence


@dataclass(eq=False)
class DraftRun:
    """Run of a sequence.

    Attributes:
        tokens: draft tokens that it takes; none: it takes the sequence's last token.
        valid: no token before them has turned out wrong.
    """

    tokens: tuple[int, ...] = ()
    valid: bool = True


@dataclass
class _InFlight:
    """Runs of a sequence that have not landed, and its draft tokens that are not verified: all that runs have taken."""

    runs: deque[DraftRun] = field(default_factory=deque)
    drafted: list[int] = field(default_factory=list)


class DraftRuns:
    """Runs of all sequences of an engine that are in flight.

    Args:
        config: configuration of the engine; ``draft_runs`` is the most of a sequence, ``verify_tokens`` of a run.
    """

    def __init__(self, config: EngineConfig):
        self.most, self.size = config.draft_runs, config.verify_tokens
        self._of: dict[Sequence, _InFlight] = {}

    def has(self, sequence: Sequence) -> bool:
        """Whether a sequence decodes in runs: not if its tokens change the logits after them, or by a grammar."""
        return sequence.guide is None and not sequence.request.params.changes_logits

    def may_start(self, sequence: Sequence) -> bool:
        """Whether a run may start behind those of a sequence that are in flight."""
        return self.has(sequence) and sequence in self._of and len(self._of[sequence].runs) < self.most

    def drafted(self, sequence: Sequence) -> list[int]:
        """Draft tokens of a sequence that are in flight and not verified."""
        return self._of[sequence].drafted if sequence in self._of else []

    def extended(self, sequence: Sequence) -> Sequence:
        """The sequence as if all of its drafts were accepted, for a proposer."""
        return dataclasses.replace(sequence, tokens=[*sequence.tokens, *self.drafted(sequence)], pending=0)

    def start(self, sequence: Sequence, tokens: tuple[int, ...] = ()) -> DraftRun:
        """Starts a run: of draft tokens after those in flight, or of the last token."""
        own, run = self._of.setdefault(sequence, _InFlight()), DraftRun(tokens)
        own.runs.append(run)
        own.drafted += tokens
        return run

    def land(self, sequence: Sequence, run: DraftRun, sampled: list[int]) -> tuple[list[int], int, int, int]:
        """Takes what the oldest run of a sequence has sampled after each of its tokens.

        Returns:
            the tokens that are known now, the number of drafts that they verify, of those the number that were right,
            and the number of further tokens of the sequence that are taken back, because a draft was wrong.
        """
        own = self._of[sequence]
        assert own.runs.popleft() is run
        known, verified = list[int](), 0
        for token in sampled:
            known.append(token)
            if own.drafted:
                verified += 1
                if own.drafted.pop(0) != token:
                    self.drop(sequence)
                    return known, verified, verified - 1, sequence.pending - len(known)
        if not own.runs:
            del self._of[sequence]
        return known, verified, verified, 0

    def drop(self, sequence: Sequence) -> bool:
        """Makes all runs of a sequence invalid; whether there were any."""
        own = self._of.pop(sequence, None)
        for run in () if own is None else own.runs:
            run.valid = False
        return own is not None
