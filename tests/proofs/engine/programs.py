"""No program is compiled after the engine is ready, and a second start compiles none at all."""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.infer import EngineConfig, SamplingParams
from tests.infer import engines
from tests.proofs.harness import proof

WAYS = ("roomy", "tight, swap", "contiguous", "invariant")
FEATURES = list(itertools.product(("llama", "gemma3", "mistral"), WAYS))


class Compilations:
    """Number of programs that the backend was asked for while this was listening, cached ones included."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.listening = False
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, seconds: float, **about: Any) -> None:
        if self.listening and event == "/jax/core/compile/backend_compile_duration":
            self.names.append(str(about))

    def __enter__(self) -> Compilations:
        self.names, self.listening = [], True
        return self

    def __exit__(self, *_: object) -> None:
        self.listening = False


@proof("engine", cases=FEATURES, sample=2)
def nothing_is_compiled_after_ready(case: tuple[str, str]) -> None:
    """Every feature of sampling, prefixes, forks, preemption, swap, cancellation: not one compilation."""
    model, way = case
    engine, counter = engines.engine(way, model), Compilations()
    with counter:
        for seed in range(6):
            rng = np.random.default_rng([seed, *model.encode(), *way.encode()])
            engines.serve(engine, engines.traffic(rng, engine.config, 12), check=False)
    assert counter.names == []
    assert engine.runner.program_cache.counts.late == 0  # type: ignore[attr-defined]
    with counter:
        jax.jit(lambda x: x + case.index(way))(np.float32(1))
    assert counter.names, "the counter sees a compilation"


@proof("engine", count=5, sample=1, bound=0.2)
def a_second_start_compiles_nothing(seed: int) -> float:
    """Programs kept by the first start: processor time until the second is
    ready over that of the first, none compiled."""
    sizes = EngineConfig(max_sequences=2, max_batched_tokens=8, max_len=32, page_size=8, pages=16, preemption="swap")
    prompt = np.random.default_rng(seed).integers(0, engines.VOCAB, 7).tolist()
    with tempfile.TemporaryDirectory() as folder:
        seconds, texts, counts = [], [], []
        for _ in range(2):
            start = time.process_time()
            engine = engines.build(sizes, manifest=Path(folder))
            seconds.append(time.process_time() - start)
            counts.append(engine.runner.program_cache.counts)  # type: ignore[attr-defined]
            request = engine.submit(prompt, SamplingParams(max_tokens=12, seed=seed, top_k=5, n=2))
            while engine.busy:
                engine.step()
            texts.append([s.tokens for s in request.sequences])
    assert texts[0] == texts[1]
    assert (counts[0].loaded, counts[1].compiled) == (0, 0)
    assert counts[1].loaded == counts[0].compiled == len(engine.runner.programs) > 8  # type: ignore[attr-defined]
    return seconds[1] / seconds[0]
