"""Feed of rollouts that compares the log-probabilities of each with the training forward pass of the same weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxllm.posttrain.policy_training import RolloutFeed
from jaxllm.train import Run
from jaxllm.train.step.loss import token_logprobs


class CheckedFeed(RolloutFeed):
    """Feed whose rollouts are compared; the engine swaps once a step and compiles nothing after its start.

    Attributes:
        gaps: of each step, differences at every token that was sampled, in nats.
        other: (parameters, batch) -> log-probabilities of the targets, by another forward pass; None: none.
        other_gaps: its differences to the training forward pass.
        completions: number of them.
    """

    other: Callable[[Any, Any], np.ndarray] | None = None

    def batches(self, run: Run, first: int, params: Any) -> contextlib.AbstractContextManager[Iterator[Any]]:
        self.gaps: list[np.ndarray] = []
        self.other_gaps: list[np.ndarray] = []
        self.completions = 0
        return contextlib.nullcontext(self._checked(run, first, params))

    def _checked(self, run: Run, first: int, params: Any) -> Iterator[Any]:
        score = jax.jit(lambda params, batch: token_logprobs(run.model, params, batch)[0])
        with RolloutFeed.batches(self, run, first, params) as given:
            for step, batch in given:
                real = np.asarray(batch.targets) >= 0
                assert real.any()
                plain = batch._replace(weights=None, advantages=None, old_logprobs=None)
                with jax.set_mesh(run.mesh):
                    now = np.asarray(score(params(), plain))
                self.gaps.append((now - np.asarray(batch.old_logprobs))[real])
                if self.other is not None:
                    self.other_gaps.append((self.other(params(), plain) - now)[real])
                self.completions += int((np.diff(real.astype(np.int8), axis=1, prepend=0) == 1).sum())
                assert self.engine is not None
                assert self.engine.engine.version == step - first + 1
                assert self.engine.engine.runner.program_cache.counts.late == 0  # type: ignore[attr-defined]
                yield step, batch

    @property
    def worst(self) -> float:
        """Largest difference at any token."""
        return max(float(np.abs(gap).max()) for gap in self.gaps)
