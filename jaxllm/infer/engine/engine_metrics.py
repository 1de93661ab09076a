"""Engine metrics: counters of steps, tokens and finished completions, and the work done by each program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class ProgramMetrics:
    """Useful work of the steps of one program; tokens after a completion's end and padding do not count.

    Attributes:
        seconds: from the result of the step before, or from the start of the step if there was none.
        passes: forward passes; a decode loop on the device runs several.
        tokens: tokens that went through the model.
        samples: tokens that were sampled.
        attended: query-key pairs of a layer's attention, by the layer's window.
        read: tokens whose keys and values a layer read, by the layer's window.
    """

    seconds: float = 0.0
    passes: int = 0
    tokens: int = 0
    samples: int = 0
    attended: dict[int | None, int] = field(default_factory=dict)
    read: dict[int | None, int] = field(default_factory=dict)

    def add(self, start: int, count: int, window: int | None) -> None:
        """Adds a pass over ``count`` tokens of a sequence, from position ``start`` on, in layers with this window."""
        reach = start + count if window is None else window
        short = max(0, min(start + count, reach) - start)  # tokens with fewer than ``window`` tokens before them
        met = short * (2 * start + short + 1) // 2 + (count - short) * reach
        self.attended[window] = self.attended.get(window, 0) + met
        self.read[window] = self.read.get(window, 0) + start + count - max(0, start + 1 - reach)


@dataclass
class EngineMetrics:
    """Metrics of an engine since it was built.

    Attributes:
        steps: steps sent to the device; a decode loop on the device is one.
        prompt_tokens, generated_tokens: tokens that were computed, and returned.
        padding_tokens: padding rows of flat batches.
        drafts: verifications of the tokens that a proposer proposed for a sequence.
        proposed_tokens, accepted_tokens: tokens that were proposed, and those of them that were sampled.
        accepted_by_position: accepted tokens by their position in a draft.
        kept_entries, dropped_entries: entries of the KV cache, by layer and kv head, that stayed and left under a
            retention rule, see ``Engine.retention_report``.
        cut_tokens, recomputed_tokens: tokens of finished subtasks that have left their sequences, and tokens behind
            them that were computed again.
        moved_pages, moved_bytes: pages of the KV cache that went from a prefill pool to a decode pool, of every layer
            group, and their bytes as the decode pool's devices hold them.
        finished: completions by finish reason.
        programs: work by program name.
    """

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    padding_tokens: int = 0
    drafts: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    kept_entries: int = 0
    dropped_entries: int = 0
    cut_tokens: int = 0
    recomputed_tokens: int = 0
    moved_pages: int = 0
    moved_bytes: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    programs: dict[str, ProgramMetrics] = field(default_factory=dict)

    def add_draft(self, proposed: int, accepted: int) -> None:
        """Adds a verification of ``proposed`` tokens, of which the first ``accepted`` were sampled."""
        self.drafts += 1
        self.proposed_tokens += proposed
        self.accepted_tokens += accepted
        self.accepted_by_position += [0] * (proposed - len(self.accepted_by_position))
        for position in range(accepted):
            self.accepted_by_position[position] += 1

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a verification gives: the accepted ones, and the one sampled after them."""
        return 1 + self.accepted_tokens / max(1, self.drafts)

    @property
    def kept_share(self) -> float:
        """Share of the entries that stayed, whenever a retention rule let some leave; 1 before that."""
        return self.kept_entries / max(1, self.kept_entries + self.dropped_entries) if self.dropped_entries else 1.0

    def show_drafts(self) -> str:
        """Line about speculation: acceptance length, and the share of drafts whose token was accepted, by position."""
        shares = ", ".join(f"{count / max(1, self.drafts):.0%}" for count in self.accepted_by_position)
        return (
            f"speculation: {self.drafts} drafts, {self.proposed_tokens} draft tokens, {self.accepted_tokens} accepted; "
            f"{self.acceptance_length:.2f} tokens a verification; accepted by position: {shares or 'none'}"
        )

    def add_step(
        self,
        program: str,
        seconds: float,
        work: Iterable[tuple[int, int, int]],
        windows: Iterable[int | None],
        *,
        decode: bool,
    ) -> None:
        """Adds a step whose result has arrived.

        Args:
            program: name of the program.
            seconds: see ``ProgramMetrics``.
            work: (first position, tokens, samples) of each sequence; in a decode loop each token is a pass.
            windows: sliding windows of the model's layers.
            decode: the step was decode-only.
        """
        program_metrics, windows = self.programs.setdefault(program, ProgramMetrics()), set(windows)
        work = [one for one in work if one[1]]
        program_metrics.seconds += seconds
        program_metrics.passes += max((count for _, count, _ in work), default=0) if decode else bool(work)
        for start, count, samples in work:
            program_metrics.tokens += count
            program_metrics.samples += samples
            for window in windows:
                for at in range(start, start + count) if decode else (start,):
                    program_metrics.add(at, 1 if decode else count, window)
