"""An engine that serves before all its programs are there gives the same tokens, and compiles no program late."""

from __future__ import annotations

import functools
import gc
import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from jaxllm.infer import Engine, EngineConfig, SamplingParams
from jaxllm.infer.runner.program_cache import EngineProgram, ProgramCache
from tests import quick
from tests.infer import engines
from tests.proofs.engine.programs import Compilations
from tests.proofs.harness import proof

MODELS = ("llama", "gemma3", "mixtral", "deepseek_v3")
SIZES = {
    "roomy": EngineConfig(
        max_sequences=2, max_batched_tokens=16, max_len=engines.LONGEST, page_size=8, pages=60, buckets=(4, 16),
        decode_steps=2, top_logprobs=3,
    ),
    "tight, swap": EngineConfig(
        max_sequences=2, max_batched_tokens=12, max_len=engines.LONGEST, page_size=4, pages=18, buckets=(12,),
        decode_steps=3, preemption="swap", top_logprobs=3,
    ),
    "speculating": EngineConfig(
        max_sequences=2, max_batched_tokens=16, max_len=engines.LONGEST, page_size=8, pages=40, buckets=(16,),
        decode_steps=2, speculate="ngram:2", draft_length="fixed", top_logprobs=3,
    ),
}  # fmt: skip


class Arrivals:
    """Lets the background programs of an engine arrive one at a time, at moments that the test chooses."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)
        self.open = False

    def let(self, count: int) -> None:
        """Lets so many more programs arrive."""
        self._allowed.release(count)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Programs whose compilation begins in the background are held back."""
        load = ProgramCache._compile_or_load

        def held(cache: ProgramCache, program: EngineProgram) -> Any:
            if threading.current_thread().name == "jaxllm compile" and cache.loader is not None and not self.open:
                self._allowed.acquire()
            return load(cache, program)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ProgramCache, "_compile_or_load", held)
            patch.setattr(jax, "jit", quick.jit)  # in the background threads too
            yield


def _traffic(seed: int, config: EngineConfig) -> list[dict[str, Any]]:
    """Random requests, half of them for the plain sampler."""
    asked = engines.traffic(np.random.default_rng(seed), config, 8)
    for one in asked[::2]:
        given = one["params"]
        one["params"] = SamplingParams(max_tokens=given.max_tokens, temperature=given.temperature, seed=given.seed)
    return asked


def _tokens(engine: Engine, asked: list[dict[str, Any]]) -> list[list[list[int]]]:
    return [[s.tokens for s in r.sequences] for r in engines.serve(engine, asked, check=False)]


def assert_same(found: list[list[list[int]]], want: list[list[list[int]]], asked: list[dict[str, Any]]) -> None:
    """Equal tokens; of a request that was cancelled, as many as both have."""
    for here, there, one in zip(found, want, asked, strict=True):
        for these, those in zip(here, there, strict=True):
            length = min(len(these), len(those)) if one["cancel"] is not None else None
            assert these[:length] == those[:length]


@proof(
    "start",
    count=48,
    sample=1,
    chunk=4,
    strategy=st.tuples(st.sampled_from(MODELS), st.sampled_from(sorted(SIZES)), st.integers(0, 2**31)),
    float64=True,
)
def programs_that_arrive_late_change_no_token(example: tuple[str, str, int]) -> None:
    """Random requests in float64, while the programs arrive between random steps, in the engine's own order: the tokens
    of an engine that has them all, no program late, and none compiled once all are loaded. A request that is cancelled
    at some step has as many tokens as drafts were accepted until then, which depends on what shared its steps.
    """
    gc.collect()  # the engine of the example before, whose programs take thousands of memory maps
    model, sizes, seed = example
    config, rng = SIZES[sizes], random.Random(seed)
    asked = _traffic(seed, config)
    want = _tokens(_whole(model, sizes), asked)
    arrivals = Arrivals()
    with arrivals.holding():
        engine = _build(config, model, background=True)
        runner = engine.runner
        total = runner.programs.total  # type: ignore[attr-defined]
        first = len(runner.programs)
        assert first < total
        step, seen = engine.step, set[int]()

        def stepping() -> Any:
            seen.add(len(runner.programs))
            if rng.random() < 0.2:
                arrivals.let(1)
            return step()

        engine.step = stepping  # type: ignore[method-assign]
        assert_same(_tokens(engine, asked), want, asked)
        assert min(seen) == first
        arrivals.let(2 * total)
        engine.wait_for_programs()
    assert len(runner.programs) == total
    counts = runner.program_cache.counts  # type: ignore[union-attr]
    assert counts.late == 0
    with Compilations() as counter:
        assert_same(_tokens(engine, asked), want, asked)
    assert counter.names == []
    assert counts.late == 0
    assert counts.compiled == total


def _build(config: EngineConfig, model: str, **fields: Any) -> Engine:
    return engines.build(config, model, "float64", **fields)


@functools.lru_cache(maxsize=3)  # so that a process has the memory maps for them
def _whole(model: str, sizes: str) -> Engine:
    return _build(SIZES[sizes], model)


@proof("start", count=6, sample=1, float64=True)
def a_second_start_compiles_nothing(seed: int) -> None:
    """The background's programs are kept too; another model of the architecture, and an engine whose other settings are
    not the programs', finds them.
    """
    config = replace(SIZES["tight, swap"], max_sequences=2, samplers=("plain", "full"))
    asked = _traffic(seed, config)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        made = []
        for number in range(3):
            sizes = replace(config, prefix_cache=number < 2)
            engine = _build(sizes, "llama", background=True, manifest=Path(folder))
            engine.wait_for_programs()
            made.append((engine.runner.program_cache.counts, _tokens(engine, asked)))  # type: ignore[union-attr]
    (first, want), *others = made
    assert first.loaded == 0
    assert first.compiled > 8
    for counts, tokens in others:
        assert (counts.compiled, counts.loaded, counts.late) == (0, first.compiled, 0)
        assert tokens == want
