"""Repeated batch: rollouts that several updates use, one after another.

The old log-probabilities stay those that the completions were sampled with, so that from the second update on ratios
differ from 1 and the clip binds: the inner loop of PPO (arXiv:1707.06347, Algorithm 1, K epochs) and of GRPO
(arXiv:2402.03300, Algorithm 1, mu iterations).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.data import Batch


class RepeatedBatch:
    """Batch of the current rollouts, part of a run's checkpoints (``jaxllm.checkpoint.StateProvider``).

    A run that stops between two updates with a batch could not sample it again, since its weights have moved on.

    Args:
        blank: a batch of the same shapes and fields, without a token.
    """

    name = "rollouts"

    def __init__(self, blank: Batch):
        self.batch = blank

    def arrays(self) -> dict[str, Any]:
        """Fields of the batch by name, int32 or float32 [B, S]."""
        return {name: value for name, value in self.batch._asdict().items() if value is not None}

    def facts(self) -> None:
        """There are none."""

    def restore(self, arrays: dict[str, Any], facts: None) -> None:
        """Takes back the batch of a checkpoint."""
        self.batch = self.batch._replace(**{name: np.asarray(value) for name, value in arrays.items()})
