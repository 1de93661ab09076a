"""Fine-tuning beside an engine on paper: units take the time of the step-time model, on its simulated clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from jaxllm.plan.formulas.serving_step import BatchWork, StepCost
from jaxllm.posttrain.coserve.step_slack import SlackScheduler
from jaxllm.posttrain.coserve.work_units import UnitKind, WorkUnit, work_units
from jaxllm.serve.load_benchmark import RequestResult
from jaxllm.simulate import Deployment, RequestTrace
from jaxllm.simulate.paper_runner import PaperRunner, StepClock, StepTimer
from jaxllm.simulate.request_trace import token_ids
from jaxllm.simulate.simulator import SimulatedEngine, SimulatedRequest

BACKWARD = 2.0
"""Cost of a chunk's backward pass in forward passes: it recomputes a part, and multiplies by each weight once."""


def jittered(clock: StepClock, share: float, seed: int) -> StepClock:
    """Step clock whose durations are longer by a random share of up to ``share``."""
    rng = np.random.default_rng(seed)

    def cost(batches: list[BatchWork], shape: object, passes: int) -> StepCost:
        return clock(batches, shape, passes) * (1 + share * rng.random())  # type: ignore[arg-type]

    return cost


class PaperUnits:
    """Units of rows of ``seq_len`` tokens without end, which keep the device of a paper runner busy."""

    def __init__(self, runner: PaperRunner, deployment: Deployment, chunk: int, seq_len: int):
        self.runner, self.model = runner, deployment.step_model
        self.chunk, self._row = chunk, np.ones((1, seq_len), np.int32)
        self._units: deque[WorkUnit] = deque()
        self.behind, self.passes = False, 0

    def seconds(self, unit: WorkUnit) -> float:
        """Duration of a unit."""
        if unit.kind == "update":
            return 1e-3
        work = BatchWork.of([unit.token], [self.chunk])
        return self.model.step([work], self.chunk, self.chunk).seconds * (BACKWARD if unit.kind == "backward" else 1)

    def durations(self) -> dict[UnitKind, float]:
        """Longest duration of each kind."""
        last = self._row.shape[1] - self.chunk
        kinds: tuple[UnitKind, ...] = ("forward", "backward", "update")
        return {kind: self.seconds(WorkUnit(kind, token=last)) for kind in kinds}

    def peek(self) -> WorkUnit | None:
        if not self._units:
            self._units.extend(work_units(self._row, 1, self.chunk))
        return self._units[0]

    def run_next(self, *, wait: bool) -> float:
        unit = self._units.popleft()
        spent, start = self.seconds(unit), self.runner.next_start
        self.runner._free = start + spent
        self.passes += unit.kind == "backward"
        if wait:
            self.runner.now = self.runner._free
        return spent if wait else 0.0

    def mark(self) -> None: ...

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


@dataclass
class Served:
    """Service of a trace: the requests, the gaps between tokens in seconds, and the fine-tuning done meanwhile.

    Attributes:
        share: fine-tuning throughput of that of an idle engine.
        squeezed: steps without room.
    """

    results: list[RequestResult]
    gaps: np.ndarray
    share: float
    squeezed: int

    @property
    def p99(self) -> float:
        """99th percentile of the gaps."""
        return float(np.quantile(self.gaps, 0.99))


def serve_trace(
    deployment: Deployment, trace: RequestTrace, *, target: float, chunk: int, seq_len: int = 2048,
    finetune: bool = True, jitter: float = 0.05, seed: int = 0,
) -> Served:  # fmt: skip
    """Serves a trace with fine-tuning beside it, on a simulated clock."""
    timer = StepTimer(deployment.step_model, deployment.engine.max_sequences, deployment.host_seconds)
    engine = SimulatedEngine(deployment, jittered(timer, jitter, seed))
    units = PaperUnits(engine.runner, deployment, chunk, seq_len)
    work = SlackScheduler(units, target, units.durations())
    engine.engine.side_work = work if finetune else None
    requests = [SimulatedRequest(one, RequestResult(one.at, one.at), n) for n, one in enumerate(trace.requests)]
    names: dict[str, int] = {}
    coming = deque(requests)
    while coming or engine.active:
        if engine.engine.busy and (not coming or engine.runner.now < coming[0].request.at):
            engine.advance()
        else:
            one = coming.popleft()
            engine.submit(one, token_ids(trace.requests, one.index, names), one.request.at)
    steps = [(units.seconds(unit), unit.kind == "backward") for unit in work_units(units._row, 1, chunk)]
    peak = sum(backward for _, backward in steps) / sum(seconds for seconds, _ in steps)
    gaps = np.concatenate([np.diff(one.result.chunks) for one in requests])
    return Served([one.result for one in requests], gaps, units.passes / engine.runner.now / peak, work.squeezed)
