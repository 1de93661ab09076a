"""Step recorder: measures the steps of an engine while it serves, or of one that is made for it.

The time of a step is from when the device could begin it, as the simulator counts: from its start, or from the result
of the step before if that came later, until the host has its result.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxllm.convert.load import LoadedModel
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.engine_config import EngineConfig
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.infer.sampling_params import SamplingParams
from jaxllm.plan.formulas.serving_step import BatchWork
from jaxllm.simulate.paper_runner import work_of
from jaxllm.simulate.recorded.recorded_steps import MeasuredStep, RecordedSteps


class StepRecorder:
    """Steps of an engine, as they are measured.

    Attributes:
        steps: those whose results are there.
        host: seconds of calls of the engine's ``step``, less waiting for results, summed over the steps.
    """

    def __init__(self) -> None:
        self.steps: list[MeasuredStep] = []
        self.host = self._free = 0.0

    @contextlib.contextmanager
    def of(self, engine: Engine) -> Iterator[StepRecorder]:
        """Records the steps of an engine."""
        runner, run = engine.runner, engine.runner.run

        def timed(shape: StepShape, packed: np.ndarray, *masks: Any) -> Any:
            batches, passes = work_of(shape, packed)
            begin = time.perf_counter()
            return _TimedResult(self, run(shape, packed, *masks), begin, (batches, shape, passes))

        step = engine.step

        def hosted() -> Any:
            begin = time.perf_counter()
            out = step()
            self.host += time.perf_counter() - begin
            return out

        runner.run, engine.step = timed, hosted  # type: ignore[method-assign]
        try:
            yield self
        finally:
            runner.run, engine.step = run, step  # type: ignore[method-assign]

    def fit(self, model: str) -> RecordedSteps:
        """Times of the programs that have run.

        Raises:
            ValueError: none ran often enough.
        """
        host = max(0.0, self.host / max(1, len(self.steps)))
        return RecordedSteps.fit(model, jax.devices()[0].device_kind, self.steps, host)

    def landed(self, begin: float, work: tuple[list[BatchWork], StepShape, int], waited: float) -> None:
        """Takes a step whose result is there now, for which the host has waited so many seconds."""
        now = time.perf_counter()
        self.host -= waited
        self.steps.append(MeasuredStep.of(*work, now - max(begin, self._free)))
        self._free = now


class _TimedResult:
    """Result of a step, which tells the recorder when the host has it."""

    def __init__(self, recorder: StepRecorder, made: Any, begin: float, work: tuple[list[BatchWork], StepShape, int]):
        self._recorder, self._made, self._begin, self._work = recorder, made, begin, work
        self._rows: np.ndarray | None = None

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        if self._rows is None:
            asked = time.perf_counter()
            self._rows = np.asarray(self._made)
            self._recorder.landed(self._begin, self._work, time.perf_counter() - asked)
        return self._rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)


def record_steps(
    loaded: LoadedModel,
    config: EngineConfig,
    name: str,
    *,
    rounds: int = 3,
    tell: Callable[[str], None] = lambda _: None,
) -> RecordedSteps:
    """Measures the programs of an engine, by serving batches of random prompts of several lengths.

    Args:
        loaded: the model.
        config: sizes of the engine; prompts are no longer than its ``max_len`` less the tokens they generate.
        name: of the model, for the file.
        rounds: how often each batch is served.
        tell: told what is measured.
    """
    engine = Engine.of(loaded.model, loaded.params, config, mesh=loaded.mesh, longest=loaded.longest, strict=True)
    rng, recorder = np.random.default_rng(0), StepRecorder()
    tokens = max(2, min(2 * config.decode_steps + 2, engine.max_len // 4))
    room = max(1, engine.max_len - tokens)
    lengths = sorted({*config.prompt_buckets, 1, room // 4, room // 2, room})
    lengths = [length for length in lengths if length <= room]
    for number in range(1 + rounds):  # the first warms up
        recorder = recorder if number > 1 else StepRecorder()
        with recorder.of(engine):
            for many in config.decode_buckets or (config.max_sequences,):
                tell(f"batches of {many}, round {number} of {rounds}" if number else f"warming up, batches of {many}")
                for length, later in zip(lengths, reversed(lengths), strict=True):
                    serve_batch(engine, rng, (many, length), (many // 2, later), tokens)
    engine.runner.close()
    return recorder.fit(name)


def serve_batch(
    engine: Engine, rng: np.random.Generator, first: tuple[int, int], later: tuple[int, int], tokens: int
) -> None:
    """Serves random prompts, a number of one length and, when one of these has ended, a number of another.

    So steps with prompts have sequences that decode beside them too, of other contexts.
    """
    for many, length in (first, later):
        for number in range(many):
            params = SamplingParams(max_tokens=max(2, tokens - number % 4), temperature=0.0, ignore_eos=True)
            engine.submit(rng.integers(0, engine.vocab_size, length), params)
        ended = False
        while engine.busy and not ended:
            ended = any(delta.finish is not None for delta in engine.step())
    while engine.busy:
        engine.step()
