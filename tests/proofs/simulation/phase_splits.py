"""Planned splits between prompts and decoding beside chunked prefill and even shares, on bursts."""

from __future__ import annotations

import numpy as np

from jaxllm.simulate import RequestTrace, make_trace, simulate
from recipes.llama3 import llama3_8b
from tests.proofs.harness import proof
from tests.simulate.served import deployment

BUDGETS = (256, 512, 1024)
"""Token budgets of engines with chunked prefill."""
WEIGHTS = (1, 3, 10)
SIZES = (64, 128, *BUDGETS, 2048)


def served(traces: list[RequestTrace], split: str, budget: int = SIZES[-1]) -> tuple[float, float]:
    """Traces on 8B on one H100: mean seconds between output tokens, 95th percentile of seconds to the first token."""
    between, first = [], []
    for trace in traces:
        base = deployment(
            model=llama3_8b().model, max_sequences=64, max_batched_tokens=budget, max_len=max(4096, trace.longest),
            pages=None, page_size=64, buckets=tuple(size for size in SIZES if size <= budget), phase_split=split,
        )  # fmt: skip
        results = simulate(base, trace).results
        between += [np.diff(one.chunks) for one in results]
        first += [one.ttft for one in results]
    return float(np.concatenate(between).mean()), float(np.percentile(first, 95))


@proof("simulation", cases=("alike", "conversation"), sample=1, bound={"to_chunked": 1.0, "to_half": 1.0})
def planned_splits_wait_less(kind: str) -> dict[str, float]:
    """Bursts of alike prompts and of conversations: 95th percentile of the time to the first token with ``nexus``, as a
    share of that of chunked prefill and of even shares at the same mean time between output tokens, over three traces
    together. Between budgets, and between weights, both are interpolated.
    """
    arrivals, lengths = {"alike": ("bursty:6", "2000/200"), "conversation": ("bursty:12", "conversation")}[kind]
    traces = [make_trace(arrivals, lengths=lengths, count=80, seed=seed) for seed in range(3)]
    chunked = sorted(served(traces, "whole", budget) for budget in BUDGETS)
    planned = [served(traces, f"nexus:{weight}") for weight in WEIGHTS]
    half = served(traces, "half")
    for name, found in (("chunked", chunked), ("nexus", planned), ("half", [half])):
        print(f"{kind}, {name}: " + ", ".join(f"{b * 1e3:.2f} ms a token, {t:.3f} s" for b, t in found), flush=True)
    outside = {"left": np.nan, "right": np.nan}
    between, first = planned[-1]
    return {
        "to_chunked": first / float(np.interp(between, *zip(*chunked, strict=True), **outside)),
        "to_half": float(np.interp(half[0], *zip(*sorted(planned), strict=True), **outside)) / half[1],
    }
