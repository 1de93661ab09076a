"""KV cache formats and retention rules as the engine serves them: equal numbers however, bytes, refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.kv_cache_options import with_kv_cache
from jaxllm.infer.runner.paged_cache import layer_groups, pool_sizes, retention_rule, with_whole_tiles
from jaxllm.infer.runner.retention.corm import Corm
from jaxllm.infer.runner.retention.pyramid import Pyramid
from jaxllm.infer.runner.retention.window_and_sinks import WindowAndSinks
from jaxllm.infer.scheduling.prefix_cache import prefix_salt
from jaxllm.serve.backend import describe
from pallas_kernels.paged_attention.channel_formats import KiviFormat
from pallas_kernels.paged_attention.kv_formats import KV_FORMATS
from sharding import ShardingError
from tests.infer import engines, meshes
from tests.seams.dense_reference import DenseReference, error
from tests.seams.score_reference import ScoreReference

SHORT = 6


@pytest.fixture
def short(monkeypatch) -> str:
    """KIVI with a window that the tiny models' sequences leave behind."""
    monkeypatch.setitem(KV_FORMATS, "short", KiviFormat(4, SHORT))
    return "short"


def difference(way: str, model: str, seed: int, **fields: Any) -> float:
    """Worst difference of random traffic from the same one after the other without prefixes; both in float64."""
    config = dataclasses.replace(engines.ENGINES[way], **fields)
    alone = dataclasses.replace(engines.ENGINES["one after the other"], kv_dtype=config.kv_dtype)
    alone = dataclasses.replace(alone, retention=config.retention, page_size=config.page_size)
    rng = np.random.default_rng(seed)
    # Forks of a request read its prompt's pages as they are, so what they read depends on when they begin.
    asked = [
        one | {"cancel": None, "params": dataclasses.replace(one["params"], n=1)}
        for one in engines.traffic(rng, config, 6)
    ]
    made, want = (engines.serve(engines.build(c, model, "float64"), asked) for c in (config, alone))
    worst = 0.0
    for one, two in zip(made, want, strict=True):
        for left, right in zip(one.sequences, two.sequences, strict=True):
            assert left.tokens == right.tokens
            worst = max(worst, float(np.abs(np.subtract(left.logprobs, right.logprobs)).max(initial=0.0)))
    return worst


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(("way", "model"), [("tight, recompute", "llama"), ("roomy", "smollm2")])
def test_whole_pages_in_every_way(way, model, short, float64):
    """Chunked prefill and preemption change nothing: a query's position decides what it reads."""
    assert difference(way, model, 1, kv_dtype=short, prefix_cache=False) <= 1e-10


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("kv", ["int4", "bfp4"])
def test_four_bits_in_every_way(kv, float64):
    """A token's stored bits depend on it alone, so prefixes and preemption change nothing but a scale's rounding."""
    assert difference("tight, recompute", "llama", 2, kv_dtype=kv) <= 1e-6


@pytest.mark.drawn(0.5)
def test_prefixes_of_whole_pages(short, rng, float64):
    """A second request finds the first one's encoded pages, those behind the window, and reads no others."""
    engine = engines.build(dataclasses.replace(engines.ENGINES["roomy"], kv_dtype=short), "llama", "float64")
    prompt = rng.integers(0, engines.VOCAB, 40).tolist()
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0)
    first, second = (engines.serve(engine, [{"prompt": prompt, "params": params}])[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)  # (40 + 3 - 6) // 8 pages of 8
    assert second.sequences[0].computed == first.sequences[0].computed == 0
    assert np.isfinite(second.sequences[0].logprobs).all()


@pytest.mark.drawn(0.5)
def test_window_and_sinks(rng, float64):
    """A budget of the whole length is the full cache; a smaller one gives pages back, and other numbers."""
    sizes = dataclasses.replace(engines.ENGINES["roomy"], prefix_cache=False, page_size=4, max_sequences=1)
    asked = [
        {"prompt": rng.integers(0, engines.VOCAB, 9).tolist(), "params": SamplingParams(max_tokens=50, logprobs=0)}
    ]
    asked[0]["params"] = dataclasses.replace(asked[0]["params"], temperature=0.0, ignore_eos=True)
    found = {}
    for keep in (None, "window+sinks:64,4", "window+sinks:12,2"):
        engine = engines.build(dataclasses.replace(sizes, retention=keep), "llama", "float64")
        most = 0
        request = engine.submit(asked[0]["prompt"], asked[0]["params"])
        while engine.busy:
            engine.step()
            engines.check_books(engine)
            most = max([most, *(len(s.pages[0]) for s in engine.scheduler.running)])
        found[keep] = most, request.sequences[0].logprobs
    full, equal, less = found.values()
    assert full[0] == equal[0] == 15
    np.testing.assert_allclose(full[1], equal[1], atol=1e-10)
    assert less[0] <= -(-(2 + 12 - 1 + 16) // 4)  # what is kept, and the tokens of a step
    assert np.abs(np.subtract(full[1], less[1])).max() > 1e-4


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(
    ("way", "model"), [("tight, recompute", "llama"), ("tight, swap", "gemma3"), ("roomy", "smollm2")]
)
def test_corm_in_every_way(way, model, rng, float64):
    """However prompts are split and sequences preempted: what one query at a time over the whole sequence gives."""
    rule, keep = retention_rule("corm:1.2,3,8"), "corm:1.2,3,8"
    sizes = dataclasses.replace(engines.ENGINES[way], prefix_cache=False, retention=keep)
    engine = engines.build(sizes, model, "float64")
    asked = [
        one | {"params": dataclasses.replace(one["params"], prompt_logprobs=None, logprobs=0)}
        for one in engines.traffic(rng, sizes, 4)
    ]
    long = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0)
    asked += [{"prompt": rng.integers(0, engines.VOCAB, n).tolist(), "params": long} for n in (33, 21, 40, 38)]
    made = engines.serve(engine, asked)
    assert error(model, ScoreReference((rule,)), made) <= 1e-10
    assert error(model, DenseReference(), made) > 1e-4
    assert engine.metrics.dropped_entries > 0


def test_sizes_of_rules():
    assert retention_rule("window+sinks") == WindowAndSinks(1024, 4)
    assert retention_rule("window+sinks:100") == WindowAndSinks(100, 4)
    assert retention_rule("window+sinks:100,8") == WindowAndSinks(100, 8)
    assert WindowAndSinks(100, 8).capacity(50) == 50
    assert WindowAndSinks(100, 8).capacity(500) == 107
    for wrong in ("window+sinks:", "window+sinks:0", "window+sinks:a", "window+sinks:1,2,3"):
        with pytest.raises(ValueError, match="RECENT,SINKS, such as"):
            retention_rule(wrong)


def test_numbers_of_rules_by_scores():
    assert retention_rule("corm:2") == Corm(2.0, 32, 256)
    assert retention_rule("corm:0.5,8,16") == Corm(0.5, 8, 16)
    assert retention_rule("pyramid:0.25,8") == Pyramid(0.25, 8, 256)
    for wrong in ("corm:", "corm:-1", "corm:1,0", "corm:1,9,8", "corm:1,2,3,4", "corm:a"):
        with pytest.raises(ValueError, match=r"give corm:THRESHOLD\["):
            retention_rule(wrong)
    for wrong in ("pyramid:", "pyramid:0", "pyramid:1.1", "pyramid:0.5,9,8", "pyramid:0.5,1,2,3"):
        with pytest.raises(ValueError, match=r"give pyramid:SHARE\["):
            retention_rule(wrong)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 1.0])
def test_budgets_of_a_pyramid(share):
    """They fall with depth, keep their mean, and never exceed the length; the device counts what the host expects."""
    rules = [Pyramid(share, 2, 8).of_part(n, 6) for n in range(6)]
    budgets = [rule.capacity(1024) for rule in rules]
    assert budgets == sorted(budgets, reverse=True)
    assert max(budgets) <= 1024
    assert abs(sum(budgets) / 6 - 2 - 1022 * share) <= 2
    assert (len(set(budgets)) == 6) == (share < 1)
    for rule, length in ((rules[0], 24), (rules[5], 40)):
        at = jnp.broadcast_to(jnp.arange(48), (2, 48))
        stays = rule.choose(jnp.zeros((2, 48)), at, at < length, jnp.int32(length))
        assert (stays & (at < length)).sum(1).tolist() == [rule.capacity(length)] * 2


def test_parts_of_layers():
    """Layers under a rule by scores are in up to eight parts of equally many; a page is one of a part."""
    config = dataclasses.replace(engines.model_of("llama", "float32"), layers=30)
    (plain,), (scored,) = layer_groups(config), layer_groups(config, "auto", "corm")
    assert (plain.parts, scored.parts, scored.rows) == (1, 6, 5)
    assert plain.page_bytes(8) == 6 * scored.page_bytes(8)
    assert plain.token_bytes() == scored.token_bytes()
    (pyramid,) = layer_groups(config, "auto", "pyramid:0.5,1,8")
    # Shares of 0.75 to 0.25 of 255 tokens, and one: 192.25, 166.75, 141.25, 115.75, 90.25 and 64.75 in pages of 8.
    assert pyramid.sequence_bytes(256, 8) == (25 + 21 + 18 + 15 + 12 + 9) * pyramid.page_bytes(8)
    sizes = EngineConfig(max_sequences=2, max_batched_tokens=8, max_len=32, page_size=8, pages=9)
    assert pool_sizes(sizes, (scored,), 8, 4, 9) == (54,)


def test_what_rules_by_scores_do_not_go_with():
    sizes = dataclasses.replace(engines.ENGINES["roomy"], prefix_cache=False, retention="corm:1")
    with pytest.raises(ValueError, match="leave speculate and verify_tokens out, or use window"):
        engines.build(dataclasses.replace(sizes, speculate="ngram:2"))
    with pytest.raises(ValueError, match="the mesh has 4 shards for 2 of them"):
        meshes.over("tensor=4", "few kv heads", sizes)
    with pytest.raises(ValueError, match="needs prefix_cache = False"):
        EngineConfig(retention="corm:1")


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("mesh", ["tensor=2", "data=2"])
def test_scores_on_meshes(mesh, rng, float64):
    """Each shard chooses among the entries of its kv heads; counts are of all shards."""
    sizes = dataclasses.replace(engines.ENGINES["tight, swap"], prefix_cache=False, retention="corm:1.2,3,8")
    engine = meshes.over(mesh, "llama", sizes, "float64")
    long = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0)
    asked = [{"prompt": rng.integers(0, engines.VOCAB, n).tolist(), "params": long} for n in (33, 21, 30, 9, 26)]
    made = engines.serve(engine, asked)
    assert error("llama", ScoreReference((retention_rule("corm:1.2,3,8"),)), made) <= 1e-10
    alone = engines.build(sizes, "llama", "float64")
    engines.serve(alone, asked)
    assert engine.metrics.dropped_entries == alone.metrics.dropped_entries > 0 or engine.scheduler.preemptions > 0


@pytest.mark.drawn(0.5)
def test_report_of_a_rule():
    """``/config`` says what stayed and left; under a rule by position, of the sequences that have ended."""
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    for keep in ("corm:2,3,8", "window+sinks:9,3"):
        sizes = dataclasses.replace(
            engines.ENGINES["roomy"], prefix_cache=False, retention=keep, samplers=("plain",), page_size=4
        )
        engine = engines.build(sizes)
        engines.serve(engine, [{"prompt": list(range(30)), "params": params}])
        found = describe(engine)["cache"]["retention"]
        assert found["rule"] == keep
        assert found["kept_entries"] > 0 < found["dropped_entries"]
        assert (found["returned_pages"] > 0) == (keep[0] == "c")
    # 49 tokens in 2 layers and 2 kv heads; the last one is not computed.
    assert (found["kept_entries"], found["dropped_entries"]) == (4 * 11, 4 * 38)


def test_options_of_commands():
    config = with_kv_cache(EngineConfig(), "bf16")
    assert (config.kv_dtype, config.retention, config.prefix_cache) == ("bfloat16", None, True)
    config = with_kv_cache(EngineConfig(), "int4", "window+sinks:64")
    assert (config.kv_dtype, config.retention, config.prefix_cache) == ("int4", "window+sinks:64", False)
    salts = {prefix_salt(with_kv_cache(EngineConfig(), kv, keep)) for kv, keep in
             (("auto", "all"), ("kivi2", "all"), ("auto", "window+sinks:64"), ("auto", "window+sinks:65"),
              ("auto", "corm:1"), ("auto", "pyramid:0.5"))}  # fmt: skip
    assert len(salts) == 6
    with pytest.raises(ValueError, match=r"retention = 'oldest'; legal: None, or a row of \('window\+sinks'"):
        with_kv_cache(EngineConfig(), "auto", "oldest")


@pytest.mark.parametrize(
    ("kv", "page_size", "of_tpu"),
    [
        ("int4", 32, 128), ("kivi4", 129, 256), ("int8", 128, 128), ("int8", None, None), ("auto", 32, 32),
        ("shadowkv", 64, 64),
    ],
)  # fmt: skip
def test_pages_with_scales_fill_tiles_of_tpus(kv, page_size, of_tpu):
    config = EngineConfig(kv_dtype=kv, page_size=page_size)
    assert with_whole_tiles(config, "tpu").page_size == of_tpu
    assert with_whole_tiles(config, "gpu") == with_whole_tiles(config, "cpu") == config


@pytest.mark.drawn(3)
def test_an_engine_rounds_its_pages_for_the_device(monkeypatch):
    monkeypatch.setattr(
        "jaxllm.infer.engine.engine.with_whole_tiles", lambda config, _: with_whole_tiles(config, "tpu")
    )
    sizes = dataclasses.replace(engines.ENGINES["roomy"], kv_dtype="int4", page_size=8, samplers=("plain",))
    engine = engines.build(sizes)
    assert engine.runner.spec.page_size == engine.config.page_size == 128


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"preemption": "swap"}, "preemption = 'swap'"),
        ({"retention": "window+sinks", "prefix_cache": False}, "retention = 'window"),
        ({"page_size": None}, "page_size = None"),
        ({"page_size": 4, "verify_tokens": 5}, "verify_tokens = 5"),
    ],
)
def test_what_whole_pages_do_not_go_with(fields, why):
    with pytest.raises(ValueError, match=why):
        EngineConfig(kv_dtype="kivi4", **fields)


def test_channels_that_are_not_reordered():
    sizes = dataclasses.replace(engines.ENGINES["roomy"], kv_dtype="bfp4")
    with pytest.raises(ValueError, match="reorders channels, and the model has layers apart: use kivi4 or int4"):
        engines.build(sizes, apart=True)
    with pytest.raises(ValueError, match="the model has a layer that is not plain grouped-query attention"):
        engines.build(sizes, "deepseek_v3")
    with pytest.raises(ValueError, match="adapters are for its own order"):
        EngineConfig(kv_dtype="bfp4", adapter_slots=2)


def test_whole_pages_are_not_split_over_context():
    sizes = dataclasses.replace(engines.ENGINES["roomy"], kv_dtype="kivi4")
    with pytest.raises(ShardingError, match="encodes whole pages does not go with context=2"):
        meshes.over("context=2", "llama", sizes)


@pytest.mark.parametrize(
    ("kv", "each"),
    [("int4", 2 * (8 // 2 + 4)), ("bfp4", 2 * (8 // 2 + 4)), ("kivi4", 16 // 2 + 4 + 1), ("kivi2", 16 // 4 + 4 + 1)],
)
def test_bytes_of_a_token(kv, each):
    """Of 2 layers and 2 kv heads of 8; a channel of a page of 32 tokens has 4 bytes, and so have up to 4 exponents."""
    (group,) = layer_groups(engines.model_of("llama", "float64"), kv)
    assert group.lossy
    assert group.token_bytes() == 2 * 2 * each
    assert group.page_bytes(32) == 32 * 2 * 2 * each


@pytest.mark.parametrize(
    "fields",
    [
        {"retention": "window+sinks", "prefix_cache": False},
        {"kv_dtype": "kivi4"},
        {"layer_window": 1},
        {"stages": 2},
    ],
)
def test_what_two_phases_do_not_go_with(fields):
    with pytest.raises(ValueError, match="two_phase does not go with"):
        EngineConfig(two_phase=True, **fields)
    with pytest.raises(ValueError, match="two_phase does not go with batch_invariant"):
        dataclasses.replace(engines.ENGINES["invariant"], two_phase=True)
