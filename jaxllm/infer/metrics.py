"""What an engine counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Metrics:
    """What an engine has done.

    Attributes:
        steps: sent to the device; a loop on the device is one.
        prompt_tokens, made_tokens: computed, and given out.
        padding_tokens: rows of flat batches that were none.
        finished: continuations, by how they ended.
    """

    steps: int = 0
    prompt_tokens: int = 0
    made_tokens: int = 0
    padding_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
