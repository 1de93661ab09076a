"""Draft length: how many tokens are drafted for each sequence of a step, by acceptance and by what a step costs.

If each draft token is accepted with probability ``a``, the j-th is worth a^j tokens; it costs a row of the verification
and a pass of the drafter. Decoding is bound by memory while a batch is small, so that rows are nearly free, and by
arithmetic when it is large: then no draft pays, and sequences decode plainly, several tokens a step. Costs are measured
as steps run; a step that has not run yet is estimated by the roofline. It is the goodput of SmartSpec
(arXiv:2406.14066), with a length for each sequence.

Some proposers often have nothing to propose, as n-grams have where a text is new. Such an attempt costs little: the
sequences decode one token, instead of several in a step. So the share of attempts that give a draft is counted apart
from the acceptance of its tokens; as refused tokens, attempts without a draft would end drafting where it pays. Which
sequences have a draft is only known when all are made, and then it is decided again how many of their tokens are
verified: a few rows more than a program has would run in the next larger one.

Acceptance is only seen where drafts are verified, so that a sequence whose first drafts happen to be refused must not
be given up for good. It is a bandit problem: what counts is not the share of accepted tokens but an upper confidence
bound of it, which is far above the share after few tokens, and evidence fades.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import jax

from jaxllm.compiler.device_peaks import peak_of
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.scheduling.sequence import Sequence

INHERITED = 4.0
"""Most attempts of all sequences that a new sequence's evidence begins with."""
FADE = 192
"""Tokens after which evidence counts half, so that drafting is tried again now and then."""
MARGIN = 1.03
"""Gain in speed from which drafting is worth its variance."""

StepKind = Literal["plain", "verification", "undrafted"]
"""Plain decoding of any number of tokens; verification of drafts; plain decoding where nothing had been proposed."""


@runtime_checkable
class DraftLength(Protocol):
    """Draft length of an engine's sequences."""

    def counts(self, sequences: list[Sequence]) -> dict[Sequence, int]:
        """Most draft tokens for each sequence of the next step; a sequence without any is left out."""
        ...

    def kept(self, sequences: list[Sequence], drafts: Mapping[Sequence, int]) -> Mapping[Sequence, int]:
        """Tokens that are verified of each draft, now that the drafts of a step's sequences are made; none: plainly."""
        ...

    def record_draft(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        """Records a verification, or that nothing was proposed."""
        ...

    def record_drafting(self, depth: int, seconds: float) -> None:
        """Records the time of drafting ``depth`` tokens for all sequences of a step."""
        ...

    def record_step(self, rows: int, seconds: float, kind: StepKind) -> None:
        """Records the time of a pass of the served model over so many rows, without padding."""
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

    def kept(self, sequences: list[Sequence], drafts: Mapping[Sequence, int]) -> Mapping[Sequence, int]:
        """All of each draft."""
        return drafts

    def record_draft(self, sequence: Sequence, proposed: int, accepted: int) -> None:
        """Does nothing."""

    def record_drafting(self, depth: int, seconds: float) -> None:
        """Does nothing."""

    def record_step(self, rows: int, seconds: float, kind: StepKind) -> None:
        """Does nothing."""


@dataclass
class _Share:
    """Evidence about a share of successes, which fades as tokens are generated without any.

    Attributes:
        successes, tried: successes, and all attempts.
        at: tokens that had been generated then.
    """

    successes: float = 0.0
    tried: float = 0.0
    at: int = 0

    def add(self, successes: int, tried: int, now: int) -> None:
        """Adds ``tried`` attempts, ``successes`` of them successful."""
        kept = self._kept(now)
        self.successes, self.tried, self.at = self.successes * kept + successes, self.tried * kept + tried, now

    def bound(self, now: int, batch: int) -> float:
        """Upper confidence bound, of one standard deviation, of the next attempt's success: 1 without evidence.

        It is the score interval's (E. B. Wilson 1927), which holds for few attempts too. A step is for a batch of
        sequences, and the deviations of a sum add up as squares: of each, what is above the share of successes counts
        by 1 / sqrt(batch). Otherwise the bounds of many sequences would promise more together than any step gives.
        """
        if not self.tried:
            return 1.0
        share = self.successes / self.tried
        successes, tried = self.successes * self._kept(now), self.tried * self._kept(now)
        bound = (successes + 0.5 + math.sqrt(max(0.0, successes * (1 - share)) + 0.25)) / (tried + 1)
        # Rounding would else make a longer draft more promising than its first token.
        return min(1.0, share + (bound - share) / math.sqrt(batch))

    def inherited(self, now: int, at: int) -> _Share:
        """Evidence of a new sequence, which has generated ``at`` tokens: up to ``INHERITED`` attempts of this one."""
        kept = self._kept(now)
        share = kept * min(1.0, INHERITED / max(INHERITED, self.tried * kept))
        return _Share(self.successes * share, self.tried * share, at)

    def _kept(self, now: int) -> float:
        return 0.5 ** (max(0, now - self.at) / FADE)


@dataclass
class _Evidence:
    """Evidence about drafts.

    Attributes:
        offered: attempts that gave a draft.
        accepted: draft tokens that were compared, and those of them that were equal.
    """

    offered: _Share = field(default_factory=_Share)
    accepted: _Share = field(default_factory=_Share)

    def add(self, proposed: int, accepted: int, now: int) -> None:
        """Adds a draft of ``proposed`` tokens, 0 for none, of which the first ``accepted`` were accepted."""
        self.offered.add(proposed > 0, 1, now)
        if proposed:
            self.accepted.add(accepted, accepted + (accepted < proposed), now)

    def inherited(self, now: int, at: int) -> _Evidence:
        """Evidence of a new sequence, see ``_Share.inherited``."""
        return _Evidence(self.offered.inherited(now, at), self.accepted.inherited(now, at))


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
            self.seconds += max(0.1, 1 / self.count) * (min(seconds, 2 * self.seconds) - self.seconds)

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
    _undrafted: dict[int, _Duration] = field(default_factory=dict)
    _drafting: _Duration = field(default_factory=_Duration)
    _all: _Evidence = field(default_factory=_Evidence)
    _own: weakref.WeakKeyDictionary[Sequence, _Evidence] = field(default_factory=weakref.WeakKeyDictionary)
    _passes: int = 0

    def counts(self, sequences: list[Sequence]) -> dict[Sequence, int]:
        """Draft tokens of each sequence, the most promising first; none until plain decoding has been measured."""
        if not sequences or not self._plain_known(len(sequences)):
            return {}
        # Every draft token by its expected worth: the most promising first, and a sequence's in their order.
        batch, taken = len(sequences), []
        offered = [self.offered(one, batch) for one in sequences]
        gains = sorted(
            (-offered[number] * rate**depth, depth, number)
            for number, (one, rate) in enumerate((one, self.rate(one, batch)) for one in sequences)
            for depth in range(1, min(self.most, one.remaining - 1) + 1)
        )
        best = MARGIN * batch / self.plain_seconds(batch)
        for deepest in range(1, self.most + 1):
            some, tokens = [one for one in gains if one[1] <= deepest], float(batch)
            none, mean, variance = 1.0, 0.0, 0.0  # probability that no sequence has a draft; number of draft tokens
            for count, (gain, depth, number) in enumerate(some, 1):
                tokens -= gain
                mean += offered[number]
                variance += (2 * depth - 1) * offered[number] * (1 - offered[number])
                none *= 1 - offered[number] if depth == 1 else 1
                verified = batch + min(count, _usual_most(mean, variance, 1 - none))
                seconds = (1 - none) * self.verify_seconds(batch, verified) + deepest * self._drafting.seconds
                if none > 0:
                    seconds += none * self.undrafted_seconds(batch)
                if tokens / seconds > best:
                    best, taken = tokens / seconds, some[:count]
        return _deepest(sequences, taken)

    def kept(self, sequences: list[Sequence], drafts: Mapping[Sequence, int]) -> Mapping[Sequence, int]:
        """Tokens that are verified of each draft: those that make the step's tokens per second largest."""
        if not self._plain_known(len(sequences)):  # these are not all that the lengths were chosen for
            return drafts
        batch, tokens, taken = len(sequences), float(len(sequences)), 0
        gains = sorted(
            (-(self.rate(one, batch) ** depth), depth, number)
            for number, one in enumerate(sequences)
            for depth in range(1, drafts.get(one, 0) + 1)
        )
        best = MARGIN * batch / self.plain_seconds(batch)
        for count, (gain, _, _) in enumerate(gains, 1):
            tokens -= gain
            if (speed := tokens / self.verify_seconds(batch, batch + count)) > best:
                best, taken = speed, count
        kept = _deepest(sequences, gains[:taken])
        for one in drafts.keys() - kept.keys():  # proposed, and not compared
            self._own[one] = own = self._evidence(one)
            own.offered.add(1, 1, one.generated)
            self._all.offered.add(1, 1, self._passes)
        return kept

    def rate(self, one: Sequence, batch: int = 1) -> float:
        """Upper confidence bound of the acceptance of the next draft token of a sequence in a batch."""
        return self._evidence(one).accepted.bound(one.generated, batch)

    def offered(self, one: Sequence, batch: int = 1) -> float:
        """Upper confidence bound of the probability that a draft is proposed for a sequence in a batch."""
        return self._evidence(one).offered.bound(one.generated, batch)

    def _evidence(self, one: Sequence) -> _Evidence:
        return self._own.get(one) or self._all.inherited(self._passes, one.generated)

    def plain_seconds(self, batch: int) -> float:
        """Seconds of a pass that decodes a token of each of so many sequences."""
        return self._plain[_bucket(self.decode_buckets, batch)].seconds

    def undrafted_seconds(self, batch: int) -> float:
        """Seconds of a pass that decodes one token of each of so many sequences, since nothing was proposed."""
        measured = self._undrafted.get(_bucket(self.decode_buckets, batch))
        return measured.seconds if measured is not None and measured.known else self.plain_seconds(batch)

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
        """Records a verification, or that nothing was proposed."""
        self._own[sequence] = own = self._evidence(sequence)
        own.add(proposed, accepted, sequence.generated)
        self._all.add(proposed, accepted, self._passes)

    def record_drafting(self, depth: int, seconds: float) -> None:
        """Records the time of drafting."""
        self._drafting.add(seconds / depth)

    def record_step(self, rows: int, seconds: float, kind: StepKind) -> None:
        """Records the time of a pass, by the size that its rows are padded to once all programs are ready.

        Until then a larger program runs in place of one that is not, and the time that counts is that.
        """
        self._passes += 1
        measured = {"plain": self._plain, "verification": self._verify, "undrafted": self._undrafted}[kind]
        sizes = self.prompt_buckets if kind == "verification" else self.decode_buckets
        measured.setdefault(_bucket(sizes, rows), _Duration()).add(seconds)

    def _plain_known(self, batch: int) -> bool:
        bucket = _bucket(self.decode_buckets, batch)
        return bucket in self._plain and self._plain[bucket].known


def _deepest(sequences: Many[Sequence], taken: Many[tuple[float, int, int]]) -> dict[Sequence, int]:
    """Draft tokens of each sequence, of (gain, depth, number of the sequence)."""
    counts: dict[Sequence, int] = {}
    for _, depth, number in taken:
        counts[sequences[number]] = max(depth, counts.get(sequences[number], 0))
    return counts


def _usual_most(mean: float, variance: float, some: float) -> int:
    """Draft tokens where there are any, one standard deviation above the mean.

    A step with a few more rows than a program has runs in the next larger one: the mean alone would miss that.

    Args:
        mean, variance: of their number.
        some: probability that there are any.
    """
    usual = mean / some
    deviation = math.sqrt(max(0.0, (variance + mean**2) / some - usual**2))
    return math.ceil(usual + deviation - 1e-6)


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
