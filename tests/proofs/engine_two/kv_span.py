"""Pages of one request spread over devices (DistAttention): drawn engines, bytes, contexts beyond one device's pool."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from jaxllm.infer import EngineConfig, SamplingParams
from tests.infer import engines, meshes
from tests.proofs.engine.programs import Compilations
from tests.proofs.harness import proof

MESHES = (
    "context=2",
    "context=4",
    "context=8",
    "context=3",
    "context=2,tensor=2",
    "data=2,context=2",
    "fsdp=2,context=4",
)
MODELS = ("llama", "smollm2", "mistral", "qwen3", "gemma2", "gpt2", "olmo2", "wide", "mixtral", "gpt_oss")
WAYS = ("roomy", "tight, recompute", "tight, swap", "contiguous", "layers apart", "one after the other")


@st.composite
def spanned(draw: st.DrawFn) -> tuple[int, str, str, str, dict[str, Any]]:
    """Seed, model, mesh, engine, its further sizes."""
    model = draw(st.sampled_from(MODELS))
    heads = {block.attention.heads for block in engines.model_of(model, "float64").blocks}
    mesh = draw(st.sampled_from([one for one in MESHES if "tensor" not in one or all(n % 2 == 0 for n in heads)]))
    way = draw(st.sampled_from(WAYS))
    fields: dict[str, Any] = {"speculate": draw(st.sampled_from([None, None, None, "ngram:2"]))}
    return draw(st.integers(0, 2**31)), model, mesh, way, fields


def over(mesh: str, way: str, **fields: Any) -> EngineConfig:
    """The sizes of an engine whose replicas have about the pages that its devices have without a span."""
    config, devices = engines.ENGINES[way], int(mesh.partition("context=")[2][0])
    assert config.pages is not None
    return dataclasses.replace(config, kv_span=True, pages=-(-config.pages // devices), **fields)


@proof("engine_two", count=30, chunk=10, sample=1, strategy=spanned(), float64=True, bound=1e-10)
def spans_are_one_device(case: tuple[int, str, str, str, dict[str, Any]]) -> float:
    """Random traffic in pages that are spread over devices, less the training forward's on one device."""
    seed, model, mesh, way, fields = case
    config = over(mesh, way, **fields)
    engine, heard = meshes.over(mesh, model, config, "float64", apart=way == "layers apart"), Compilations()
    asked = engines.traffic(np.random.default_rng(seed), config, 10)
    with heard:
        made = engines.serve(engine, asked)
    assert heard.names == []
    return engines.error(model, "float64", made)


@proof("engine_two", cases=[2, 4, 8], sample=1, bound={"bytes": 0, "error": 1e-10, "reach": 1.0}, float64=True)
def spans_hold_more_than_a_device(devices: int) -> dict[str, float]:
    """A sequence of 64 tokens, where a device has pages for fewer: the log-probabilities of the training forward, the
    bytes of a device's pages less 1 / N of those of the same pages on one device, tokens that a device has pages for
    over those of the sequence. The same pool without a span is refused.
    """
    sizes = EngineConfig(
        max_sequences=2, max_batched_tokens=16, buckets=(16,), page_size=4, pages=-(-18 // devices), max_len=64,
        samplers=("full",), top_logprobs=3, decode_steps=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"pages = {sizes.pages}, but one sequence of 64 tokens needs 17"):
        meshes.over(f"context={devices}", "llama", sizes, "float64")
    engine = meshes.over(f"context={devices}", "llama", dataclasses.replace(sizes, kv_span=True), "float64")
    prompt = np.random.default_rng(devices).integers(0, engines.VOCAB, 40).tolist()
    asked = {"prompt": prompt, "params": SamplingParams(max_tokens=24, temperature=0.7, seed=1, logprobs=3)}
    (made,) = engines.serve(engine, [asked])
    (sequence,) = made.sequences
    assert len(sequence.tokens) == 64
    wrong = 0.0
    for group, pool in zip(engine.runner.spec.groups, engine.runner.pools, strict=True):  # type: ignore[attr-defined]
        shards = [x.data.nbytes for x in pool.data.addressable_shards]
        pages = pool.data.shape[1]
        assert pages == sizes.pages * devices  # type: ignore[operator]
        wrong += sum(abs(one - pages * group.page_bytes(4) / devices) for one in shards)
    assert sizes.pages is not None
    return {"bytes": wrong, "error": engines.error("llama", "float64", [made]), "reach": sizes.pages * 4 / 64}


@proof("engine_two", cases=["int8", "fp8", "bfloat16"], sample=1, float64=True, bound=1e-6)
def spans_of_formats(kv_dtype: str) -> float:
    """Random traffic in quantised pages that are spread over four devices: tokens are those of one device, and
    log-probabilities less its.
    """
    config = over("context=4", "tight, swap", kv_dtype=kv_dtype)
    asked = engines.traffic(np.random.default_rng(7), config, 8)
    asked = [one | {"cancel": None} for one in asked]
    spread = engines.serve(meshes.over("context=4", "llama", config, "float64"), asked)
    alone = dataclasses.replace(engines.ENGINES["tight, swap"], kv_dtype=kv_dtype)
    whole = engines.serve(engines.build(alone, "llama", "float64"), asked)
    worst = 0.0
    for a, b in zip(spread, whole, strict=True):
        for x, y in zip(a.sequences, b.sequences, strict=True):
            assert x.tokens == y.tokens
            worst = max(worst, float(np.abs(np.subtract(x.logprobs, y.logprobs)).max(initial=0)))
    return worst
