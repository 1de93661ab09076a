"""ShadowKV in the engine: equal numbers however it serves, values in host memory, bytes, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxllm.infer import Engine, EngineConfig, SamplingParams
from jaxllm.infer.kv_cache_options import with_kv_cache
from jaxllm.infer.runner.paged_cache import layer_groups
from jaxllm.infer.runner.serving_mesh import check_mesh
from jaxllm.infer.scheduling.prefix_cache import prefix_salt
from jaxllm.plan.formulas.engine_memory import slot_bytes
from jaxllm.serve.backend import describe
from pallas_kernels.paged_attention.kv_formats import KV_FORMATS
from pallas_kernels.paged_attention.shadow.shadow_format import ShadowFormat
from sharding import ShardingError
from tests.infer import engines, meshes
from tests.seams.dense_reference import DenseReference, error
from tests.seams.shadow_reference import ShadowReference

FORM = ShadowFormat(rank=3, tokens=6, outliers=1, residual=6, chunk=2)


@pytest.fixture
def small(monkeypatch) -> str:
    """A format that the tiny models' sequences fill."""
    monkeypatch.setitem(KV_FORMATS, "small", FORM)
    return "small"


def reference(model: str, page_size: int) -> ShadowReference:
    layer: Any = engines.model_of(model, "float64").blocks[0].attention
    return ShadowReference(FORM, page_size, layer.rope)


def served(engine: Engine, rng: np.random.Generator, many: int = 4) -> list[Any]:
    """Random traffic without forks, whose prompts' pages are read as they are, and long completions."""
    asked = [
        one | {"params": dataclasses.replace(one["params"], n=1, prompt_logprobs=None, logprobs=0)}
        for one in engines.traffic(rng, engine.config, many)
    ]
    long = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0)
    asked += [{"prompt": rng.integers(0, engines.VOCAB, n).tolist(), "params": long} for n in (33, 21, 38)]
    return engines.serve(engine, asked)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(("way", "model"), [("tight, recompute", "llama"), ("roomy", "gemma3")])
def test_as_the_reference(way, model, small, rng, float64):
    """However prompts are split and sequences preempted: dense attention that masks what a query has not chosen."""
    sizes = dataclasses.replace(engines.ENGINES[way], kv_dtype=small, prefix_cache=False)
    made = served(engines.build(sizes, model, "float64"), rng)
    assert error(model, reference(model, sizes.page_size or 0), made) <= 1e-10
    assert error(model, DenseReference(), made) > 1e-4


@pytest.mark.drawn(0.5)
def test_prefixes(small, rng, float64):
    """A second request finds the first one's pages, those behind the window; their values are in host memory."""
    sizes = dataclasses.replace(engines.ENGINES["roomy"], kv_dtype=small, max_sequences=1)
    engine = engines.build(sizes, "llama", "float64")
    prompt = rng.integers(0, engines.VOCAB, 40).tolist()
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0)
    first, second = (engines.serve(engine, [{"prompt": prompt, "params": params}])[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)  # (40 + 3 - 6) // 8 pages of 8
    assert np.isfinite(second.sequences[0].logprobs).all()
    (pool,) = engine.runner.pools
    assert pool.data.sharding.memory_kind == "pinned_host"
    assert {x.sharding.memory_kind for x in (pool.keys, pool.factors, pool.recent)} != {"pinned_host"}


@pytest.mark.drawn(3)
def test_bytes(small):
    """Live arrays on the device and on the host are the formula's, and the report's."""
    sizes = dataclasses.replace(engines.ENGINES["roomy"], kv_dtype=small, max_sequences=1, samplers=("plain",))
    engine = engines.build(sizes)
    (pool,), (group,), pages = engine.runner.pools, engine.runner.spec.groups, engine.runner.spec.pages[0]
    # Of 2 layers: coefficients of 8 tokens; 4 landmarks, 2 x 2 outlier rows and 3 of the basis for 2 heads of 8.
    own = 2 * (4 * (8 * 3 + 2 * (4 + 4 + 3) * 8) + 2 * 4)
    assert group.page_bytes(8) == own
    assert group.host_page_bytes(8) == 2 * 4 * 2 * 8 * 8
    assert pool.keys.nbytes + pool.factors.nbytes + pool.channels.nbytes == pages * own
    assert pool.data.nbytes == pages * group.host_page_bytes(8)
    ring = 2 * 2 * (6 + 8) * 16 * 4
    assert group.sequence_bytes(50, 8) == 5 * own + ring  # 44 // 8 whole pages behind the window
    found = describe(engine)["cache"]
    assert found["host_bytes"] == pool.data.nbytes
    assert found["bytes"] == pages * own + pool.recent.nbytes


def test_options_of_commands():
    config = with_kv_cache(EngineConfig(), "shadowkv:16,64,0")
    assert (config.kv_dtype, config.page_size, config.prefix_cache) == ("shadowkv:16,64,0", 256, True)
    assert with_kv_cache(EngineConfig(), "kivi4").page_size == 32
    salts = {prefix_salt(with_kv_cache(EngineConfig(), kv)) for kv in ("shadowkv", "shadowkv:16", "kivi4")}
    assert len(salts) == 3
    with pytest.raises(ValueError, match=r"kv_dtype = 'shadow'; legal: .*'shadowkv'"):
        with_kv_cache(EngineConfig(), "shadow")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"speculate": "ngram:2"}, "speculate = 'ngram:2'"),
        ({"verify_tokens": 2}, "verify_tokens = 2"),
        ({"head_clusters": 2}, "head_clusters = 2"),
        ({"layer_window": 1}, "layer_window = 1"),
        ({"stages": 2}, "stages = 2"),
        ({"kv_host_gib": 1.0}, "kv_host_gib and kv_disk"),
        ({"preemption": "swap"}, "preemption = 'swap'"),
        ({"pools": "prefill=x1, decode=x1"}, "pools"),
        ({"chunk_cache": True}, "chunk_cache"),
        ({"two_phase": True}, "two_phase"),
        ({"retention": "window+sinks", "prefix_cache": False}, "retention"),
    ],
)
def test_what_it_does_not_go_with(fields, why):
    with pytest.raises(ValueError, match=why):
        EngineConfig(kv_dtype="shadowkv", **fields)


def test_what_engines_refuse(small):
    sizes = dataclasses.replace(engines.ENGINES["roomy"], kv_dtype=small, samplers=("plain",))
    with pytest.raises(ShardingError, match="with values in host memory is for one device"):
        meshes.over("tensor=2", "llama", sizes)
    with pytest.raises(ShardingError, match=r"is not for TPUs.*use kivi4"):
        check_mesh(None, values_on_host=True, platform="tpu")
    with pytest.raises(ValueError, match="not for MLA latents; use int8 or int4"):
        engines.build(sizes, "deepseek_v3")
    for kv, why in (("shadowkv:9", "a rank of 8 at most"), ("shadowkv:8", "has 1 chunks; give fewer outliers")):
        with pytest.raises(ValueError, match=why):
            engines.build(dataclasses.replace(sizes, kv_dtype=kv))
    (group,) = layer_groups(engines.model_of("llama", "float32"), "shadowkv")
    with pytest.raises(ValueError, match="which formulas leave out; use int4"):
        slot_bytes(group.kv_spec, group.dtype, 1, "gpu")
    with pytest.raises(ValueError, match="needs a page_size that is a multiple of 8, not 4"):
        engines.build(dataclasses.replace(sizes, kv_dtype="shadowkv:4,8,0", page_size=4))
