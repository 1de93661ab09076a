"""Recorded arrivals played to an engine on paper, whose clock is the work it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxllm.infer import Engine, EngineConfig, SamplingParams
from jaxllm.infer.engine.policies import Policy, Service
from jaxllm.infer.engine.sequence import Request
from jaxllm.infer.runner.engine_step import Shape
from jaxllm.infer.runner.paged_cache import LayerGroup
from jaxllm.models.attention_context import Cached
from tests.infer.engines import VOCAB
from tests.infer.paper import PaperDevice

SIZES = EngineConfig(
    sequences=4, budget=16, max_len=64, page_size=4, pages=90, buckets=(4, 8, 12, 16), loop=1, samplers=("plain",)
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


class Timed(PaperDevice):
    """A device on paper whose steps take time."""

    def __init__(self, config: EngineConfig):
        super().__init__(config, (LayerGroup(Cached(2, 8, 8), None, (0, 1)),), config.pages or 0)
        self.now = self.free = 0.0
        self.steps: list[tuple[float, bool]] = []

    def run(self, shape: Shape, packed: np.ndarray, masks: np.ndarray | None = None) -> Any:
        seconds = BASE + SLOPE * shape.tokens
        self.free = max(self.free, self.now) + seconds
        self.steps.append((seconds, bool((shape.inputs.views(packed[0])["kv_lens"] > 0).sum() > 1)))
        return _Later(self, self.free, super().run(shape, packed))


@dataclass
class _Later:
    device: Timed
    ready: float
    made: np.ndarray

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self.device.now = max(self.device.now, self.ready)
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
    device = Timed(config)
    engine = Engine(device, config, VOCAB, policy=policy, clock=lambda: device.now, **fields)
    coming = sorted(arrivals, key=lambda one: one.at)
    going: dict[int, tuple[Arrival, Request]] = {}
    while coming or engine.busy:
        if not engine.busy and coming:
            device.now = max(device.now, coming[0].at)
        while coming and coming[0].at <= device.now:
            one = coming.pop(0)
            params = SamplingParams(max_tokens=one.tokens, temperature=0.0)
            one.came = device.now
            request = engine.submit(one.prompt, params, service=one.service)
            going[request.id] = one, request
        for piece in engine.step():
            one, request = going[piece.request.id]
            one.first = min(one.first, device.now)
            if piece.finish is not None:
                one.last = device.now
                device.check(request.prompt, request.sequences[0].tokens)
                del going[piece.request.id]
        if watch is not None:
            watch(engine)
        for one, request in going.values():
            if request.sequences[0].slot >= 0:
                one.seated = min(one.seated, device.now)
    return engine, device


def overload(rng: np.random.Generator, many: int, factor: float = 2.0, **service: Any) -> list[Arrival]:
    """Arrivals faster than they can be served: lengths with a heavy tail; ``service``: choices for each field."""
    lengths = np.minimum(np.exp(rng.normal(2.2, 0.7, (many, 2))).astype(int) + 1, (40, 20))
    work = sum(SLOPE * (p + t) + BASE * t / SIZES.sequences for p, t in lengths.tolist())
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
