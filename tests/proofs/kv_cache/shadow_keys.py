"""ShadowKV: its definition, the full cache at full rank, bytes on the device and on the host, and what it costs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from jaxllm.data import corpus
from jaxllm.infer import LLM, EngineConfig, SamplingParams
from jaxllm.infer.kv_cache_options import with_kv_cache
from pallas_kernels.paged_attention.kv_formats import KV_FORMATS
from pallas_kernels.paged_attention.shadow.shadow_format import ShadowFormat
from tests import environment
from tests.infer import engines
from tests.proofs.harness import proof
from tests.seams.dense_reference import DenseReference, error
from tests.seams.shadow_reference import ShadowReference

WAYS = [
    (way, model)
    for way, models in {
        "tight, recompute": ("llama", "qwen2", "gpt2", "gemma2"),
        "roomy": ("smollm2", "gemma3", "gpt_oss", "mixtral"),
        "layers apart": ("llama", "qwen3"),
    }.items()
    for model in models
]
"""(way to serve, model)."""


@proof("kv_cache", cases=WAYS, sample=1, float64=True, bound={"whole": 1e-10, "chosen": 1e-10})
def shadow_in_every_way(case: tuple[str, str]) -> dict[str, float]:
    """Random traffic: full rank and all chunks are the training forward; few of both are a masked dense attention.

    However prompts are split, and whatever is preempted; every page comes back.
    """
    way, model = case
    rng = np.random.default_rng([*way.encode(), *model.encode()])
    page, config, worst = engines.ENGINES[way].page_size or 0, engines.model_of(model, "float64"), {}
    layer: Any = config.blocks[0].attention
    channels = layer.kv_heads * layer.head_dim
    for name, form in (
        ("whole", ShadowFormat(min(page, channels), engines.LONGEST, 1, 6, 2)),
        ("chosen", ShadowFormat(3, 6, 1, 6, 2)),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(KV_FORMATS, "small", form)
            sizes = dataclasses.replace(engines.ENGINES[way], prefix_cache=False, kv_dtype="small")
            engine = engines.build(sizes, model, "float64", apart=way == "layers apart")
            asked = engines.traffic(rng, sizes, 6)
            long = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0)
            asked += [{"prompt": rng.integers(0, engines.VOCAB, n).tolist(), "params": long} for n in (33, 21)]
            for one in asked:  # forks read the pages of their prompt as they are
                one["params"] = dataclasses.replace(one["params"], n=1, prompt_logprobs=None, logprobs=0)
            made = engines.serve(engine, asked)
        assert all(pages.available == pages.count for pages in engine.scheduler.pages)
        context: Any = DenseReference() if name == "whole" else ShadowReference(form, page, layer.rope)
        worst[name] = error(model, context, made)
        assert name == "whole" or error(model, DenseReference(), made) > 1e-4
    return worst


BYTES = [
    ("4,8,0", "llama", 8),
    ("8,16,1", "llama", 16),
    ("2,8,2", "gemma3", 32),
    ("6,8,1", "smollm2", 16),
]  # fmt: skip
"""(sizes of the format, model, positions of a page)."""


@proof("kv_cache", cases=BYTES, sample=1, bound={"device": 0.0, "host": 0.0, "programs": 0.0, "temporaries": 0.0})
def shadow_bytes(case: tuple[str, str, int]) -> dict[str, float]:
    """Engines that differ only in their pages: bytes of live arrays on the device and on the host, less the formula's.

    And those of both in the arguments of every program; growth of temporaries.
    """
    name, model, page = case
    rank, _, outliers = map(int, name.split(","))
    made = []
    for pages in (40, 90):
        sizes = EngineConfig(
            max_sequences=1, max_batched_tokens=8, max_len=64, page_size=page, pages=pages, buckets=(8,),
            samplers=("plain",), decode_steps=2, kv_dtype=f"shadowkv:{name}",
        )  # fmt: skip
        made.append(engines.build(sizes, model).runner)
    few, many = made
    config, device, host = engines.model_of(model, "float32"), 0, 0
    layer: Any = config.blocks[0].attention
    kv, dim = layer.kv_heads, layer.head_dim
    for group, before, after in zip(few.spec.groups, few.spec.pages, many.spec.pages, strict=True):
        rows = page // 8 + 2 * 8 * outliers + rank
        device += (after - before) * len(group.layers) * (4 * (page * rank + kv * rows * dim) + 4 * kv * outliers)
        host += (after - before) * len(group.layers) * 4 * kv * page * dim
    assert device > 0 < host
    held = [[x for pool in runner.pools for x in pool if x is not None] for runner in made]
    on_host = [sum(x.nbytes for x in own if x.sharding.memory_kind == "pinned_host") for own in held]
    on_device = [sum(x.nbytes for x in own) - there for own, there in zip(held, on_host, strict=True)]
    worst = {
        "device": abs(on_device[1] - on_device[0] - device), "host": abs(on_host[1] - on_host[0] - host),
        "programs": 0.0, "temporaries": 0.0,
    }  # fmt: skip
    for program in few.programs:
        if program.split("-")[0] in ("prompt", "decode"):
            before, after = (runner.programs[program].memory for runner in made)
            more = sum(
                getattr(after, name) - getattr(before, name)
                for name in ("argument_size_in_bytes", "host_argument_size_in_bytes")
            )
            worst["programs"] = max(worst["programs"], abs(more - device - host))
            grown = after.temp_size_in_bytes - before.temp_size_in_bytes
            worst["temporaries"] = max(worst["temporaries"], float(grown))
    return worst


ROW, CHUNK, PAGE = 512, 128, 128
"""Tokens of a text, of a chunk of prefill, and of a page of ShadowKV."""
CHOSEN, RECENT = "shadowkv:48,128,1", "window+sinks:381,4"
"""ShadowKV, and as many of the most recent tokens in full precision as take no fewer bytes of the device."""


@functools.cache
def engine_of(kv_format: str, kv_keep: str) -> LLM:
    """SmolLM2 with a KV cache."""
    sizes = EngineConfig(
        max_sequences=1, max_batched_tokens=CHUNK, max_len=ROW + 32, buckets=(CHUNK,), samplers=("full",),
        decode_steps=1, prefix_cache=False,
    )  # fmt: skip
    sizes = with_kv_cache(sizes, kv_format, kv_keep)
    sizes = dataclasses.replace(sizes, page_size=PAGE if sizes.values_on_host else sizes.page_size)
    return LLM("smollm2", sizes, manifest=environment.ROOT / ".cache" / "jaxllm" / "engine")


def nlls(llm: LLM, text: list[int]) -> list[float]:
    """Negative log-likelihood of each token of a prompt, but the first."""
    request = llm.engine.submit(text, SamplingParams(max_tokens=1, prompt_logprobs=0))
    while llm.engine.busy:
        llm.engine.step()
    return [-score for score, _ in request.text_scores]


@functools.cache
def quality(kv_format: str, kv_keep: str, seed: int) -> tuple[float, float, int]:
    """(mean NLL of the second half of a text, of the digits of pass keys hidden early, bytes on the device)."""
    llm, rng = engine_of(kv_format, kv_keep), np.random.default_rng(seed)
    ids = llm.ids(corpus.path("heldout").read_text("utf-8")[: 8 * ROW * (seed + 1)])[seed * ROW :]
    assert len(ids) >= ROW
    keys, question = [], llm.ids("\nWhat is the pass key? The pass key is", add_special_tokens=False)
    for at in (8, 72):
        key = str(rng.integers(10_000, 100_000))
        text = f" The pass key is {key}. Remember it. {key} is the pass key.\n"
        needle, answer = (llm.ids(x, add_special_tokens=False) for x in (text, f" {key}"))
        hay = ids[: ROW - len(needle) - len(question) - len(answer)]
        found = nlls(llm, [*hay[:at], *needle, *hay[at:], *question, *answer])
        keys += found[1 - len(answer) :]
    spec = llm.engine.runner.spec
    held = sum(group.sequence_bytes(ROW, spec.page_size) for group in spec.groups)
    return float(np.mean(nlls(llm, ids[:ROW])[ROW // 2 :])), float(np.mean(keys)), held


@proof("kv_cache", cases=[0, 1, 2], sample=1, bound={"text": 0.02, "keys": 1.0})
def chosen_chunks_find_keys(seed: int) -> dict[str, float]:
    """SmolLM2 on plays, another text for each seed: relative growth of the text's NLL over the full cache's.

    And that of early pass keys, by that with the most recent tokens alone, which take no fewer bytes of the device.
    """
    full, full_key, whole = quality("auto", "all", seed)
    own, own_key, held = quality(CHOSEN, "all", seed)
    _, other_key, theirs = quality("auto", RECENT, seed)
    assert held <= theirs < whole
    assert other_key > full_key
    return {"text": max(0.0, own / full - 1), "keys": (own_key - full_key) / (other_key - full_key)}
