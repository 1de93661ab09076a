"""Staged paper runner: a paper runner with pipeline stages, in which several steps are in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.runner.runner_protocol import RunnerSpec
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.plan.formulas.serving_step import BatchWork, StepCost
from jaxllm.plan.formulas.staged_step import StagedStepModel, pipeline_ends
from jaxllm.simulate.paper_runner import PaperRunner, PendingStep, SimulatedStep, work_of

StageClock = Callable[[list[BatchWork], StepShape, int], Sequence[StepCost]]
"""Cost of a step on each stage: (batch of each replica, program, 1) -> costs."""


class StageTimer:
    """Stage clock of a step-time model.

    Args:
        model: step-time model.
        samples: rows of a step whose logits are computed; at most the rows of the step.
        host: seconds in which the first stage waits for the host; counted as launches.
    """

    def __init__(self, model: StagedStepModel, samples: int, host: float = 0.0):
        self.model, self.samples, self.host = model, samples, StepCost(launch=host)

    def __call__(self, batches: list[BatchWork], shape: StepShape, passes: int) -> list[StepCost]:
        """Cost of a step on each stage."""
        first, *others = self.model.stage_costs(batches, shape.tokens, min(shape.tokens, self.samples) * shape.rows)
        return [first + self.host, *others]


class StagedPaperRunner(PaperRunner):
    """Paper runner of an engine with pipeline stages; the cost of a step is the mean over the stages.

    Args:
        spec: sizes of batch and KV cache.
        config: configuration of the engine.
        clock: gives the cost of a step on each stage.
        page_seconds: see ``PaperRunner``; a stage copies its layers' part.
    """

    def __init__(
        self, spec: RunnerSpec, config: EngineConfig, clock: StageClock, page_seconds: tuple[float, ...] | None = None
    ):
        def mean(batches: list[BatchWork], shape: StepShape, passes: int) -> StepCost:
            total = StepCost()
            for cost in clock(batches, shape, passes):
                total += cost
            return total * (1 / config.stages)

        super().__init__(spec, config, mean, page_seconds)
        self._stage_clock, self._stage_free = clock, [0.0] * config.stages

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None = None) -> PendingStep:
        """Starts a step: each stage computes it after the steps before it and after the stage before it."""
        batches, passes = work_of(shape, packed)
        chunks = [list(zip(one.starts.tolist(), one.counts.tolist(), strict=True)) for one in batches]
        costs, start = self._stage_clock(batches, shape, passes), self.next_start
        ready = pipeline_ends(self._stage_free, start, [cost.seconds for cost in costs])
        self._free, total = self._stage_free[0], StepCost()
        for cost in costs:
            total += cost
        mean = total * (1 / len(costs))
        self.steps.append(SimulatedStep(start, mean, chunks, shape.decode, passes, shape.tokens))
        return PendingStep(self, ready, self._zeros(shape, len(packed)))

    def read(self, replica: int, group: int, pages: list[int]) -> Any:
        """Copies pages to the host: only the time of each stage passes."""
        self._copy(len(pages) * self._page_seconds[group])

    def write(self, replica: int, group: int, pages: list[int], content: Any) -> None:
        """Copies pages back: only the time of each stage passes."""
        self._copy(len(pages) * self._page_seconds[group])

    def _copy(self, seconds: float) -> None:
        self._stage_free = [max(free, self.now) + seconds for free in self._stage_free]
        self._free = self._stage_free[0]
