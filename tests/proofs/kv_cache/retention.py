"""Retention rule window+sinks: equal numbers where it keeps everything, and pages that come back."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxllm.infer import SamplingParams
from jaxllm.infer.runner.retention.window_and_sinks import WindowAndSinks
from tests.infer import engines
from tests.proofs.harness import proof
from tests.seams.dense_reference import DenseReference, error

WAYS = [
    (way, model) for way in ("tight, recompute", "tight, swap", "roomy") for model in ("llama", "smollm2", "gemma3")
]
"""(way to serve, model)."""


@proof("kv_cache", cases=WAYS, sample=1, float64=True, bound={"whole": 1e-10, "dropped": 1e-10})
def window_and_sinks_in_every_way(case: tuple[str, str]) -> dict[str, float]:
    """Random traffic: a budget of the whole length is the training forward; a small one is a masked softmax."""
    way, model = case
    rng = np.random.default_rng([*way.encode(), *model.encode()])
    worst = {}
    for name, recent, sinks in (("whole", engines.LONGEST, 4), ("dropped", 9, 3)):
        keep = WindowAndSinks(recent, sinks).keep if name == "dropped" else None
        sizes = dataclasses.replace(
            engines.ENGINES[way], prefix_cache=False, retention=f"window+sinks:{recent},{sinks}"
        )
        engine = engines.build(sizes, model, "float64")
        asked = engines.traffic(rng, sizes, 6)
        long = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0)
        asked += [{"prompt": rng.integers(0, engines.VOCAB, n).tolist(), "params": long} for n in (33, 21)]
        for one in asked:
            one["params"] = dataclasses.replace(one["params"], prompt_logprobs=None, logprobs=0)
        made = engines.serve(engine, asked)
        worst[name] = error(model, DenseReference("plain", keep), made)
        if keep is not None:
            assert error(model, DenseReference(), made) > 1e-4
    return worst


@proof("kv_cache", cases=[(12, 2), (20, 4), (30, 0)], sample=1)
def pages_of_window_and_sinks(case: tuple[int, int]) -> None:
    """Most pages of four that a sequence of 60 tokens holds while it decodes: those of the kept tokens and the next."""
    recent, sinks = case
    sizes = dataclasses.replace(
        engines.ENGINES["roomy"], prefix_cache=False, retention=f"window+sinks:{recent},{sinks}", page_size=4,
        max_sequences=1, decode_steps=1, samplers=("plain",),
    )  # fmt: skip
    engine = engines.build(sizes, "llama")
    engine.submit([1, 2, 3], SamplingParams(max_tokens=57, temperature=0.0))
    held = 0
    while engine.busy:
        engine.step()
        engines.check_books(engine)
        held = max([held, *(len(s.pages[0]) for s in engine.scheduler.running)])
    assert held == -(-(recent + sinks - 1 + 1) // 4)
    assert all(pages.available == pages.count for pages in engine.scheduler.pages)
