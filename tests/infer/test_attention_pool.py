"""Attention pools: what the argument says, what is refused, where weights and pages are, and what travels."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cli.main import main
from jaxllm.config import ConfigError
from jaxllm.infer import LLM, AsyncEngine, Engine, EngineConfig, LoadedModel, SamplingParams
from jaxllm.infer.attention_pool.attention_seam import AttentionCall, attention_call
from jaxllm.infer.attention_pool.offloaded_runner import OffloadedRunner
from jaxllm.infer.attention_pool.transfer_bytes import transfer_bytes
from jaxllm.infer.embedder import Embedder
from jaxllm.infer.pools.pool_argument import AttentionPoolSizes, parse_pools
from jaxllm.models import functional
from jaxllm.models.attention_context import AttentionParams
from jaxllm.serve.backend import EngineBackend, describe
from jaxllm.text import ByteTokenizer
from sharding import ShardingError
from tests import quick
from tests.infer import engines, meshes
from tests.infer.test_verification import equal, plainly_sampled

SMALL = dataclasses.replace(engines.ENGINES["tight, recompute"], max_sequences=2, max_batched_tokens=8, buckets=(2, 8))
MODEL = "bytes"
POOLS = "model=tensor:2, attention=tensor:1"


@functools.cache
def both() -> tuple[Engine, Engine]:
    """A colocated engine, and one with an attention pool and halves; others may have used them."""
    configs = SMALL, dataclasses.replace(SMALL, pools=POOLS, overlap="nano")
    plain, apart = (engines.build(config, MODEL, "float64", tokenizer=ByteTokenizer()) for config in configs)
    return plain, apart


def runner_of(engine: Engine) -> OffloadedRunner:
    assert isinstance(engine.runner, OffloadedRunner)
    return engine.runner


def asked(*prompts: list[int], tokens: int = 6, **fields: Any) -> list[dict[str, Any]]:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, seed=0, ignore_eos=True, **fields)
    return [{"prompt": prompt, "params": params} for prompt in prompts]


def test_the_argument_says_devices_of_both_parts():
    assert parse_pools("attention = context:4,model=tensor:2") == AttentionPoolSizes(2, 4, "context")
    assert parse_pools(POOLS).devices == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("attention=tensor:2", 'both pools are needed; write them as "model=tensor:2'),
        ("attention=tensor:2, attention=tensor:2", "'attention' is given twice"),
        ("attention=tensor:2, prefill=tensor:2", "'attention' is no pool beside prefill and decode"),
        ("attention=tensor:2, other=tensor:2", "'other' is no pool beside model and attention"),
        ("model=tensor:2 x2, attention=tensor:2", "pools of one engine: leave xN out"),
        ("model=data:2, attention=tensor:2", "weights are split over tensor, not over data"),
        ("model=tensor:2, attention=data:2", r"split over tensor \(heads\) or context \(pages\), not over data"),
        ("model=tensor:0, attention=tensor:2", "give model 1 or more"),
    ],
)
def test_what_cannot_be_read_is_named(text, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig(pools=text)


@pytest.mark.parametrize(
    "fields",
    [
        {"speculate": "ngram"},
        {"adapter_slots": 1},
        {"layer_window": 1},
        {"stages": 2},
        {"retention": "window+sinks", "prefix_cache": False},
        {"kv_dtype": "kivi4"},
        {"kv_dtype": "bfp4"},
        {"kv_host_gib": 1.0},
        {"batch_invariant": True, "preemption": "swap", "samplers": ("full",), "decode_steps": 1},
        {"overlap": "iso"},
        {"two_phase": True},
        {"chunk_cache": True},
        {"head_clusters": 2},
        {"mla": "tpla"},
        {"kv_span": True},
    ],
    ids=lambda fields: "-".join(map(str, next(iter(fields.items())))),
)
def test_what_does_not_go_with_an_attention_pool_is_named(fields):
    EngineConfig(**fields)
    with pytest.raises(ConfigError, match=rf"(?=.*{next(iter(fields))})(?=.*pools = '{POOLS}').*not go with"):
        EngineConfig(pools=POOLS, **fields)
    EngineConfig(pools=POOLS, overlap="nano", phase_split="half", preemption="swap")


def test_meshes_devices_and_heads_that_do_not_go_are_named():
    with pytest.raises(ConfigError, match=r"mesh = .*leave it out"):
        meshes.over("tensor=2", MODEL, dataclasses.replace(SMALL, pools=POOLS))
    with pytest.raises(ConfigError, match="need 12 devices, and there are 8"):
        engines.build(dataclasses.replace(SMALL, pools="model=tensor:4, attention=tensor:8"), MODEL)
    with pytest.raises(ShardingError, match=r"4 heads and 2 of keys and values.*attention=tensor:3.*context:N"):
        engines.build(dataclasses.replace(SMALL, pools="model=tensor:2, attention=tensor:3"), MODEL)
    with pytest.raises(ShardingError, match="latent attention does not go with context=2"):
        engines.build(dataclasses.replace(SMALL, pools="model=tensor:1, attention=context:2"), "deepseek_v3")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--pools", POOLS, "--mesh", "tensor=2"), "leave --mesh out"),
        (("--pools", POOLS, "--overlap", "iso"), "give 'nano'"),
        (("--pools", "model=tensor:9, attention=tensor:1"), "--pools: engine: pools = .* need 10 devices"),
    ],
)
def test_the_server_refuses_before_it_loads_a_model(capsys, options, words):
    assert main(["serve", "no-such-model", "--port", "0", *options]) == 2
    assert re.search(words, capsys.readouterr().err.replace("\n", " "))


@pytest.mark.parametrize("times", [0, 2])
def test_layers_that_cannot_be_cut_are_named(times):
    """A layer that calls attention twice needs two cuts."""

    class Layer:
        pass

    class Block:
        attention = Layer()

        def __call__(self, x: Any, positions: Any, layer: Any, ctx: Any) -> Any:
            for _ in range(times):
                out, ctx = ctx.attend(layer, x, x, x, positions, AttentionParams(1.0))
                assert not out.any()
            return x, ctx

    with pytest.raises(ConfigError, match=f"Layer calls it {times} times"):
        attention_call(Block(), jnp.ones((1, 2, 3, 4)), jnp.zeros((1, 2), int), jnp.int32(0))
    x = jnp.ones((1, 2, 3, 4))
    assert AttentionCall(x, x, None, None, AttentionParams(1.0, latent=2)).value_dim == 2


@pytest.mark.drawn(1)
def test_tokens_are_those_of_one_engine(rng, float64):
    plain, apart = both()
    requests = [*plainly_sampled(rng), *asked([5, 6, 7, 8, 9], [1, 2], tokens=20, prompt_logprobs=1)]
    want, got = engines.serve(plain, requests), engines.serve(apart, requests)
    equal(got, want)
    np.testing.assert_allclose(*([s for s, _ in one[-1].prompt_scores] for one in (got, want)), rtol=0, atol=1e-12)


@pytest.mark.drawn(2)
def test_pages_are_on_the_attention_devices_alone(float64):
    runner, devices = runner_of(both()[1]), jax.devices()
    assert {d for x in jax.tree.leaves(runner.pools) for d in x.sharding.device_set} == {devices[2]}
    assert {d for x in jax.tree.leaves(runner.params) for d in x.sharding.device_set} == set(devices[:2])
    assert runner.devices == devices[:3]
    assert [one["id"] for one in describe(both()[1])["devices"]] == [0, 1, 2]
    names = {name.removeprefix("prompt-2-full-") for name in runner.programs if name.startswith("prompt-2-full")}
    assert names == {"begin", "pages", "attend-0", "attend-0-single", "turn-0.0-0.0", "end"}


def test_each_step_moves_the_formula(float64):
    """Of a prompt of 5 tokens and 6 of a completion: one step of 8 rows in two halves, 5 of 2 rows in two halves."""
    _, apart = both()
    runner, before = runner_of(apart), dataclasses.replace(runner_of(apart).transfers)
    engines.serve(apart, asked([9, 9, 9, 8, 7]))
    after = runner.transfers
    rows, layers, width = 8 + 5 * 2, 2, 8
    assert after.steps - before.steps == 6
    assert after.sent_bytes - before.sent_bytes == layers * width * rows * (4 + 2 + 2) * 8
    assert after.returned_bytes - before.returned_bytes == layers * width * rows * 4 * 8


def test_formulas_count_copies():
    """Heads that are fewer than devices go to several; with spread pages everything goes to all; sinks go too."""
    few, sinks, latent = (engines.model_of(name, "float32") for name in ("few kv heads", "gpt_oss", "deepseek_v3"))
    each = transfer_bytes(few, AttentionPoolSizes(1, 4), 10, 2)
    assert each == (10 * (16 * 4 + 2 * 4 * 4) * 2 * few.layers, 10 * 16 * 4 * 2 * few.layers)
    spread = transfer_bytes(few, AttentionPoolSizes(1, 4, "context"), 10, 2)
    assert spread == (4 * 10 * (16 * 4 + 2 * 2 * 4) * 2 * few.layers, each.returned)
    halves = transfer_bytes(sinks, AttentionPoolSizes(1, 2), 5, 4, halves=True)
    assert halves.sent == 3 * (6 * (4 * 8 + 2 * 2 * 8) + 2 * 4) * 4
    assert transfer_bytes(latent, AttentionPoolSizes(1, 2), 1, 4) == (3 * (4 * 12 + 2 * 12) * 4, 3 * 4 * 8 * 4)


def test_weights_are_swapped(float64, rng):
    plain, apart = both()
    others = engines.params_of(MODEL, "float64", 5)
    requests = asked(rng.integers(0, engines.VOCAB, 9).tolist())
    found = []
    for engine in (plain, apart):
        engine.swap(others)
        found.append(engines.serve(engine, requests))
        engine.swap(engines.params_of(MODEL, "float64"))
    equal(*found)
    equal(engines.serve(apart, requests), engines.serve(plain, requests))
    with pytest.raises(ValueError, match="the weights have another structure"):
        apart.swap({})


@pytest.mark.drawn(0.5)
def test_a_model_is_served_where_its_weights_are(float64, monkeypatch):
    """Pages are spread over two devices, and swapped; what embeds texts beside the engine finds the weights."""
    monkeypatch.setattr(jax, "jit", quick.jit)
    params, mesh = engines.params_of(MODEL, "float64"), jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    loaded = LoadedModel(
        functional(engines.model_of(MODEL, "float64")), params, ByteTokenizer(), None, mesh, 0, {}, None
    )
    config = dataclasses.replace(
        SMALL, pools="model=tensor:1, attention=context:2", preemption="swap", pages=9, samplers=("plain",)
    )
    llm = LLM(loaded, config, manifest=None, background=False)
    requests = asked([1, 2, 3, 4], [5, 6, 7, 8], tokens=56)
    equal(engines.serve(llm.engine, requests), engines.serve(both()[0], requests))
    assert llm.engine.scheduler.preemptions > 0
    embedders = [Embedder(loaded.model, one.params, engines.LONGEST, one.mesh) for one in (loaded, llm.loaded)]
    first, second = (one([5, 6, 7], "mean") for one in embedders)
    np.testing.assert_allclose(first, second, atol=1e-6)
    counters, moved = EngineBackend(AsyncEngine(llm.engine), None, embedders[1]).load().counters, runner_of(llm.engine)
    assert counters["attention_bytes_sent"] == moved.transfers.sent_bytes > 0
    assert counters["attention_bytes_returned"] == moved.transfers.returned_bytes > 0
