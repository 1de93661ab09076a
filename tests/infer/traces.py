"""Recorded arrivals replayed to a simulated engine, whose clock is the work it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxllm.infer import Engine, EngineConfig, SamplingParams
from jaxllm.infer.runner.paged_cache import LayerGroup
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.infer.scheduling.policies import Policy, Service
from jaxllm.infer.scheduling.sequence import Request
from jaxllm.models.attention_context import KVSpec
from tests.infer.engines import VOCAB
from tests.infer.paper import PaperRunner

SIZES = EngineConfig(
    max_sequences=4,
    max_batched_tokens=16,
    max_len=64,
    page_size=4,
    pages=90,
    buckets=(4, 8, 12, 16),
    decode_steps=1,
    samplers=("plain",),
)
BASE, SLOPE = 0.01, 0.002
"""Seconds of a step, and of each of its rows."""


@dataclass
class Arrival:
    """A request of a trace; ``came``, ``seated``, ``first`` and ``last`` are when it was handed in, got a slot, and its
    first and last token."""

    at: float
    prompt: list[int]
    tokens: int
    service: Service = field(default_factory=Service)
    came: float = np.inf
    seated: float = np.inf
    first: float = np.inf
    last: float = np.inf

    @property
    def met(self) -> bool:
        """Whether its targets were met."""
        pace = (self.last - self.first) / max(1, self.tokens - 1)
        wanted = self.service
        return (wanted.ttft is None or self.first - self.at <= wanted.ttft) and (
            wanted.tpot is None or pace <= wanted.tpot
        )


class Timed(PaperRunner):
    """Simulated runner whose steps take time."""

    def __init__(self, config: EngineConfig):
        super().__init__(config, (LayerGroup(KVSpec(2, 8, 8), None, (0, 1)),), config.pages or 0)
        self.now = self.free = 0.0
        self.steps: list[tuple[float, bool]] = []

    def run(self, shape: StepShape, packed: np.ndarray, masks: np.ndarray | None = None) -> Any:
        seconds = BASE + SLOPE * shape.tokens
        self.free = max(self.free, self.now) + seconds
        self.steps.append((seconds, bool((shape.inputs.views(packed[0])["kv_lens"] > 0).sum() > 1)))
        return _PendingResult(self, self.free, super().run(shape, packed))


@dataclass
class _PendingResult:
    runner: Timed
    ready: float
    made: np.ndarray

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.runner.now = max(self.runner.now, self.ready)
        return self.made


def play(
    arrivals: list[Arrival],
    policy: Policy | None = None,
    config: EngineConfig = SIZES,
    *,
    watch: Any = None,
    **fields: Any,
) -> tuple[Engine, Timed]:
    """Runs a trace to its end, and notes in it what became of each."""
    runner = Timed(config)
    engine = Engine(runner, config, VOCAB, policy=policy, clock=lambda: runner.now, **fields)
    coming = sorted(arrivals, key=lambda one: one.at)
    going: dict[int, tuple[Arrival, Request]] = {}
    while coming or engine.busy:
        if not engine.busy and coming:
            runner.now = max(runner.now, coming[0].at)
        while coming and coming[0].at <= runner.now:
            one = coming.pop(0)
            params = SamplingParams(max_tokens=one.tokens, temperature=0.0)
            one.came = runner.now
            request = engine.submit(one.prompt, params, service=one.service)
            going[request.id] = one, request
        for piece in engine.step():
            one, request = going[piece.request.id]
            one.first = min(one.first, runner.now)
            if piece.finish is not None:
                one.last = runner.now
                runner.check(request.prompt, request.sequences[0].tokens)
                del going[piece.request.id]
        if watch is not None:
            watch(engine)
        for one, request in going.values():
            if request.sequences[0].slot >= 0:
                one.seated = min(one.seated, runner.now)
    return engine, runner


def overload(rng: np.random.Generator, many: int, factor: float = 2.0, **service: Any) -> list[Arrival]:
    """Arrivals faster than they can be served: lengths with a heavy tail; ``service``: choices for each field."""
    lengths = np.minimum(np.exp(rng.normal(2.2, 0.7, (many, 2))).astype(int) + 1, (40, 20))
    work = sum(SLOPE * (p + t) + BASE * t / SIZES.max_sequences for p, t in lengths.tolist())
    times = np.sort(rng.uniform(0, work / factor, many))
    return [
        Arrival(
            float(at),
            rng.integers(0, VOCAB, prompt).tolist(),
            int(tokens),
            Service(**{name: values[rng.integers(len(values))] for name, values in service.items()}),
        )
        for at, (prompt, tokens) in zip(times, lengths.tolist(), strict=True)
    ]
