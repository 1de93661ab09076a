"""Page allocator on random traces without a device, where every page's content is a list of tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.engine.engine import Engine
from jaxllm.infer.runner.paged_cache import LayerGroup
from jaxllm.infer.runner.step.step_shape import StepShape
from jaxllm.models.attention_context import KVSpec
from tests.infer import engines
from tests.infer.paper import PaperRunner
from tests.proofs.harness import proof


@st.composite
def pools(draw: st.DrawFn) -> dict[str, Any]:
    """Page pools, too small ones among them, with pages of a few tokens and groups with windows."""
    size = draw(st.sampled_from([1, 2, 4, 8]))
    columns = -(-engines.LONGEST // size)
    sequences = draw(st.integers(1, 6))
    return {
        "page_size": size,
        "pages": columns + draw(st.sampled_from([1, 2, columns, 4 * columns])),
        "sequences": sequences,
        "budget": sequences + draw(st.integers(0, 20)),
        "windows": draw(st.sampled_from([(None,), (None, 5), (7,), (None, 3, 12)])),
        "loop": draw(st.sampled_from([1, 3, 8])),
        "preemption": draw(st.sampled_from(["recompute", "swap"])),
        "prefix_cache": draw(st.booleans()),
        "many": draw(st.integers(1, 25)),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def usage(scheduler: Any) -> tuple[int, int, int]:
    """(allocated pages, all pages, slots of allocated pages without a token), over all groups."""
    size = scheduler.page_size
    empty = sum(len(own) * size - min(s.computed, len(own) * size) for s in scheduler.running for own in s.pages)
    return sum(p.count - p.available for p in scheduler.pages), sum(p.count for p in scheduler.pages), empty


@proof("engine", count=1000, sample=25, chunk=50, strategy=pools())
def pages_are_never_lost_or_shared_by_mistake(example: dict[str, Any]) -> None:
    """Random traces of allocation, release, sharing, copies, swaps: each step reads its own pages, none is lost."""
    config = EngineConfig(
        max_sequences=example["sequences"], max_batched_tokens=example["budget"], decode_steps=example["loop"],
        max_len=engines.LONGEST, page_size=example["page_size"], pages=example["pages"],
        preemption=example["preemption"], prefix_cache=example["prefix_cache"],
    )  # fmt: skip
    groups = tuple(LayerGroup(KVSpec(1, 1, 1), window, (0,)) for window in example["windows"])
    rng = np.random.default_rng(example["seed"])
    runner = PaperRunner(config, groups, example["pages"])
    engine = Engine(runner, config, engines.VOCAB)
    asked = engines.traffic(rng, dataclasses.replace(config, top_logprobs=1), example["many"])
    for a in asked:
        old = a["params"]
        a["params"] = SamplingParams(old.max_tokens, 0.0, seed=old.seed, n=old.n, stop_ids=old.stop_ids)
    for request in engines.serve(engine, asked):
        for s in request.sequences:
            runner.check(request.prompt, s.tokens)


@proof("engine", count=100, sample=3, bound=0.04)
def pages_are_in_use_while_requests_wait(seed: int) -> float:
    """Many requests and few pages: how many pages lie idle while requests wait for them, on average over steps.

    Slots of held pages that have no token yet are another figure: at most a page and a loop of a sequence.
    """
    rng = np.random.default_rng(seed)
    config = EngineConfig(
        max_sequences=160, max_batched_tokens=2048, max_len=engines.LONGEST, page_size=4, pages=1000, decode_steps=4
    )
    idle = []

    class Watched(PaperRunner):
        def run(self, shape: StepShape, packed: np.ndarray) -> np.ndarray:
            held, there, empty = usage(engine.scheduler)
            spare = (
                shape.inputs.views(packed[0])["starts"][-1] < config.max_batched_tokens
            )  # tokens that the step still had room for
            if engine.scheduler.waiting and len(engine.scheduler.running) < config.max_sequences and spare:
                idle.append((there - held) / there)
                assert empty <= len(engine.scheduler.running) * (config.page_size + config.decode_steps)
            return super().run(shape, packed)

    engine = Engine(Watched(config, (LayerGroup(KVSpec(1, 1, 1), None, (0,)),), 1000), config, engines.VOCAB)
    for _ in range(400):
        prompt = rng.integers(0, engines.VOCAB, rng.integers(10, 40)).tolist()
        engine.submit(prompt, SamplingParams(int(rng.integers(10, 24)), 0.0))
    while engine.busy:
        engine.step()
    full = idle[5:-5]  # the first steps read the first prompts
    assert len(full) > 30, "the pool is the limit for some time"
    return float(np.mean(full))
