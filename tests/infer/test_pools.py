"""Disaggregated pools: what the argument says, what is refused, which pages move, and that all of them come back."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.cli.main import main
from jaxllm.config import ConfigError
from jaxllm.infer import LLM, AsyncEngine, Engine, EngineConfig, Grammar, LoadedModel, SamplingParams
from jaxllm.infer.embedder import Embedder
from jaxllm.infer.pools.page_transfer import PageTransfer
from jaxllm.infer.pools.phase_runner import counted
from jaxllm.infer.pools.pool_argument import PoolSizes
from jaxllm.infer.pools.pooled_runner import PooledRunner
from jaxllm.models import functional
from jaxllm.posttrain.coserve.finetune_run import check_engine
from jaxllm.serve.backend import EngineBackend, describe
from jaxllm.text import ByteTokenizer
from tests import quick
from tests.infer import engines, meshes
from tests.infer.test_verification import equal, plainly_sampled

SMALL = dataclasses.replace(engines.ENGINES["tight, recompute"], max_sequences=2, max_batched_tokens=8, buckets=(8,))
MODEL = "bytes"
POOLS = "prefill=tensor:1, decode=tensor:2"
PAGE = 2 * 2 * 2 * 8 * 4 * 8
"""Bytes of a page: keys and values, layers, kv heads, head dim, slots, float64."""


@functools.cache
def both() -> tuple[Engine, Engine]:
    """A colocated engine, and pools; others may have used them."""
    configs = SMALL, dataclasses.replace(SMALL, pools=POOLS)
    plain, apart = (engines.build(config, MODEL, "float64", tokenizer=ByteTokenizer()) for config in configs)
    return plain, apart


def asked(*prompts: list[int], tokens: int = 6, **fields: Any) -> list[dict[str, Any]]:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, seed=0, ignore_eos=True, **fields)
    return [{"prompt": prompt, "params": params} for prompt in prompts]


def moved(engine: Engine, requests: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Pages and bytes that requests moved, and pages that they shared."""
    assert engine.pools is not None
    metrics, shared = dataclasses.replace(engine.metrics), engine.pools.shared_pages
    engines.serve(engine, requests)
    pages, bytes_ = (getattr(engine.metrics, n) - getattr(metrics, n) for n in ("moved_pages", "moved_bytes"))
    return pages, bytes_, engine.pools.shared_pages - shared


def test_the_argument_says_engines_and_devices():
    sizes = PoolSizes.parse("prefill=tensor:2 x3, decode=tensor:4")
    assert (sizes.prefill.tensor, sizes.prefill.engines, sizes.decode.tensor, sizes.decode.engines) == (2, 3, 4, 1)
    assert sizes.devices == 10
    assert PoolSizes.parse("decode = tensor:1 x2,prefill=tensor:1x1").decode.engines == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prefill", "cannot read 'prefill'; write them as"),
        ("prefill=tensor:2 y3, decode=tensor:1", "cannot read 'prefill=tensor:2 y3'"),
        ("prefill=tensor:2", "both pools are needed"),
        ("prefill=tensor:2, prefill=tensor:2", "'prefill' is given twice"),
        ("prefill=tensor:2, attention=tensor:2", "'attention' is no pool beside prefill and decode; give prefill"),
        ("prefill=data:2, decode=tensor:2", r"split over tensor, not over data; several engines \(xN\)"),
        ("prefill=tensor:2 x0, decode=tensor:2", "give prefill 1 or more engines and devices"),
    ],
)
def test_what_cannot_be_read_is_named(text, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(pools=text)


@pytest.mark.parametrize(
    "fields",
    [
        {"speculate": "ngram"},
        {"verify_tokens": 2},
        {"adapter_slots": 1},
        {"layer_window": 1},
        {"stages": 2},
        {"retention": "window+sinks", "prefix_cache": False},
        {"kv_dtype": "kivi4"},
        {"kv_host_gib": 1.0},
        {"kv_disk": "x"},
        {"batch_invariant": True, "preemption": "swap", "samplers": ("full",), "decode_steps": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_does_not_go_with_pools_is_named(fields):
    EngineConfig(**fields)
    with pytest.raises(ValueError, match=rf"{next(iter(fields))}.* does not go with pools = '{POOLS}'"):
        EngineConfig(pools=POOLS, **fields)


def test_meshes_and_devices_that_do_not_go_with_pools_are_named():
    config = dataclasses.replace(SMALL, pools=POOLS)
    with pytest.raises(ValueError, match=r"have meshes of their own, and mesh = .*leave it out"):
        meshes.over("tensor=2", MODEL, config)
    with pytest.raises(ValueError, match="need 20 devices, and there are 8"):
        engines.build(dataclasses.replace(SMALL, pools="prefill=tensor:4 x3, decode=tensor:4 x2"), MODEL)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--pools", POOLS, "--mesh", "tensor=2"), "leave --mesh out"),
        (("--pools", POOLS, "--offload", "device=1GiB"), "leave --offload out"),
        (("--pools", "prefill=tensor:9, decode=tensor:1"), "--pools: engine: pools = .* need 10 devices"),
        (("--pools", POOLS, "--speculate", "ngram"), "speculate = 'ngram' does not go with pools"),
    ],
)
def test_the_server_refuses_before_it_loads_a_model(capsys, options, words):
    assert main(["serve", "no-such-model", "--port", "0", *options]) == 2
    assert re.search(words, capsys.readouterr().err.replace("\n", " "))


def test_pages_travel_in_powers_of_two():
    assert [len(some) for some in counted(list(range(45)))] == [16, 16, 8, 4, 1]
    assert [page for some in counted(list(range(45))) for page in some] == list(range(45))


@pytest.mark.drawn(1)
def test_tokens_are_those_of_one_engine(rng, float64):
    plain, apart = both()
    requests = plainly_sampled(rng)
    want = engines.serve(plain, requests)
    equal(engines.serve(apart, requests), want)
    runner = apart.runner
    assert isinstance(runner, PooledRunner)
    assert [one.devices for one in runner.engines] == [(jax.devices()[0],), tuple(jax.devices()[1:3])]
    steps = {name.split("-")[0] for name in runner.programs}
    assert steps == {"give", "prompt", "take", "decode", "seat"}
    with pytest.raises(ConfigError, match="serve without --pools"):
        check_engine(apart, 8)


@pytest.mark.drawn(2)
def test_pages_move_once_by_the_formula(float64):
    """Of a prompt of 11 tokens in pages of 4 three move; what the decode pool has does not move again."""
    _, apart = both()
    first, second = list(range(20, 31)), list(range(20, 28))
    assert moved(apart, asked(first)) == (3, 3 * PAGE, 0)
    assert moved(apart, asked(first)) == (1, PAGE, 2)
    assert moved(apart, asked([*second, 3, 2, 1, 5, 6])) == (2, 2 * PAGE, 2)
    assert moved(apart, asked(second)) == (0, 0, 2), "whole pages alone: the next token begins another"
    assert moved(apart, asked([7, 7, 7, 7, 7], tokens=1)) == (0, 0, 0), "the prefill pool gives the only token"


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3, "prompt_logprobs": 1},
        {"beams": 2},
        {"grammar": Grammar.regex("(ab|c)+d"), "repetition_penalty": 1.5},
    ],
    ids=("completions", "beams", "grammar"),
)
def test_requests_of_every_kind_are_served(float64, fields):
    plain, apart = both()
    requests = [{"prompt": list(range(65, 78)), "params": SamplingParams(max_tokens=9, temperature=0.0, **fields)}]
    found = []
    for engine in (plain, apart):
        request = engine.submit(requests[0]["prompt"], requests[0]["params"])
        while engine.busy:
            engine.step()
            engines.check_books(engine)
        found.append(request)
    equal([found[1]], [found[0]])
    np.testing.assert_allclose(*([x for x, _ in one.prompt_scores] for one in found), rtol=0, atol=1e-12)


def test_pages_on_their_way_come_back_when_a_request_ends(float64, monkeypatch):
    """While its pages travel, a request is cancelled; another ends with its second token."""
    plain, apart = both()
    stop = engines.serve(plain, asked([5, 4, 3]))[0].sequences[0].tokens[4]
    pools = apart.pools
    assert pools is not None
    with monkeypatch.context() as patch:
        patch.setattr(PageTransfer, "has_arrived", False)
        request = apart.submit([1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=9))
        while not pools.decode[0].arriving:
            apart.step()
        assert list(pools.decode[0].arriving) == request.sequences
        engines.check_books(apart)
        apart.cancel(request)
        engines.check_books(apart)
        assert all(pages.available == pages.count for pages in pools.pages)
    (stopped,) = engines.serve(apart, asked([5, 4, 3], stop_ids=(stop,)))
    assert stopped.sequences[0].finish == "stop"


class Lagging:
    """Result of a step that, asked whether it is there, says no three times."""

    def __init__(self, value: Any):
        self.value, self.asked = value, 0

    def is_ready(self) -> bool:
        self.asked += 1
        return self.asked > 3

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value, dtype)


def test_steps_of_an_engine_land_in_order(float64, monkeypatch):
    """Also where one is done between two questions, and the step behind it too."""
    plain, apart = both()
    requests = asked([1, 2, 3, 4], [5, 6, 7, 8, 9], tokens=30)
    want = engines.serve(plain, requests)
    run, numbers = apart.runner.run, {0: itertools.count(), 1: itertools.count()}

    def lagging(*arguments: Any, engine: int) -> Any:
        result = jax.block_until_ready(run(*arguments, engine=engine))
        return result if next(numbers[engine]) % 2 else Lagging(result)

    monkeypatch.setattr(apart.runner, "run", lagging)
    equal(engines.serve(apart, requests), want)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_sequences_go_on(float64, rng, preemption):
    """Two sequences that come at once, and together need more pages than the decode pool has."""
    plain, apart = both()
    if preemption == "swap":
        config = dataclasses.replace(SMALL, pools=POOLS, preemption=preemption, samplers=("plain",))
        apart = engines.build(config, MODEL, "float64", tokenizer=ByteTokenizer())
    assert apart.pools is not None
    requests = asked(*(rng.integers(0, engines.VOCAB, 4).tolist() for _ in range(2)), tokens=56)
    want = engines.serve(plain, requests)
    before = sum(one.preemptions for one in apart.pools.decode)
    equal(engines.serve(apart, requests), want)
    assert sum(one.preemptions for one in apart.pools.decode) > before


def test_weights_are_swapped_in_all_engines(float64, rng):
    plain, apart = both()
    others = engines.params_of(MODEL, "float64", 5)
    prompt = rng.integers(0, engines.VOCAB, 9).tolist()
    found = []
    for engine in (plain, apart):
        engine.swap(others)
        found.append(engines.serve(engine, asked(prompt)))
        request = engine.submit(prompt, SamplingParams(max_tokens=30, temperature=0.0))
        while len(request.sequences[0].tokens) < 9 + 5:
            engine.step()
        engine.swap(engines.params_of(MODEL, "float64"))
        engines.check_books(engine)
        while engine.busy:
            engine.step()
        assert len(set(request.sequences[0].versions)) == 2
    equal(*found)
    with pytest.raises(ValueError, match="the weights have another structure"):
        apart.swap({})


@pytest.mark.drawn(0.5)
def test_a_loaded_model_is_where_decoding_is(float64, monkeypatch):
    """What embeds texts beside the engine finds weights and mesh of one device; the server's counters are there."""
    monkeypatch.setattr(jax, "jit", quick.jit)
    params, mesh = engines.params_of(MODEL, "float64"), jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    loaded = LoadedModel(
        functional(engines.model_of(MODEL, "float64")), params, ByteTokenizer(), None, mesh, 0, {}, None
    )
    config = dataclasses.replace(SMALL, pools="prefill=tensor:1, decode=tensor:1", samplers=("plain",))
    llm = LLM(loaded, config, manifest=None, background=False)
    assert len(llm.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].tokens) == 3
    ids = [5, 6, 7, 8]
    embedders = [Embedder(loaded.model, one.params, engines.LONGEST, one.mesh) for one in (loaded, llm.loaded)]
    np.testing.assert_allclose(*(one(ids, "mean") for one in embedders), atol=1e-6)
    load = EngineBackend(AsyncEngine(llm.engine), None, embedders[1]).load()
    moved = {name: load.counters[name] for name in ("kv_pages_moved", "kv_bytes_moved", "kv_pages_shared")}
    assert moved == {"kv_pages_moved": 2, "kv_bytes_moved": 2 * PAGE, "kv_pages_shared": 0}
    described = describe(llm.engine)
    assert [one["id"] for one in described["devices"]] == [0, 1]


@pytest.mark.drawn(0.5)
def test_several_engines_of_a_pool_serve(float64, rng):
    """Four engines; kv heads that are copied for each device of the prefill pool are sent once."""
    config = dataclasses.replace(SMALL, pools="prefill=tensor:4, decode=tensor:1 x2", samplers=("plain",))
    plain, _ = both()
    apart = engines.build(config, MODEL, "float64", tokenizer=ByteTokenizer())
    requests = [*asked([1, 2, 3, 4], [5, 6, 7, 8], tokens=20), *plainly_sampled(rng)]  # two at once
    want = engines.serve(plain, requests)
    equal(engines.serve(apart, requests), want)
    assert apart.pools is not None
    assert apart.metrics.moved_bytes == apart.metrics.moved_pages * PAGE
    assert all(pages.registered() for pages in apart.pools.pages), "every engine has computed something"
    first, second = [n % 7 for n in range(11)], [n % 5 + 3 for n in range(11)]
    assert moved(apart, asked(first, second, tokens=10))[2] == 0, "at once, so one in each decode engine"
    for prompt in (second, first, second, first):
        assert moved(apart, asked(prompt)) == (1, PAGE, 2), "the engine that has the whole pages gets it"
