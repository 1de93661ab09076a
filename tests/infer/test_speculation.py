"""Proposers of speculative decoding: what they propose, and what is refused before a model is loaded."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.infer import LLM, EngineConfig, SamplingParams
from jaxllm.infer.engine.engine_metrics import EngineMetrics
from jaxllm.infer.scheduling.sequence import Request, Sequence
from jaxllm.infer.speculate import draft_model
from jaxllm.infer.speculate.draft_argument import load_draft, parse_draft
from jaxllm.infer.speculate.draft_length import FADE, AdaptiveDraftLength, roofline_knee
from jaxllm.infer.speculate.ngram import SHORTEST, NgramProposer
from jaxllm.infer.speculate.proposer_table import with_speculation
from jaxllm.infer.speculate.self_draft import SelfDraftProposer, with_layers
from jaxllm.models import Segments, functional, unstack_layers
from jaxllm.serve.backend import EngineLoad
from jaxllm.serve.server_metrics import ServerMetrics
from jaxllm.text import ByteTokenizer
from tests import tiny
from tests.infer import engines


def sequence(tokens: list[int], virtual_tokens: int = 0) -> Sequence:
    request = Request(0, tokens, SamplingParams(), b"", 0, frozenset(), virtual_tokens=virtual_tokens)
    return Sequence(request, 0, 0, list(tokens))


def brute_force(tokens: list[int], longest: int, count: int) -> list[int]:
    """What follows the latest earlier occurrence of the longest suffix; beyond the end, what is proposed."""
    for size in range(min(longest, len(tokens)), min(SHORTEST, longest) - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                grown = list(tokens)
                while len(grown) < len(tokens) + count:
                    grown.append(grown[end + len(grown) - len(tokens)])
                return grown[len(tokens) :]
    return []


@pytest.mark.parametrize("longest", [1, 2, 4])
def test_ngrams_are_those_of_a_search_through_all_tokens(longest, rng):
    for _ in range(20):
        proposer, one = NgramProposer(longest), sequence(rng.integers(0, 3, int(rng.integers(1, 30))).tolist())
        for _ in range(6):
            count = int(rng.integers(1, 9))
            assert proposer.propose(one, count) == brute_force(one.tokens, longest, count)
            one.tokens += rng.integers(0, 3, int(rng.integers(1, 5))).tolist()


def test_virtual_tokens_are_in_no_ngram():
    proposer = NgramProposer(2)
    assert proposer.propose(sequence([5, 5, 5, 6]), 1) == []
    assert proposer.propose(sequence([5, 5, 5]), 2) == [5, 5]
    assert proposer.propose(sequence([5, 5, 5], virtual_tokens=2), 2) == []


def refuse(match: str, config: EngineConfig | None = None, **fields: Any) -> None:
    """Checks that an LLM refuses arguments, before it looks for the model."""
    with pytest.raises(ValueError, match=match):
        LLM("no/such/model", config, **fields)


def test_what_is_not_legal_is_refused_before_the_model_is_loaded():
    legal = r"ngram\[:N\], draft:MODEL\[,parallel=N\]\[,devices=A-B\], tree:MODEL,BUDGET, head:DIR, mtp, self:LAYERS"
    refuse(rf"'ngramm': there is no proposer 'ngramm'; legal: {legal}", speculate="ngramm")
    refuse("'ngram:0': ngram:0; N is the length in tokens", speculate="ngram:0")
    refuse("'draft:': draft:; give a draft model, such as draft:smollm2", speculate="draft:")
    for options in ("parallel=0", "layers=2", "devices=x", "parallel=2,parallel=2"):
        refuse(rf"draft:small,{options}; give a draft model", speculate=f"draft:small,{options}")
    refuse("'self:x': self:x; give the number of layers that the draft keeps", speculate="self:x")
    refuse("speculate_tokens = 0; give 1 or more", speculate="ngram", speculate_tokens=0)
    refuse("speculate_tokens = 3 without speculate", speculate_tokens=3)
    refuse("verify_tokens = 300; give 0", speculate="ngram", speculate_tokens=300)
    invariant = EngineConfig(batch_invariant=True, preemption="swap", samplers=("full",), decode_steps=1)
    refuse("batch_invariant does not go with speculate = 'ngram'", invariant, speculate="ngram")


def test_steps_that_verify_have_buckets_of_their_own():
    plain = EngineConfig(max_sequences=4)
    config = with_speculation(plain, "ngram", 3)
    assert plain.prompt_buckets == (64, 256)
    assert config.prompt_buckets == (4, 8, 16, 64, 256)
    assert EngineConfig(speculate="ngram").verify_tokens == 4
    assert dataclasses.replace(plain, buckets=(256,), speculate="ngram").prompt_buckets == (256,)
    assert with_speculation(plain, None) == plain
    assert np.all(np.diff(EngineConfig(speculate="ngram", max_batched_tokens=20).prompt_buckets) > 0)


def test_metrics_have_the_names_of_vllm():
    counts = EngineMetrics()
    for proposed, accepted in ((3, 2), (2, 0), (4, 4)):
        counts.add_draft(proposed, accepted)
    assert counts.accepted_by_position == [2, 2, 1, 1]
    assert counts.acceptance_length == 3
    assert "3 drafts, 9 draft tokens, 6 accepted; 3.00 tokens a verification" in counts.show_drafts()
    metrics = ServerMetrics("tiny")
    load = EngineLoad(counters={"spec_decode_num_drafts": 3}, accepted_by_position=counts.accepted_by_position)
    metrics._backend = SimpleNamespace(load=lambda: load)  # type: ignore[assignment]
    lines = metrics.text().decode().splitlines()
    assert 'jaxllm:spec_decode_num_drafts_total{model_name="tiny"} 3.0' in lines
    name = "jaxllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert f'{name}{{model_name="tiny",position="1"}} 2.0' in lines


def test_a_draft_with_another_tokenizer_is_refused(monkeypatch):
    config = tiny.decoder(dtype="float32", vocab_size=272)

    def load(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(model=functional(config), params=None, tokenizer=draft_tokens)

    monkeypatch.setattr(draft_model, "load_model", load)
    monkeypatch.setattr(draft_model, "find_model", Path)
    own = ByteTokenizer()
    draft_tokens = ByteTokenizer()
    draft_tokens.token_bytes = [*own.token_bytes[1:], own.token_bytes[0]]  # type: ignore[misc]
    served = draft_model.ServedModel(functional(config), None, EngineConfig(max_len=16), own, own.vocab_size)
    with pytest.raises(ValueError, match="the draft model small has another tokenizer than the served model of "):
        load_draft(parse_draft("small"), served)
    draft_tokens = own
    for fields, message in (
        ({"vocab_size": 100}, "the draft model has 100 tokens, the served one 272; give a draft with the same"),
        ({"learned_positions": 8}, "sequences have 16 tokens, but the draft model has learned positions for 8"),
        ({"prompt_tokens": 2}, r"does not go with virtual tokens \(prefix, prompt tuning\); give ngram"),
    ):
        config = tiny.decoder(dtype="float32", **{"vocab_size": 272} | fields)
        with pytest.raises(ValueError, match=message):
            load_draft(parse_draft("small"), served)


def many(count: int, left: int = 50) -> list[Sequence]:
    made = [sequence([1, 2]) for _ in range(count)]
    for one in made:
        one.request.params = SamplingParams(max_tokens=left)
    return made


def measured(length: AdaptiveDraftLength, knee: float) -> AdaptiveDraftLength:
    """With two measurements of every step of a device: 1 second up to ``knee`` rows, and more in proportion."""
    for _ in range(2):
        for rows in length.decode_buckets:
            length.record_step(rows, max(1.0, rows / knee), "plain")
        for rows in length.prompt_buckets:
            length.record_step(rows, max(1.0, rows / knee), "verification")
    return length


def expected_speed(counts, rates, offered, knee, each, buckets):
    """Tokens per second with so many draft tokens of each sequence, on the device of ``measured``."""
    batch, (plain, verification) = len(counts), buckets
    padded = max(1.0, next(size for size in plain if size >= batch) / knee)
    if not any(counts):
        return batch / padded
    drafts = [(n, rate, share) for n, rate, share in zip(counts, rates, offered, strict=True) if n]
    tokens = batch + sum(share * rate**j for n, rate, share in drafts for j in range(1, n + 1))
    some = 1 - math.prod(1 - share for _, _, share in drafts)
    rows = batch + math.ceil(sum(n * share for n, _, share in drafts) / some - 1e-9)
    verified = max(1.0, next(size for size in verification if size >= rows) / knee)
    return tokens / (some * verified + (1 - some) * padded + each * max(counts))


@pytest.mark.parametrize(("batch", "empty"), [(3, 0), (1, 9), (1, 60)], ids=str)
def test_draft_lengths_are_those_of_an_exhaustive_search(rng, batch, empty):
    """Over all lengths of some sequences, by tokens per second; the roofline gives the same as measurements.

    Where a proposer has no draft in ``empty`` of its attempts, the search is exact for one sequence.
    """
    buckets = (1, 2, 4), (2, 3, 5, 7, 9, 12)
    for knee, each in ((1.0, 0.0), (3.0, 0.02), (6.0, 0.02), (100.0, 0.4)):
        length, sequences = measured(AdaptiveDraftLength(3, *buckets, knee), knee), many(batch)
        for one in sequences:
            for _ in range(12):
                length.record_draft(one, 3, int(rng.integers(0, 4)))
            for _ in range(empty):
                length.record_draft(one, 0, 0)
        length.record_drafting(2, 2 * each)
        rates = [length.rate(one, batch) for one in sequences]
        offered = [length.offered(one, batch) for one in sequences]
        assert (min(offered) == 1) == (empty == 0)
        speed = partial(expected_speed, rates=rates, offered=offered, knee=knee, each=each, buckets=buckets)
        plain = speed((0,) * batch)

        found = length.counts(sequences)
        own = speed(tuple(found.get(one, 0) for one in sequences))
        best = max(map(speed, itertools.product(range(4), repeat=batch)))
        assert own == pytest.approx(best) if best > 1.03 * plain else not found
        assert found or knee < 100 or empty
        fresh = AdaptiveDraftLength(3, *buckets, knee)
        assert fresh.counts(sequences) == {}, "plain decoding is measured first"
        fresh._all, fresh._own, fresh._drafting, fresh._passes = length._all, length._own, length._drafting, 0
        padded = next(size for size in buckets[0] if size >= batch)
        for _ in range(2):
            fresh.record_step(padded, max(1.0, padded / knee), "plain")
        fresh._passes = length._passes
        assert fresh.counts(sequences) == found


def test_drafts_stop_where_none_is_accepted_and_are_tried_again():
    length, (one, other) = measured(AdaptiveDraftLength(4, (1,), (5,), 2.0), 2.0), many(2)
    assert length.counts([one]) == {one: 4}
    for _ in range(6):
        length.record_draft(one, 4, 0)
    assert length.counts([one]) == length.counts([other]) == {}, "all sequences have taught the other"
    one.tokens += [0] * 8 * FADE
    one.request.params = SamplingParams(max_tokens=len(one.tokens) + 50)
    assert length.counts([one]) == {one: 4}
    assert length.counts([other]) == {}
    length._passes += 8 * FADE
    assert length.counts([other]) == {other: 4}
    short = many(1, left=3)
    assert measured(AdaptiveDraftLength(4, (1,), (5,)), 5.0).counts(short) == {short[0]: 2}, "the last needs no draft"


def test_attempts_without_a_draft_are_no_refused_tokens():
    """One attempt in four gives a draft, whose tokens are all accepted: 2 tokens in 5/4 passes, so drafting pays.

    It ends where a pass that found no draft takes as long as 2.5 of plain decoding, which has several tokens a step.
    """
    length, (one,) = measured(AdaptiveDraftLength(4, (1,), (5,), 2.5), 2.5), many(1, left=10**6)
    for _ in range(30):
        for proposed in (0, 0, 0, 4):
            length.record_draft(one, proposed, proposed)
    assert length.rate(one) > 0.95
    assert length.offered(one) == pytest.approx(0.25, abs=0.06)
    assert length.counts([one]) == {one: 4}
    for _ in range(2):
        length.record_step(1, 1.2, "undrafted")
    assert length.counts([one]) == {one: 4}
    for _ in range(40):
        length.record_step(1, 2.5, "undrafted")
    assert length.counts([one]) == {}
    for _ in range(300):
        length.record_draft(one, 0, 0)
    assert length.offered(one) < 0.1


def test_one_refused_draft_is_little_evidence():
    """A drafter that is right with 0.69 is worth 9% here; after a refusal it is tried again soon, after many it is not.

    Without evidence any draft that could pay is tried, even where it pays only from an acceptance of 0.95.
    """
    length, (one,) = measured(AdaptiveDraftLength(4, (1,), (5,), 2.0), 2.0), many(1, left=10**6)
    length.record_draft(one, 4, 0)
    assert length.rate(one) == pytest.approx((0.5 + 0.5) / 2)
    one.tokens += [0] * 2 * FADE
    assert length.counts([one]) == {one: 4}
    for _ in range(50):
        length.record_draft(one, 4, 1)
    assert length.rate(one) == pytest.approx(0.5, abs=0.06)
    one.tokens += [0] * 2 * FADE
    assert length.counts([one]) == {}
    dear = measured(AdaptiveDraftLength(4, (1,), (5,), 1.1), 1.1)
    assert dear.counts(many(1)) != {}
    assert measured(AdaptiveDraftLength(4, (1,), (5,), 1.0), 1.0).counts(many(1)) == {}, "it could never pay"


def test_the_time_of_a_larger_program_counts_for_the_rows_that_it_ran_for():
    """While a smaller program is not ready, a verification runs in a larger one, and takes as long."""
    length, batch = AdaptiveDraftLength(4, (1, 2, 4), (20, 256)), many(4)
    for _ in range(2):
        length.record_step(3, 1.0, "plain")
        length.record_step(17, 4.0, "verification")
    assert length.plain_seconds(4) == 1
    assert length.verify_seconds(4, 18) == 4
    for one in batch:
        for _ in range(20):
            length.record_draft(one, 4, 2)
    assert length.counts(batch) == {}, "3 tokens in place of 1 do not pay for 4 passes"


def test_drafts_are_cut_where_their_rows_would_run_in_the_next_larger_program():
    """What is verified is decided again when it is known who has a draft: by the measured times, and not at all."""
    length, batch = measured(AdaptiveDraftLength(4, (1, 2, 4), (8, 12, 20), 20.0), 20.0), many(4)
    for one in batch:
        for _ in range(40):
            length.record_draft(one, 4, 4)
    assert length.kept(batch, dict.fromkeys(batch[:3], 4)) == dict.fromkeys(batch[:3], 4), "rows are free"
    for _ in range(40):
        length.record_step(20, 2.0, "verification")
    kept = length.kept(batch, dict.fromkeys(batch[:3], 4))
    assert sum(kept.values()) == 8, "twelve rows, and not 16 in the program of 20"
    assert set(kept) == set(batch[:3])
    for rows in (8, 12):
        for _ in range(40):
            length.record_step(rows, 9.0, "verification")
    before = length.offered(batch[0])
    assert length.kept(batch, {batch[0]: 4}) == {}
    assert length.offered(batch[0]) >= before
    assert length._all.offered.at == length._passes, "it was proposed all the same"
    assert length.kept(many(8), {}) == {}


def test_drafts_that_were_always_right_are_no_more_than_certain():
    """A bound above 1 by rounding put a draft's second token before its first, and then divided by zero."""
    length, (one,) = measured(AdaptiveDraftLength(4, (1,), (5,), 0.0), 1.0), many(1)
    length.record_draft(one, 4, 4)
    for _ in range(1000):
        one.tokens += [0]
        assert length.rate(one) <= 1


def test_rooflines_knee():
    """Weights of 2 bytes on 1e12 bytes/s and 100e12 FLOP/s: 100 rows take as long as reading."""
    assert roofline_knee(2 * 8_000, 8_000, 100e12, 1e12) == pytest.approx(100)


@pytest.mark.drawn(0.3)
def test_a_model_of_some_layers_is_the_layers_one_after_the_other(rng, float64):
    """Layers of several kinds, stacked and apart; all of them are the model itself."""
    config = engines.model_of("gemma3", "float64")
    model, params = functional(config), engines.params_of("gemma3", "float64")
    tokens, positions = jnp.asarray(rng.integers(0, engines.VOCAB, (1, 9)), jnp.int32), jnp.arange(9)[None]

    def hidden(model: Any, params: Any) -> np.ndarray:
        return np.asarray(model.forward(params, tokens, positions, Segments())[0])

    for weights in (params, unstack_layers(params)):
        np.testing.assert_allclose(
            hidden(*with_layers(model, weights, [0, 1, 2, 3])), hidden(model, params), rtol=0, atol=1e-12
        )
    smaller, weights = with_layers(model, params, [1, 3])
    assert smaller.config.blocks == (config.blocks[1], config.blocks[3])
    want = model.embed(params, tokens, positions)
    for layer in (1, 3):
        single, own = with_layers(model, params, [layer])
        want = single.blocks(own, want, positions, Segments())[0]
    np.testing.assert_allclose(hidden(smaller, weights), want, rtol=0, atol=1e-12)


def test_a_self_draft_keeps_fewer_layers_than_there_are():
    config = tiny.decoder(dtype="float32", layers=3)
    served = draft_model.ServedModel(functional(config), None, EngineConfig(max_len=16), None, 8)
    with pytest.raises(ValueError, match="self:3, but the model has 3 layers; keep 1 to 2"):
        SelfDraftProposer(3, served)


@pytest.mark.drawn(0.3)
def test_an_engine_makes_the_proposer_that_its_configuration_names(rng, float64):
    """Self-speculation of a measured length, before and after other weights: greedy tokens are the model's."""
    sizes = dataclasses.replace(engines.ENGINES["one after the other"], speculate="self:1")
    engine = engines.build(sizes, "llama", "float64")
    assert isinstance(engine.proposer, SelfDraftProposer)
    assert isinstance(engine.draft_length, AdaptiveDraftLength)
    assert engine.config.verify_tokens == 4
    asked = [{"prompt": [7, 8, 9], "params": SamplingParams(max_tokens=40, temperature=0.0)}]
    for seed in (4, 5):
        params = engines.params_of("llama", "float64", seed)
        if seed == 5:
            engine.swap(params)
        tokens = engines.serve(engine, asked)[0].sequences[0].tokens
        likeliest = engines.logprobs_of("llama", "float64", tokens, params).argmax(axis=1)
        assert tokens[3:] == likeliest[2:-1].tolist()
        assert engine.metrics.drafts > 0, "tried at least once, before its cost is known"
        first = engine.proposer.runner.params["segments"]["0"]["0"]["attention"]["q"]
        np.testing.assert_array_equal(first[0], params["segments"]["0"]["0"]["attention"]["q"][0])
    assert engine.proposer.device_bytes > sum(x.nbytes for x in jax.tree.leaves(engine.proposer.runner.params))
