"""Draft length: how many tokens are drafted for each sequence of a step, by acceptance and by what a step costs.

If each draft token is accepted with probability ``a``, the j-th is worth a^j tokens; it costs a row of the verification
and a pass of the drafter. Decoding is bound by memory while a batch is small, so that rows are nearly free, and by
arithmetic when it is large: then no draft pays, and sequences decode plainly, several tokens a step. Costs are measured
as steps run; a step that has not run yet is estimated by the roofline. It is the goodput of SmartSpec
(arXiv:2406.14066), with a length for each sequence.

Acceptance is only seen where drafts are verified, so that a sequence whose first drafts happen to be refused must not
be given up for good. It is a bandit problem: what counts is not the share of accepted tokens but an upper confidence
bound of it, which is far above the share after few tokens, and evidence fades.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax

from jaxllm.compiler.device_peaks import peak_of
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.scheduling.sequence import Sequence

INHERITED = 4.0
"""Most draft tokens of all sequences that a new sequence's evidence begins with."""
FADE = 192
"""Tokens after which evidence counts half, so that drafting is tried again now and then."""
MARGIN = 1.03
"""Gain in speed from which drafting is worth its variance."""


@runtime_checkable
class DraftLength(Protocol):
    """Draft length of an engine's sequences."""

    def counts(self, sequences: list[Sequence]) -> dict[Sequence, int]:
        """Most draft tokens for each sequence of the next step; a sequence without any is left out."""
        ...

    def record_draft(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        """Records a verification, or that nothing was proposed."""
        ...

    def record_drafting(self, depth: int, seconds: float) -> None:
        """Records the time of drafting ``depth`` tokens for all sequences of a step."""
        ...

    def record_step(self, rows: int, seconds: float, *, decode: bool) -> None:
        """Records the time of a pass of the served model over so many rows, padding included."""
        ...


@dataclass(frozen=True)
class FixedDraftLength:
    """Fixed draft length: as many tokens for every sequence.

    Attributes:
        most: tokens.
    """

    most: int

    def counts(self, sequences: list[Sequence]) -> dict[Sequence, int]:
        """The same number for each sequence."""
        return dict.fromkeys(sequences, self.most)

    def record_draft(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        """Does nothing."""

    def record_drafting(self, depth: int, seconds: float) -> None:
        """Does nothing."""

    def record_step(self, rows: int, seconds: float, *, decode: bool) -> None:
        """Does nothing."""


@dataclass
class _Acceptance:
    """Evidence about the acceptance of draft tokens, which fades as tokens are generated without any.

    Attributes:
        accepted, tried: draft tokens that were compared, and those of them that were equal.
        at: tokens that had been generated then.
    """

    accepted: float = 0.0
    tried: float = 0.0
    at: int = 0

    def add(self, accepted: int, tried: int, now: int) -> None:
        """Adds ``tried`` draft tokens that were compared, of which ``accepted`` were equal."""
        kept = self._kept(now)
        self.accepted, self.tried, self.at = self.accepted * kept + accepted, self.tried * kept + tried, now

    def bound(self, now: int) -> float:
        """Upper confidence bound, of one standard deviation, of the next draft token's acceptance: 1 without evidence.

        It is the score interval's (E. B. Wilson 1927), which holds for few tokens too.
        """
        accepted, tried = self.accepted * self._kept(now), self.tried * self._kept(now)
        variance = accepted * (1 - accepted / tried) if tried else 0.0
        return (accepted + 0.5 + math.sqrt(max(0.0, variance) + 0.25)) / (tried + 1)

    def inherited(self, now: int, at: int) -> _Acceptance:
        """Evidence of a new sequence, which has generated ``at`` tokens: up to ``INHERITED`` tokens of this one."""
        kept = self._kept(now)
        share = kept * min(1.0, INHERITED / max(INHERITED, self.tried * kept))
        return _Acceptance(self.accepted * share, self.tried * share, at)

    def _kept(self, now: int) -> float:
        return 0.5 ** (max(0, now - self.at) / FADE)


@dataclass
class _Duration:
    """Running mean of measured seconds; the first measurement alone is not trusted."""

    seconds: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        if self.count <= 2:
            self.seconds = seconds if self.count == 1 else min(self.seconds, seconds)
        else:
            self.seconds += 0.1 * (min(seconds, 2 * self.seconds) - self.seconds)

    @property
    def known(self) -> bool:
        return self.count >= 2


@dataclass
class AdaptiveDraftLength:
    """Adaptive draft length: the drafts that make the next step's tokens per second largest.

    Attributes:
        most: most draft tokens of a sequence.
        decode_buckets, prompt_buckets: rows that steps of plain decoding, and of verification, are padded to.
        knee: rows at which a step is bound by arithmetic instead of memory, see ``roofline_knee``.
    """

    most: int
    decode_buckets: Many[int]
    prompt_buckets: Many[int]
    knee: float = 1e9
    _plain: dict[int, _Duration] = field(default_factory=dict)
    _verify: dict[int, _Duration] = field(default_factory=dict)
    _drafting: _Duration = field(default_factory=_Duration)
    _all: _Acceptance = field(default_factory=_Acceptance)
    _own: weakref.WeakKeyDictionary[Sequence, _Acceptance] = field(default_factory=weakref.WeakKeyDictionary)
    _passes: int = 0

    def counts(self, sequences: list[Sequence]) -> dict[Sequence, int]:
        """Draft tokens of each sequence, the most promising first; none until plain decoding has been measured."""
        if not sequences or not self._plain_known(len(sequences)):
            return {}
        # Every draft token by its expected worth: the most promising first, and a sequence's in their order.
        gains = sorted(
            (-(rate**depth), depth, number)
            for number, (one, rate) in enumerate((one, self.rate(one)) for one in sequences)
            for depth in range(1, min(self.most, one.remaining - 1) + 1)
        )
        batch, taken = len(sequences), []
        best = MARGIN * batch / self.plain_seconds(batch)
        for deepest in range(1, self.most + 1):
            some, tokens = [one for one in gains if one[1] <= deepest], float(batch)
            for rows, (gain, _, _) in enumerate(some, 1):
                tokens -= gain
                seconds = self.verify_seconds(batch, batch + rows) + deepest * self._drafting.seconds
                if tokens / seconds > best:
                    best, taken = tokens / seconds, some[:rows]
        counts: dict[Sequence, int] = {}
        for _, depth, number in taken:
            counts[sequences[number]] = max(depth, counts.get(sequences[number], 0))
        return counts

    def rate(self, one: Sequence) -> float:
        """Upper confidence bound of the acceptance of a sequence's next draft token."""
        return self._evidence(one).bound(one.generated)

    def _evidence(self, one: Sequence) -> _Acceptance:
        return self._own.get(one) or self._all.inherited(self._passes, one.generated)

    def plain_seconds(self, batch: int) -> float:
        """Seconds of a pass that decodes a token of each of so many sequences."""
        return self._plain[_bucket(self.decode_buckets, batch)].seconds

    def verify_seconds(self, batch: int, rows: int) -> float:
        """Seconds of a step with so many rows: measured, or by the roofline from what plain decoding takes."""
        if rows > self.prompt_buckets[-1]:
            return float("inf")
        bucket = _bucket(self.prompt_buckets, rows)
        if bucket in self._verify and self._verify[bucket].known:
            return self._verify[bucket].seconds
        rows = _bucket(self.decode_buckets, batch)
        return self.plain_seconds(batch) * max(self.knee, bucket) / max(self.knee, rows)

    def record_draft(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        """Records a verification; nothing proposed counts as a refused token."""
        tried = accepted + (accepted < proposed or not proposed)
        self._own[sequence] = own = self._evidence(sequence)
        own.add(accepted, tried, sequence.generated)
        self._all.add(accepted, tried, self._passes)

    def record_drafting(self, depth: int, seconds: float) -> None:
        """Records the time of drafting."""
        self._drafting.add(seconds / depth)

    def record_step(self, rows: int, seconds: float, *, decode: bool) -> None:
        """Records the time of a pass."""
        self._passes += 1
        (self._plain if decode else self._verify).setdefault(rows, _Duration()).add(seconds)

    def _plain_known(self, batch: int) -> bool:
        bucket = _bucket(self.decode_buckets, batch)
        return bucket in self._plain and self._plain[bucket].known


def roofline_knee(weight_bytes: int, weights: int, flops: float, bandwidth: float) -> float:
    """Rows of a step from which its matmuls take longer than reading the weights.

    Args:
        weight_bytes, weights: bytes and number of the weights that a step reads.
        flops, bandwidth: peak of the device, per second.
    """
    return (weight_bytes / bandwidth) / (2 * weights / flops)


def _bucket(sizes: Many[int], count: int) -> int:
    return next((size for size in sizes if size >= count), sizes[-1])


def length_of_drafts(config: EngineConfig, params: Any) -> DraftLength:
    """Draft length that an engine's configuration asks for, for its weights."""
    fixed = config.draft_length == "fixed" or config.draft_trees
    if config.speculate is None or fixed or config.layer_window or config.stages > 1:
        # To read the layers takes the time of a step with streamed weights, however many tokens it verifies; and
        # the time between two results of a pipeline is not that of a step.
        return FixedDraftLength(config.verify_tokens)
    return AdaptiveDraftLength(config.verify_tokens, config.decode_buckets, config.prompt_buckets, _knee(params))


def _knee(params: Any) -> float:
    """Rows from which a step is bound by arithmetic, by the data sheet of the device; none known on a CPU."""
    leaves = jax.tree.leaves(params)
    peak = peak_of(next(iter(leaves[0].devices())).device_kind) if leaves else None
    if peak is None:
        return AdaptiveDraftLength.knee
    return roofline_knee(sum(x.nbytes for x in leaves), sum(x.size for x in leaves), peak.flops, peak.bandwidth)
