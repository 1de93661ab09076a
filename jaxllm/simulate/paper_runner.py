"""Paper runner: a runner whose steps take the time of a step-time model, and compute nothing.

It takes the place of ``ModelRunner`` under the engine, so that the engine's own scheduler, page allocator, prefix cache
and policies decide every step; only the device is a formula. Its clock is the engine's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.runner.adapter_pool import Page
from jaxllm.infer.runner.runner_protocol import RunnerSpec
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.plan.formulas.serving_step import BatchWork, ServingStepModel, StepCost

StepClock = Callable[[list[BatchWork], StepShape, int], StepCost]
"""Cost of a step: (batch of each replica, program, decode steps of the device) -> cost."""


@dataclass
class SimulatedStep:
    """Step that a paper runner has taken.

    Attributes:
        start: when the device began it, in seconds.
        cost: its cost on one device.
        chunks: (first position, tokens) of each replica's chunks.
        decode: it was decode-only.
        passes: forward passes: tokens that a decode-only step decodes of each sequence.
        rows: rows of a replica's flat batch, padding included.
        waiting: sequences that waited for a slot when it began.
        cache_use: share of the KV cache's pages that sequences held.
    """

    start: float
    cost: StepCost
    chunks: list[list[tuple[int, int]]]
    decode: bool
    passes: int
    rows: int
    waiting: int = 0
    cache_use: float = 0.0

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens computed in it."""
        return 0 if self.decode else sum(count for one in self.chunks for _, count in one if count > 1)

    @property
    def decoding(self) -> int:
        """Sequences that decoded in it."""
        return sum(count == 1 for one in self.chunks for _, count in one)


def work_of(shape: StepShape, packed: np.ndarray) -> tuple[list[BatchWork], int]:
    """Batch of each replica of a step, and its forward passes.

    Args:
        shape: of the step's program.
        packed: int32[replicas, ...], the step's inputs.
    """
    batches, passes = list[BatchWork](), 1
    for own in packed:
        x = shape.inputs.views(own)
        counts = np.diff(x["starts"])
        used = (x["slots"] < shape.slots) & (counts > 0)
        counts, lengths = counts[used].astype(np.int64), x["kv_lens"][used].astype(np.int64)
        batches.append(BatchWork(lengths - counts, counts))
        if shape.decode:
            passes = max(passes, int(x["steps"]))
    return batches, passes


class StepTimer:
    """Step clock of a step-time model: a decode loop is as many passes, at the context of its middle.

    Args:
        model: step-time model.
        samples: rows of a step whose logits are computed; at most the rows of the step.
        host: seconds in which the devices wait for the host; counted as launches.
    """

    def __init__(self, model: ServingStepModel, samples: int, host: float = 0.0):
        self.model, self.samples, self.host = model, samples, StepCost(launch=host)

    def __call__(self, batches: list[BatchWork], shape: StepShape, passes: int) -> StepCost:
        """Cost of a step."""
        if passes > 1:
            batches = [BatchWork(one.starts + (passes - 1) / 2, one.counts) for one in batches]
        cost = self.model.step(batches, shape.tokens, min(shape.tokens, self.samples) * shape.rows) * passes
        return cost + self.host


class PaperRunner:
    """Runner of an engine on devices that are not here, see ``jaxllm.infer.runner.runner_protocol.Runner``.

    Args:
        spec: sizes of batch and KV cache.
        config: configuration of the engine.
        clock: gives the cost of a step.
        page_seconds: seconds to copy one page of a layer group to the host or back, by group.

    Attributes:
        now: seconds: the time at which the host knows the last result.
        steps: steps taken.
    """

    model = params = mesh = program_cache = adapter_pool = None
    pools: Any = ()
    token_bytes = 0
    follows = False

    def __init__(
        self, spec: RunnerSpec, config: EngineConfig, clock: StepClock, page_seconds: tuple[float, ...] | None = None
    ):
        self.spec, self.config, self.clock = spec, config, clock
        self.programs: Mapping[str, Any] = {}
        self.now = self._free = 0.0
        self.steps: list[SimulatedStep] = []
        self._page_seconds = page_seconds or (0.0,) * len(spec.groups)
        self._outputs: dict[str, np.ndarray] = {}

    def choose(self, requests: int, tokens: int, *, decode: bool, full: bool) -> StepShape:
        """Shape of the smallest program that a step fits into."""
        config = self.config
        rows, decode = config.program_rows(requests, tokens, decode=decode)
        return StepShape(
            rows, min(rows, config.max_sequences), decode, full, config.max_sequences, self.spec.columns,
            len(self.spec.groups), config.decode_steps, 1, "float32", 1 if decode else 1 + config.verify_tokens,
            tuple(i for i, group in enumerate(self.spec.groups) if group.rule is not None),
        )  # fmt: skip

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None = None) -> Any:
        """Starts a step: the device is busy for its time; the result is there when that is over."""
        batches, passes = work_of(shape, packed)
        chunks = [list(zip(one.starts.tolist(), one.counts.tolist(), strict=True)) for one in batches]
        cost, start = self.clock(batches, shape, passes), self.next_start
        self._free = start + cost.seconds
        self.steps.append(SimulatedStep(start, cost, chunks, shape.decode, passes, shape.tokens))
        return PendingStep(self, self._free, self._zeros(shape, len(packed)))

    @property
    def next_start(self) -> float:
        """Seconds at which the device can begin a step that the host gives it now."""
        return max(self._free, self.now)

    def _zeros(self, shape: StepShape, replicas: int) -> np.ndarray:
        if shape.name not in self._outputs:
            self._outputs[shape.name] = np.zeros((replicas, shape.outputs.size), np.int32)
        return self._outputs[shape.name]

    def read(self, replica: int, group: int, pages: list[int]) -> Any:
        """Copies pages to the host: only the time passes."""
        self._free = max(self._free, self.now) + len(pages) * self._page_seconds[group]
        return None

    def write(self, replica: int, group: int, pages: list[int], content: Any) -> None:
        """Copies pages back: only the time passes."""
        self._free = max(self._free, self.now) + len(pages) * self._page_seconds[group]

    def seat(self, replica: int, packed: np.ndarray) -> None:
        """Refuses logits processors: simulated tokens have no logits."""
        raise NotImplementedError("a simulated request has no logits processors.")

    def write_adapter(self, page: int, content: Page) -> None:
        """Refuses adapters, which are not simulated."""
        raise NotImplementedError("adapters are not simulated.")

    def swap(self, params: Any) -> None:
        """Refuses new weights: there are none."""
        raise ValueError("only an engine of a real model has weights.")

    def follow(self, weights: Callable[[], Any] | None = None) -> None:
        """Refuses to follow: a simulated engine is one process."""
        raise RuntimeError("a simulated engine follows nobody.")

    def close(self) -> None:
        """Does nothing: nobody follows."""


@dataclass
class PendingStep:
    """Result of a simulated step; reading it moves the runner's clock to when it is there.

    Attributes:
        runner: the runner whose clock moves.
        ready: when the result is there, in seconds.
        tokens: the result.
    """

    runner: PaperRunner
    ready: float
    tokens: np.ndarray = field(repr=False)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.runner.now = max(self.runner.now, self.ready)
        return self.tokens
