"""Fine-tuning beside serving (FlexLLM): gradients in chunks, saved bytes, served tokens, and the target on a trace."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from jaxllm.infer import Request, SamplingParams
from jaxllm.posttrain.coserve.chunked_gradients import ChunkedGradients
from jaxllm.posttrain.coserve.finetune_run import FinetuneUnits
from jaxllm.simulate import make_trace
from jaxllm.train import train
from recipes.llama3 import llama3_8b
from tests import tiny
from tests.infer.engines import MIXTURES, MODELS
from tests.posttrain.chunked_steps import OBJECTIVE, adapted, step_error, whole_bytes
from tests.posttrain.coserved import adapter_config, answers, serve, served, work_of
from tests.posttrain.paper_finetuning import serve_trace
from tests.proofs.harness import proof
from tests.simulate.served import deployment
from tests.train import runs
from tests.train.test_step import compilations

TARGETS = (("attention", "mlp"), ("q", "v"), ("mlp",), ("o", "down"))


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    """Architecture, adapter and chunks."""
    return {
        "architecture": draw(tiny.architectures()),
        "remat": draw(st.sampled_from(["none", "elementwise", "attention", "full"])),
        "kind": draw(st.sampled_from(["lora", "rslora", "dora"])),
        "targets": draw(st.sampled_from(TARGETS[:3])),
        "seq_len": draw(st.integers(4, 13)),
        "chunk": draw(st.integers(1, 13)),
        "rows": draw(st.sampled_from([1, 2])),
        "packed": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }


@proof("posttraining", count=60, sample=1, strategy=steps(), float64=True, bound=1e-10)
def gradients_in_chunks(case: dict[str, Any]) -> float:
    """Loss sums and adapter gradients of drawn models and rows in chunks of 1 to 13 tokens, against whole rows."""
    config = tiny.decoder(**(case["architecture"] | {"remat": case["remat"]}))
    model, params, mask = adapted(config, case["seed"], kind=case["kind"], targets=case["targets"])
    batch = tiny.batch(case["seed"], 2, case["seq_len"], config.vocab_size, packed=case["packed"], padding=True)
    return step_error(model, params, mask, batch, min(case["chunk"], case["seq_len"]), case["rows"])


FAMILIES = {**MODELS, **MIXTURES}


@proof("posttraining", cases=list(FAMILIES), sample=1, float64=True, bound=1e-10)
def gradients_in_chunks_of_families(name: str) -> float:
    """A tiny model of each family, packed rows with padding, chunks that divide the rows and that do not."""
    routed = name in (*MIXTURES, "mixtral")
    model, params, mask = adapted(FAMILIES[name], targets=("attention",) if routed else ("*",))
    batch = tiny.batch(7, 2, 12, model.config.vocab_size, packed=True, padding=True)
    return max(step_error(model, params, mask, batch, chunk) for chunk in (4, 5))


@proof(
    "posttraining",
    cases=[(remat, targets) for remat in ("none", "elementwise", "attention") for targets in TARGETS],
    sample=1,
    bound={"saved_of_unpruned": 0.9, "saved_of_pruned_by_differentiation": 0.95},
)
def saved_bytes(case: tuple[str, tuple[str, ...]]) -> dict[str, float]:
    """Bytes saved of a row of 64 tokens in chunks, keys and values included, over those that the backward pass of whole
    rows takes, of all parameters (nothing is pruned), and of the adapter alone.
    """
    remat, targets = case
    config = dataclasses.replace(MODELS["llama"], remat=remat, dtype="float32", param_dtype="float32")
    model, params, mask = adapted(config, targets=targets)
    batch = tiny.batch(1, 1, 64, config.vocab_size, packed=True)
    step = ChunkedGradients(model, OBJECTIVE, mask, rows=1, seq_len=64, chunk=16)
    own = step.saved_bytes + step.cache_bytes
    return {
        "saved_of_unpruned": own / whole_bytes(model, params, batch),
        "saved_of_pruned_by_differentiation": own / whole_bytes(model, params, batch, mask),
    }


@functools.cache
def base() -> Path:
    """Folder of a tiny trained model."""
    folder = Path(tempfile.mkdtemp(prefix="jaxllm-coserving-"))
    train(runs.run_config(folder))
    return folder


@proof("posttraining", count=20, sample=1, counts=("tokens", "units", "steps"))
def served_tokens_are_unchanged(seed: int) -> dict[str, float]:
    """Tokens and log-probabilities of random requests, greedy and sampled, with a run beside them and without, equal
    bit for bit; no program of either is compiled meanwhile.
    """
    rng = np.random.default_rng(seed)
    drawn = [
        (
            rng.integers(0, 250, int(rng.integers(1, 30))).tolist(),
            SamplingParams(
                max_tokens=int(rng.integers(1, 30)),
                temperature=float(rng.choice([0.0, 1.0])),
                seed=int(rng.integers(1000)),
                n=int(rng.integers(1, 3)),
                ignore_eos=True,
                logprobs=2,
            ),
            int(rng.integers(0, 6)),
        )
        for _ in range(8)
    ]
    sizes = {"decode_steps": int(rng.choice([1, 2, 4])), "preemption": str(rng.choice(["recompute", "swap"]))}
    chunk = int(rng.integers(3, 17))

    def run(llm: Any) -> list[Request]:
        found = []
        for prompt, params, steps in drawn:
            found.append(llm.engine.submit(prompt, params))
            for _ in range(steps):
                llm.engine.step()
        serve(llm, found)
        return found

    wanted = answers(run(served(None, base(), **sizes)))
    llm = served(adapter_config(base(), f"beside{seed}", steps=1000), base(), chunk, **sizes)
    work = work_of(llm)
    with compilations() as compiled:
        found = answers(run(llm))
    source = work.source
    assert isinstance(source, FinetuneUnits)
    llm.engine.close()
    assert found == wanted
    late = [name for name in compiled if any(word in name for word in ("forward", "backward", "update", "step"))]
    assert not late, late
    units = (work.tokens["forward"] + work.tokens["backward"]) / chunk
    assert units > 0
    return {"tokens": float(sum(len(tokens) for tokens, _ in found)), "units": units, "steps": float(source.done)}


class Load(NamedTuple):
    """Load of an H100 with Llama 3 8B, a latency target, and a chunk of fine-tuning."""

    arrivals: str
    lengths: str
    target: float
    chunk: int
    count: int = 80

    def __str__(self) -> str:
        return f"{self.arrivals} {self.lengths} {self.target} {self.chunk}"


LOADS = [
    Load("poisson:4", "alpaca", 0.05, 256),
    Load("poisson:16", "alpaca", 0.05, 256),
    Load("poisson:2", "sharegpt", 0.05, 256),
    Load("poisson:8", "sharegpt", 0.05, 256),
    Load("bursty:8", "sharegpt", 0.05, 256),
    Load("poisson:4", "conversation", 0.05, 256),
    Load("poisson:4", "conversation", 0.075, 128),
    Load("poisson:4", "alpaca", 0.02, 64),
]


@proof("posttraining", cases=LOADS, sample=1, quick=LOADS[:2], bound={"p99_of_target": 1.0, "lost_throughput": 0.35})
def tokens_come_within_the_target(load: Load) -> dict[str, float]:
    """99th percentile of the time between tokens over the target, on a simulated clock whose steps vary by 5%; and the
    share of an idle engine's fine-tuning throughput that is lost to the requests.
    """
    one = deployment(
        "h100:1x1", model=llama3_8b().model, max_sequences=64, max_batched_tokens=1024, max_len=9000, pages=8000,
        page_size=16,
    )  # fmt: skip
    trace = make_trace(load.arrivals, lengths=load.lengths, count=load.count, seed=1)
    alone = serve_trace(one, trace, target=load.target, chunk=load.chunk, finetune=False)
    found = serve_trace(one, trace, target=load.target, chunk=load.chunk)
    assert alone.p99 < load.target
    print(
        f"{load}: p99 {alone.p99 * 1e3:.1f} ms alone, {found.p99 * 1e3:.1f} ms beside fine-tuning, which keeps "
        f"{found.share:.1%} of its throughput; {found.squeezed} steps had no room"
    )
    return {"p99_of_target": found.p99 / load.target, "lost_throughput": 1 - found.share}
