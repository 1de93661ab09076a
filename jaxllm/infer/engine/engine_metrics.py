"""What an engine counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Bucket:
    """What steps of one program have done that was of use: tokens after a text's end, and padding, are not.

    Attributes:
        seconds: from the landing of the step before, or from when it was sent where there was none.
        passes: through the model; a loop on the device makes several.
        tokens: that went through it.
        samples: that came out.
        attended: tokens that a layer's queries met, all in all, by the layer's window.
        read: tokens whose keys and values a layer read, likewise.
    """

    seconds: float = 0.0
    passes: int = 0
    tokens: int = 0
    samples: int = 0
    attended: dict[int | None, int] = field(default_factory=dict)
    read: dict[int | None, int] = field(default_factory=dict)

    def add(self, start: int, count: int, window: int | None) -> None:
        """A pass over ``count`` tokens of a sequence, from position ``start`` on, in layers with this window."""
        reach = start + count if window is None else window
        short = max(0, min(start + count, reach) - start)  # tokens that have less than the window before them
        met = short * (2 * start + short + 1) // 2 + (count - short) * reach
        self.attended[window] = self.attended.get(window, 0) + met
        self.read[window] = self.read.get(window, 0) + start + count - max(0, start + 1 - reach)


@dataclass
class Metrics:
    """What an engine has done.

    Attributes:
        steps: sent to the device; a loop on the device is one.
        prompt_tokens, made_tokens: computed, and given out.
        padding_tokens: rows of flat batches that were none.
        finished: continuations, by how they ended.
        buckets: by program.
    """

    steps: int = 0
    prompt_tokens: int = 0
    made_tokens: int = 0
    padding_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    buckets: dict[str, Bucket] = field(default_factory=dict)

    def landed(
        self,
        program: str,
        seconds: float,
        work: Iterable[tuple[int, int, int]],
        windows: Iterable[int | None],
        *,
        decode: bool,
    ) -> None:
        """A step has landed.

        Args:
            program: its name.
            seconds: see ``Bucket``.
            work: (first position, tokens, samples) of each sequence; of one that decodes each token is a pass.
            windows: of the model's layers.
            decode: whether they do.
        """
        bucket, windows = self.buckets.setdefault(program, Bucket()), set(windows)
        work = [one for one in work if one[1]]
        bucket.seconds += seconds
        bucket.passes += max((count for _, count, _ in work), default=0) if decode else bool(work)
        for start, count, samples in work:
            bucket.tokens += count
            bucket.samples += samples
            for window in windows:
                for at in range(start, start + count) if decode else (start,):
                    bucket.add(at, 1 if decode else count, window)
