"""Cached chunks: spans, what is reused of them, the hashes of pages, and what is refused."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.chunks.cached_chunks import CachedChunks, Reuse, chunk_spans
from jaxllm.infer.chunks.chunk_moves import check_chunk_cache
from jaxllm.infer.engine.validation import check_request
from jaxllm.models import DynamicScaling, RopeConfig
from tests import tiny
from tests.infer import engines

ROOMY = dataclasses.replace(engines.ENGINES["roomy"], chunk_cache=True)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0)


def test_what_is_reused():
    """Pages of four: of 11 tokens from 3 on, three in ten are recomputed, and the last three."""
    assert CachedChunks(((3, 14),), 0.3).reuses(4, 20) == (Reuse(7, 11, 3, 14),)
    assert CachedChunks(((3, 14),), 0.0).reuses(4, 20) == (Reuse(3, 11, 3, 14),)
    assert CachedChunks(((3, 11),), 0.0).reuses(4, 11) == (Reuse(3, 10, 3, 11),)  # the last token is computed
    assert CachedChunks(((3, 6), (6, 14)), 1.0).reuses(4, 20) == ()
    assert CachedChunks(((3, 6),), 0.0).reuses(4, 20) == ()
    # Behind a page of the prompt's beginning, if there is one before the chunk.
    (one, two) = CachedChunks(((3, 11), (12, 20)), 0.0, 2).reuses(4, 30)
    assert (one.lead, two.lead) == (0, 8)
    assert CachedChunks(((12, 20),), 0.0).reuses(4, 30) == (Reuse(12, 20, 12, 20, 4),)


def test_pages_of_other_chunks_have_other_hashes():
    one, two = CachedChunks(((4, 12),), 0.5), CachedChunks(((4, 12),), 0.25)
    assert one.mark(0, 4) == one.mark(12, 16) == CachedChunks(((4, 12),), 1.0).mark(4, 8) == b""
    marks = {one.mark(4, 8), one.mark(8, 12), two.mark(4, 8), CachedChunks(((5, 12),), 0.5).mark(4, 8)}
    assert len(marks) == 4


def test_spans_of_texts():
    prompt = [9, 1, 2, 3, 9, 1, 2, 3, 4, 9]
    assert chunk_spans(prompt, [[1, 2, 3]]) == ((1, 4),)
    assert chunk_spans(prompt, [[1, 2, 3, 4], [1, 2, 3]]) == ((1, 4), (5, 9))
    assert chunk_spans(prompt, [[1, 2, 3], [1, 2, 3]]) == ((1, 4), (5, 8))
    assert chunk_spans(prompt, [[7, 2, 3, 4, 8]]) == ((6, 9),)  # tokens at the ends are merged with their neighbours
    with pytest.raises(ValueError, match=r"chunk 1 \(2 tokens\) is not in the prompt"):
        chunk_spans(prompt, [[1, 2], [7, 7]])


@pytest.mark.parametrize(
    ("spans", "share", "message"),
    [
        (((0, 4),), 1.5, "give 0 to 1"),
        ((), 0.5, "in the order of the prompt"),
        (((4, 4),), 0.5, "none of them empty"),
        (((4, 8), (6, 9)), 0.5, "or in another"),
        (((-1, 8),), 0.5, "in the order of the prompt"),
    ],
)
def test_chunks_that_are_refused(spans: tuple[tuple[int, int], ...], share: float, message: str):
    with pytest.raises(ValueError, match=message):
        CachedChunks(spans, share)


@pytest.mark.parametrize(
    "fields",
    [
        {"prefix_cache": False},
        {"kv_dtype": "kivi4"},
        {"layer_window": 1},
        {"stages": 2},
        {"draft_features": True, "verify_tokens": 2},
    ],
)
def test_combinations_that_are_refused(fields: dict[str, object]):
    with pytest.raises(ValueError, match="chunk_cache does not go with"):
        EngineConfig(chunk_cache=True, **fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk_cache does not go with batch_invariant"):
        dataclasses.replace(engines.ENGINES["invariant"], chunk_cache=True)


def test_models_and_meshes_that_are_refused():
    with pytest.raises(ValueError, match="does not go with learned positions"):
        engines.build(ROOMY, "gpt2")
    with pytest.raises(ValueError, match="does not go with a mesh of several devices"):
        engines.build(ROOMY, "wide", mesh=jax.make_mesh((2,), ("tensor",)))
    scaled = tiny.decoder(vocab_size=engines.VOCAB, rope=RopeConfig(scaling=DynamicScaling(2.0, 16)))
    with pytest.raises(ValueError, match="DynamicScaling has angles that depend on the length"):
        check_chunk_cache(scaled, None)
    block = engines.model_of("llama", "float32").blocks[0]
    prefixed = dataclasses.replace(block, attention=block.attention.with_prefix(3))
    with pytest.raises(ValueError, match="does not go with virtual tokens at the start"):
        check_chunk_cache(dataclasses.replace(engines.model_of("llama", "float32"), pattern=(prefixed,)), None)


def test_leads_that_are_refused():
    with pytest.raises(ValueError, match="lead = -1; give 0 or more pages"):
        CachedChunks(((0, 4),), 0.5, -1)


def test_requests_that_are_refused():
    chunks = CachedChunks(((0, 20),))
    asked = dataclasses.replace(GREEDY, cached_chunks=chunks)
    for prompt, sizes, message in (
        ([1] * 30, engines.ENGINES["roomy"], "built without chunk_cache"),
        ([1] * 9, ROOMY, "end behind the prompt's 9 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            check_request(prompt, asked, (), (), sizes, engines.VOCAB, engines.LONGEST, None)
    for fields in ({"beams": 2}, {"prompt_logprobs": 0}):
        with pytest.raises(ValueError, match="it goes neither with beams nor with prompt_logprobs"):
            SamplingParams(cached_chunks=chunks, **fields)  # type: ignore[arg-type]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16"])
def test_encoded_pages_are_turned_too(kv_dtype: str):
    """A chunk at the start of a prompt, recomputed from its fifth token on, is as without the cache, to encoding."""
    engine = engines.build(dataclasses.replace(ROOMY, kv_dtype=kv_dtype))
    rng = np.random.default_rng(0)
    chunk, rest = rng.integers(0, engines.VOCAB, 24).tolist(), rng.integers(0, engines.VOCAB, 5).tolist()
    params = dataclasses.replace(GREEDY, cached_chunks=CachedChunks(((0, 24),), 0.0))
    copied, plain = engines.serve(
        engine,
        [{"prompt": [*chunk, *rest], "params": params}, {"prompt": [*chunk, *rest], "params": GREEDY, "salt": "other"}],
    )
    assert (copied.cached_tokens, plain.cached_tokens) == (24, 0)
    assert copied.sequences[0].tokens == plain.sequences[0].tokens
    assert copied.sequences[0].logprobs == pytest.approx(plain.sequences[0].logprobs, abs=2e-3)


@pytest.mark.drawn(3)
def test_completions_share_the_copies_and_cancelled_requests_give_them_back():
    engine = engines.build(ROOMY)
    prompt = np.random.default_rng(0).integers(0, engines.VOCAB, 40).tolist()
    params = dataclasses.replace(GREEDY, n=3, cached_chunks=CachedChunks(((2, 18), (20, 36)), 0.2))
    asked = [{"prompt": prompt, "params": params, "at": at, "cancel": at + 4 if at else None} for at in (0, 1, 2, 8)]
    made = engines.serve(engine, asked)
    assert {s.finish for s in made[0].sequences} == {"length"}
    assert len({tuple(s.tokens) for s in made[0].sequences}) == 1
    assert made[0].cached_tokens == 24
    assert not any(engine.scheduler.pages[0].ref_counts)


@pytest.mark.drawn(3)
def test_chunks_are_found_behind_their_lead():
    """Prompts that begin alike share their chunks; those that do not, only chunks that were computed alone."""
    engine = engines.build(ROOMY)
    rng = np.random.default_rng(2)
    one, two = rng.integers(0, engines.VOCAB, 8).tolist(), rng.integers(0, engines.VOCAB, 8).tolist()
    chunk, between = rng.integers(0, engines.VOCAB, 16).tolist(), rng.integers(0, engines.VOCAB, 5).tolist()

    def computed(lead: int, first: list[int], *more: int) -> int:
        """Prompt tokens that were computed."""
        prompt, before = [*first, *more, *chunk, 7, 8, 9], engine.metrics.prompt_tokens
        span = (len(first) + len(more), len(first) + len(more) + len(chunk))
        params = dataclasses.replace(GREEDY, cached_chunks=CachedChunks((span,), 0.0, lead))
        (request,) = engines.serve(engine, [{"prompt": prompt, "params": params}])
        assert request.cached_tokens >= 16
        return engine.metrics.prompt_tokens - before

    assert computed(1, one) >= 16
    assert computed(1, one, *between) < 16
    assert computed(1, two) >= 16
    assert computed(0, one, 1) >= 16
    assert computed(0, two, 2) < 16


@pytest.mark.drawn(3)
def test_chunks_side_by_side_are_all_copied():
    engine = engines.build(ROOMY)
    prompt = np.random.default_rng(1).integers(0, engines.VOCAB, 45).tolist()
    params = dataclasses.replace(GREEDY, cached_chunks=CachedChunks(((0, 16), (16, 24), (24, 40)), 0.0))
    (request,) = engines.serve(engine, [{"prompt": prompt, "params": params}])
    assert (len(request.awaits), request.cached_tokens) == (3, 40)


@pytest.mark.drawn(2)
def test_chunks_stay_whole_in_layers_with_windows():
    # Of prompts one after the other: pages of windows alone would have evicted the first one's chunk.
    engine = engines.build(dataclasses.replace(engines.ENGINES["tight, swap"], chunk_cache=True, pages=120), "mistral")
    rng = np.random.default_rng(1)
    document, *others = (rng.integers(0, engines.VOCAB, 40).tolist() for _ in range(4))
    params = dataclasses.replace(GREEDY, cached_chunks=CachedChunks(((4, 44),), 0.0))
    found = []
    for number, text in enumerate((document, *others, document)):
        prompt = [*document[:4], *text, number]
        found += engines.serve(engine, [{"prompt": prompt, "params": params}])
    assert [len(request.awaits) for request in found] == [1] * 4 + [0]
    assert found[-1].cached_tokens == 44
