"""Many adapters over one base: rows of each are as that adapter alone; slots, pages and revisions keep their books."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.infer import AdapterCatalogue, AdapterNotFoundError, Engine, EngineConfig, SamplingParams
from jaxllm.infer.adapter_catalogue import KEPT_REVISIONS
from jaxllm.infer.runner.adapter_pool import PackedAdapter
from jaxllm.infer.runner.paged_cache import LayerGroup
from jaxllm.infer.scheduling.adapter_slots import AdapterSlots
from jaxllm.infer.scheduling.policies import Fair, Job, Service, View
from jaxllm.infer.speculate.ngram import NgramProposer
from jaxllm.models.attention_context import KVSpec
from jaxllm.peft import AdapterError
from pallas_kernels.grouped_lora import PAGE_RANKS
from tests.infer import adapters, engines
from tests.infer.adapters import RANKS, check_slots, drawn, merged
from tests.infer.paper import PaperRunner

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, ignore_eos=True)


@functools.cache
def served() -> Engine:
    """Three slots, and six adapters in the catalogue."""
    engine = engines.build(adapters.SIZES, "llama", "float64")
    for n, rank in enumerate(RANKS):
        engine.load_adapter(f"a{n}", drawn("llama", n, rank))
    return engine


@pytest.fixture
def engine(float64: None) -> Iterator[Engine]:
    engine = served()
    late = engine.runner.program_cache.counts.late  # type: ignore[union-attr]
    yield engine
    assert not engine.busy
    check_slots(engine)
    assert engine.runner.program_cache.counts.late == late == 0  # type: ignore[union-attr]


def run(engine: Engine, *asked: tuple[list[int], str | None], params: SamplingParams = GREEDY) -> list[Any]:
    requests = [engine.submit(prompt, params, adapter=name) for prompt, name in asked]
    while engine.busy:
        engine.step()
        engines.check_books(engine)
        check_slots(engine)
    return requests


def tokens(request: Any) -> list[int]:
    return request.sequences[0].tokens


@pytest.mark.drawn(0.3)
def test_a_mixed_batch_is_each_adapter_alone(engine, rng):
    """Six adapters of ranks 4 to 64 and the base share steps over three slots, so some wait and some are evicted."""
    prompt, before = rng.integers(0, engines.VOCAB, 11).tolist(), engine.adapter_slots.evictions
    order = [*range(len(RANKS)), None, 2, 0]
    requests = run(engine, *(([*prompt, i], None if n is None else f"a{n}") for i, n in enumerate(order)))
    for n, request in zip(order, requests, strict=True):
        params = engines.params_of("llama", "float64") if n is None else merged("llama", "float64", n, RANKS[n])
        assert engines.error("llama", "float64", [request], params) < 1e-10
    assert engine.adapter_slots.evictions >= before + 3


@pytest.mark.drawn(0.2)
def test_latent_attention_serves_adapters(float64, rng):
    """An adapter beside the base; steps absorb the adapted up-projection of keys and values."""
    engine = engines.build(dataclasses.replace(adapters.SIZES, decode_steps=1), "deepseek_v3", "float64")
    engine.load_adapter("a0", drawn("deepseek_v3", 0, RANKS[0]))
    prompt = rng.integers(0, engines.VOCAB, 21).tolist()
    one, base = run(engine, (prompt, "a0"), (prompt, None))
    assert engines.error("deepseek_v3", "float64", [one], merged("deepseek_v3", "float64", 0, RANKS[0])) < 1e-10
    assert engines.error("deepseek_v3", "float64", [base], engines.params_of("deepseek_v3", "float64")) < 1e-10
    assert abs(one.sequences[0].logprobs[0] - base.sequences[0].logprobs[0]) > 1e-3


@pytest.mark.drawn(0.2)
def test_drafts_are_verified_with_the_adapter(float64):
    """N-gram proposals in a batch of two adapters and the base: each is as that adapter alone."""
    sizes = dataclasses.replace(adapters.SIZES, verify_tokens=3, decode_steps=1)
    engine = engines.build(sizes, "llama", "float64", proposer=NgramProposer())
    for n in range(2):
        engine.load_adapter(f"a{n}", drawn("llama", n, RANKS[n]))
    params = dataclasses.replace(GREEDY, max_tokens=16, logit_bias={7: 9.0, 8: 9.0})
    requests = run(engine, ([7, 8, 7, 8, 9], "a0"), ([7, 8, 9, 7, 8], "a1"), ([9, 7, 8, 7, 8], None), params=params)
    for n, request in zip((0, 1, None), requests, strict=True):
        weights = engines.params_of("llama", "float64") if n is None else merged("llama", "float64", n, RANKS[n])
        assert engines.error("llama", "float64", [request], weights) < 1e-10
    assert engine.metrics.accepted_tokens > 0


def test_the_prefix_cache_knows_adapters(engine, rng):
    """The same prompt by two adapters and the base shares no page; by the same adapter it does."""
    prompt, scheduler = rng.integers(0, engines.VOCAB, 24).tolist(), engine.scheduler
    for name, hits in ((None, 0), ("a0", 0), ("a1", 0), ("a0", 16), (None, 16)):
        before = scheduler.hit_tokens
        (request,) = run(engine, (prompt, name))
        assert scheduler.hit_tokens - before >= hits
        assert (scheduler.hit_tokens == before) == (hits == 0)
        params = merged("llama", "float64", int(name[1]), RANKS[int(name[1])]) if name else engines.params_of(
            "llama", "float64"
        )  # fmt: skip
        assert engines.error("llama", "float64", [request], params) < 1e-10


def test_revisions_are_swapped_in_and_rolled_back(engine, rng):
    """A request keeps its revision; the next has the new one; after a rollback outputs are the former ones exactly.

    The prompt is shorter than a page, so that no prefix is found, which would change the bits.
    """
    prompt = rng.integers(0, engines.VOCAB, 7).tolist()
    engine.load_adapter("rolled", drawn("llama", 10, 8))
    first = run(engine, (prompt, "rolled"))[0]
    running = engine.submit(prompt, dataclasses.replace(GREEDY, max_tokens=20), adapter="rolled")
    for _ in range(3):
        engine.step()
    engine.swap(adapter={"rolled": drawn("llama", 11, 16)})
    second = run(engine, (prompt, "rolled"))[0]
    assert engines.error("llama", "float64", [running], merged("llama", "float64", 10, 8)) < 1e-10
    assert engines.error("llama", "float64", [second], merged("llama", "float64", 11, 16)) < 1e-10
    assert engine.rollback_adapter("rolled").number == 1
    third = run(engine, (prompt, "rolled"))[0]
    assert tokens(third) == tokens(first) == tokens(running)[: len(prompt) + 8]
    np.testing.assert_array_equal(third.sequences[0].logprobs, first.sequences[0].logprobs)
    with pytest.raises(ValueError, match=r"'rolled' has one revision \(1\), and none to go back to"):
        engine.rollback_adapter("rolled")
    engine.unload_adapter("rolled")
    with pytest.raises(AdapterNotFoundError, match="no adapter 'rolled' among 6"):
        engine.submit(prompt, GREEDY, adapter="rolled")


def test_a_swap_of_the_base_keeps_adapters(engine, rng):
    """Weights of the base are replaced under the pool of adapters."""
    prompt = rng.integers(0, engines.VOCAB, 9).tolist()
    (first,) = run(engine, (prompt, "a0"))
    base = jax.tree.map(jax.numpy.copy, engine.runner.params)
    engine.swap(jax.tree.map(lambda x: x * 1.1, base))
    (other,) = run(engine, (prompt, "a0"))
    engine.swap(base)
    (again,) = run(engine, (prompt, "a0"))
    assert tokens(again) == tokens(first)
    assert other.sequences[0].logprobs != first.sequences[0].logprobs


def test_what_cannot_be_served_is_named_and_changes_nothing(engine, tmp_path, rng):
    adapter, names = drawn("llama", 0, 4), engine.adapters.names
    path = next(iter(adapter.factors))
    wide = dataclasses.replace(adapter.factors[path], a=np.zeros((2, 7, 4)))
    for bad, why in {
        "rank": (drawn("llama", 1, 80), "rank 80; this engine takes 1 to 64: set adapter_rank"),
        "dora": (dataclasses.replace(adapter, magnitudes={path: np.ones((2, 4, 8))}), "the magnitudes of dora"),
        "modules": (dataclasses.replace(adapter, modules={"head/norm/gain": np.ones(16)}), r"whole weights \(head"),
        "shape": (dataclasses.replace(adapter, factors={path: wide}), "it is an adapter of another base"),
        "target": (dataclasses.replace(adapter, factors={"segments/0/0/x": wide}), "which this model lacks"),
        "disk": (tmp_path, "reads no adapters from disk"),
    }.values():  # fmt: skip
        with pytest.raises(AdapterError, match=why):
            engine.load_adapter("bad", bad)
        with pytest.raises(AdapterError, match=why):
            engine.swap(adapter={"a0": drawn("llama", 7, 4), "bad": bad})
    with pytest.raises(ValueError, match="the adapter name ' a' is not legal"):
        engine.load_adapter(" a", adapter)
    assert engine.adapters.names == names
    assert engine.adapters.find("a0").number == 1
    # One that is found to be unreadable when it is needed ends its requests, and no others.
    engine.adapters.add("lost", tmp_path)
    prompt = rng.integers(0, engines.VOCAB, 5).tolist()
    lost, fine = run(engine, (prompt, "lost"), (prompt, "a1"))
    assert lost.sequences[0].finish == "error"
    assert "the adapter 'lost' cannot be loaded" in str(lost.failure)
    assert fine.sequences[0].finish == "length"
    with pytest.raises(AdapterError, match="'lost' cannot be loaded"):
        engine.submit(prompt, GREEDY, adapter="lost")
    engine.unload_adapter("lost")


def test_engines_without_slots_say_so():
    config, groups = engines.ENGINES["roomy"], (LayerGroup(KVSpec(1, 1, 1), None, (0,)),)
    engine = Engine(PaperRunner(config, groups, 20), config, engines.VOCAB)
    with pytest.raises(ValueError, match="serves no adapters: build it with adapter_slots"):
        engine.submit([1], GREEDY, adapter="x")
    for fields, why in {
        ("adapter_slots", -1): "give 0",
        ("adapter_rank", 300): "1 to 256",
        ("adapter_page_ranks", 0): "1 to 256, such as 16",
        ("adapter_pages", 3): "at least the 4 pages that one adapter of rank 64 takes",
    }.items():
        with pytest.raises(ValueError, match=why):
            EngineConfig(**dict([fields]))
    assert EngineConfig(adapter_slots=2, adapter_rank=PAGE_RANKS + 1).pages_of_adapters == 4


def packed(pages: int) -> PackedAdapter:
    return PackedAdapter(((np.zeros(1),),) * pages, 1.0)


def test_slots_and_pages_are_evicted_least_recently_used_first():
    """An adapter that a sequence uses, or that another waits for, stays; one page too few evicts as many as needed."""
    catalogue, written = AdapterCatalogue(), []
    slots = AdapterSlots(3, 4, 5, lambda revision: packed(revision.source.rank), lambda page, _: written.append(page))
    made = {}
    for name, pages in (("a", 1), ("b", 2), ("c", 2), ("d", 4), ("e", 1)):
        made[name] = catalogue.add(name, Path(name))
        slots.keep(made[name], packed(pages))
    slots.prepare([made["a"], made["b"], made["c"]])
    assert (slots.resident, sorted(written)) == (3, [0, 1, 2, 3, 4])
    assert slots.pin(made["b"])
    assert not slots.pin(made["d"])  # needs four pages; b keeps two
    assert slots.resident == 3
    assert slots.pin(made["e"])  # in the place of a, which was used before c
    assert made["a"].id not in slots._resident
    slots.unpin(made["b"])
    slots.unpin(made["e"])
    assert slots.pin(made["d"])
    assert set(slots._resident) == {made["d"].id, made["e"].id}
    assert slots.tables[slots.slot(made["d"])].min() >= 0


def test_a_catalogue_keeps_some_revisions():
    catalogue = AdapterCatalogue()
    for _ in range(KEPT_REVISIONS + 3):
        catalogue.add("a", Path("a"))
    numbers = [catalogue.find("a").number, *(catalogue.rollback("a").number for _ in range(KEPT_REVISIONS - 1))]
    assert numbers == list(range(KEPT_REVISIONS + 3, 3, -1))
    with pytest.raises(ValueError, match="one revision"):
        catalogue.rollback("a")
    removed = catalogue.remove("a")
    assert [one.number for one in removed] == [4]
    assert catalogue.add("a", Path("b")).number == KEPT_REVISIONS + 4  # a revision never comes twice


def test_fair_sharing_counts_adapters_of_a_key_apart():
    served = {"k": 0.0, "k x": 50.0, "k y": 5.0}
    jobs = [
        Job(n, 0.0, [1, 2], service=Service(key="k", adapter=adapter)) for n, adapter in enumerate(("x", "x", "y", ""))
    ]
    assert Fair().order(View(0.0, jobs, served)) == [3, 2, 0, 1]
