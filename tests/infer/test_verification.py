"""Verification of proposed tokens: what is served is plain decoding, token by token, whatever was proposed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.infer import Engine, EngineConfig, Grammar, Request, SamplingParams
from jaxllm.infer.engine.engine_metrics import EngineMetrics
from jaxllm.infer.scheduling.proposer import proposals
from jaxllm.infer.speculate.draft_length import FixedDraftLength
from jaxllm.infer.speculate.ngram import NgramProposer
from jaxllm.models import functional
from jaxllm.text import ByteTokenizer
from tests import environment, quick, tiny
from tests.infer import engines, meshes
from tests.infer.proposers import Mode, OracleProposer


def asked(rng: np.random.Generator, config: EngineConfig, many: int) -> list[dict[str, Any]]:
    """Random traffic without cancellations, with greedy completions and logits processors among it."""
    made = engines.traffic(rng, config, many)
    greedy = SamplingParams(max_tokens=40, temperature=0.0, seed=1, logprobs=2, repetition_penalty=1.2)
    made += [{"prompt": rng.integers(0, engines.VOCAB, n).tolist(), "params": greedy} for n in (3, 8, 21)]
    return [one | {"cancel": None} for one in made]


def plainly_sampled(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Requests of temperature and seed alone, greedy and sampled."""
    return [
        {
            "prompt": rng.integers(0, engines.VOCAB, 4 + 5 * i).tolist(),
            "params": SamplingParams(max_tokens=20 + i, temperature=heat, seed=i),
            "at": i,
        }
        for i, heat in enumerate((0.0, 1.0, 0.6))
    ]


def equal(got: list[Request], want: list[Request]) -> None:
    for one, other in zip(got, want, strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
        assert [s.finish for s in one.sequences] == [s.finish for s in other.sequences]
        assert [s.text for s in one.sequences] == [s.text for s in other.sequences]


class SomeDrafts(FixedDraftLength):
    """Drafts for some sequences, of which some tokens are verified, or none."""

    def __init__(self, most: int, rng: np.random.Generator):
        super().__init__(most)
        object.__setattr__(self, "rng", rng)

    def counts(self, sequences: list[Any]) -> dict[Any, int]:
        return {one: int(self.rng.integers(1, self.most + 1)) for one in sequences if self.rng.random() < 0.5}

    def kept(self, sequences: list[Any], drafts: Mapping[Any, int]) -> dict[Any, int]:
        cut = {one: int(self.rng.integers(0, count + 1)) for one, count in drafts.items()}
        return {one: count for one, count in cut.items() if count}


def beside(plain: Engine, verifying: Engine, requests: list[dict[str, Any]], oracle: OracleProposer) -> list[Request]:
    """Serves the same by plain decoding, then with proposals, and compares every completion.

    Args:
        plain: may be the verifying engine, whose proposer is silent meanwhile.
    """
    mode, oracle.mode = oracle.mode, "silent"
    want = engines.serve(plain, requests)
    oracle.mode = mode
    oracle.learn(want)
    before = dataclasses.replace(verifying.metrics)
    got = engines.serve(verifying, requests)
    equal(got, want)
    metrics = verifying.metrics
    proposed = metrics.proposed_tokens - before.proposed_tokens
    accepted = metrics.accepted_tokens - before.accepted_tokens
    assert proposed >= len(requests)
    if oracle.mode == "some":
        assert 0 < accepted < proposed
    else:
        assert accepted == (proposed if oracle.mode == "all" else 0)
    assert metrics.generated_tokens - before.generated_tokens == sum(
        len(s.tokens) - len(r.prompt) for r in want for s in r.sequences
    )
    return got


@pytest.fixture(scope="module")
def verifying():
    """An engine in float64 that runs out of pages, and its proposer."""
    oracle = OracleProposer("all", np.random.default_rng(environment.seed()), engines.VOCAB)
    config = dataclasses.replace(engines.ENGINES["tight, recompute"], max_sequences=2, decode_steps=1, verify_tokens=3)
    with environment.x64():
        return engines.build(config, "llama", "float64", proposer=oracle), oracle


@pytest.mark.drawn(0.3)
def test_a_refused_proposal_keeps_the_window(rng, float64):
    """Pages that a window leaves behind only if a proposal is accepted stay until the verification has landed."""
    oracle = OracleProposer("none", rng, engines.VOCAB)
    config = dataclasses.replace(engines.ENGINES["layers apart"], prefix_cache=False, verify_tokens=3)
    engine = engines.build(config, "gemma3", "float64", proposer=oracle)
    beside(engine, engine, asked(rng, config, 2), oracle)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("mode", ["all", "some", "none"])
def test_completions_are_those_of_plain_decoding(verifying, mode: Mode, rng, float64):
    """Short of pages and over page borders. Every way to serve: `make proof seams ONLY=verified_is_plain_decoding`."""
    engine, oracle = verifying
    oracle.mode = mode
    before = engine.scheduler.preemptions
    made = beside(engine, engine, asked(rng, engine.config, 5), oracle)
    assert engines.error("llama", "float64", made) <= 1e-10
    assert engine.scheduler.preemptions > before


def test_full_acceptance_takes_fewer_steps(verifying, float64):
    engine, oracle = verifying
    requests = [{"prompt": [5, 6, 7], "params": SamplingParams(max_tokens=41, temperature=0.0, seed=0)}]
    steps, made = [engine.metrics.steps], []
    for oracle.mode in ("silent", "all"):
        made.append(engines.serve(engine, requests))
        oracle.learn(made[0])
        steps.append(engine.metrics.steps)
    equal(*made)
    assert np.diff(steps).tolist() == [41, 11]


def test_ngrams_are_plain_decoding_in_fewer_steps(verifying, rng, float64):
    """Short of pages, beside sampled requests with logits processors; loops of greedy decoding are found."""
    engine, oracle = verifying
    requests = asked(rng, engine.config, 3)
    loop = SamplingParams(max_tokens=40, temperature=0.0, seed=1, logit_bias={7: 9.0, 8: 9.0})
    alone = [{"prompt": [7, 8, 7, 8, 9], "params": loop, "cancel": None}]
    oracle.mode = "silent"
    want, before = engines.serve(engine, [*requests, *alone]), engine.metrics.steps
    engines.serve(engine, alone)
    plain = engine.metrics.steps - before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.scheduler, "proposer", NgramProposer())
        patch.setattr(engine, "metrics", EngineMetrics())
        got, metrics = engines.serve(engine, [*requests, *alone]), engine.metrics
        accepted, steps = metrics.accepted_tokens, metrics.steps
        engines.serve(engine, alone)
        assert metrics.steps - steps < plain - 10  # among others, refused drafts may cost preemptions
    equal(got, want)
    assert engines.error("llama", "float64", got[:3]) <= 1e-10
    assert 0 < metrics.drafts <= metrics.proposed_tokens
    assert metrics.accepted_tokens == sum(metrics.accepted_by_position) > accepted >= 10
    assert metrics.accepted_by_position == sorted(metrics.accepted_by_position, reverse=True)


def test_drafting_may_stop_and_begin_while_a_verification_runs(verifying, rng, float64):
    """Adaptive lengths leave the books right: some steps draft for some sequences, others decode plainly."""
    engine, oracle = verifying
    requests = asked(rng, engine.config, 4)
    oracle.mode = "silent"
    want = engines.serve(engine, requests)
    oracle.mode = "some"
    oracle.learn(want)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "metrics", EngineMetrics())
        patch.setattr(engine.scheduler, "draft_length", SomeDrafts(3, rng))
        equal(engines.serve(engine, requests), want)
        assert 0 < engine.metrics.accepted_tokens < engine.metrics.proposed_tokens


def test_a_batch_stays_together_around_a_verification(verifying, rng, float64):
    """Sequences without a draft wait for the others': steps for a few of them alone would cost as much as for all."""
    engine, oracle = verifying
    oracle.mode = "silent"
    requests = [{"prompt": [7, 8, 9], "params": SamplingParams(max_tokens=24, seed=i), "cancel": None} for i in (1, 2)]
    want = engines.serve(engine, requests)
    oracle.mode = "some"
    oracle.learn(want)

    class OneDraft(FixedDraftLength):
        def counts(self, sequences: list[Any]) -> dict[Any, int]:
            return {} if any(one.unsettled for one in sequences) else dict.fromkeys(sequences[:1], 2)

    behind, start_step = list[bool](), engine._start_step

    def started(plans: Any) -> Any:
        chunks = [c for step in engine._in_flight for plan in step.plans for c in plan.chunks]
        behind.append(any(c.proposed for c in chunks))
        return start_step(plans)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.scheduler, "draft_length", OneDraft(2))
        patch.setattr(engine, "metrics", EngineMetrics())
        patch.setattr(engine, "_start_step", started)
        got = engines.serve(engine, requests)
        assert engine.metrics.drafts > 2
    assert not any(behind), "a step was started behind a verification"
    equal(got, want)


@pytest.mark.drawn(0.5)
def test_draft_models_are_plain_decoding(verifying, rng, float64):
    """Short of pages: slots change hands, and sequences are preempted. The model itself guesses plain requests."""
    engine, oracle = verifying
    requests, plain = asked(rng, engine.config, 2), plainly_sampled(rng)
    oracle.mode = "silent"
    want = [engines.serve(engine, some) for some in (requests, plain)]
    shares = []
    for params in (engines.params_of("llama", "float64"), engines.params_of("llama", "float64", 5)):
        proposer = engines.draft(engine, engines.MODELS["llama"], params)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.scheduler, "proposer", proposer)
            patch.setattr(engine, "metrics", EngineMetrics())
            got = engines.serve(engine, requests)
            equal(got, want[0])
            assert engines.error("llama", "float64", got) <= 1e-10
            with pytest.MonkeyPatch.context() as cutting:
                cutting.setattr(engine.scheduler, "draft_length", SomeDrafts(3, rng))
                equal(engines.serve(engine, requests), want[0])
            patch.setattr(engine, "metrics", EngineMetrics())
            equal(engines.serve(engine, plain), want[1])
            shares.append(engine.metrics.accepted_tokens / engine.metrics.proposed_tokens)
        assert proposer.runner.program_cache.counts.late == 0
    assert shares[0] == 1 > shares[1]


@pytest.mark.drawn(0.3)
def test_over_replicas_and_split_heads(rng, float64):
    oracle = OracleProposer("some", rng, engines.VOCAB)
    sizes = dataclasses.replace(engines.ENGINES["tight, swap"], max_sequences=1, decode_steps=1, verify_tokens=3)
    engine = meshes.over("data=2,tensor=2", "wide", sizes, "float64", proposer=oracle)
    made = beside(engine, engine, asked(rng, sizes, 5), oracle)
    assert engines.error("wide", "float64", made) <= 1e-10


def check_cancelled_in_flight(engine: Engine, oracle: OracleProposer, rng: np.random.Generator) -> None:
    """What is cancelled, or computed again with other weights, while a verification runs leaves the books right."""

    def propose(sequence: Any, count: int) -> list[int]:
        return rng.integers(0, engines.VOCAB, count).tolist()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "propose", propose)
        made = [engine.submit(rng.integers(0, 40, 9).tolist(), SamplingParams(max_tokens=30)) for _ in range(6)]
        for number in range(12):
            engine.step()
            engines.check_books(engine)
            if number == 4:
                assert any(s.unsettled for s in engine.scheduler.running)
                engine.cancel(made[0])
            if number == 7:
                engine.swap(engine.runner.params)
                engines.check_books(engine)
        while engine.busy:
            engine.step()
            engines.check_books(engine)
    assert [r.sequences[0].finish for r in made] == ["cancelled", *["length"] * 5]
    assert all(pages.available == pages.count for pages in engine.scheduler.pages)


def test_cancelled_and_replaced_weights_in_flight(verifying, rng, float64):
    check_cancelled_in_flight(*verifying, rng)


def writer(verify_tokens: int = 0, *, draft_trees: bool = False, **fields: Any) -> Engine:
    """An engine whose tokens are bytes."""
    tokenizer = ByteTokenizer()
    config = tiny.decoder(dtype="float64", vocab_size=tokenizer.vocab_size, layers=1)
    params = jax.device_put(jax.tree.map(np.asarray, quick.params(config, seed=1, scale=0.5)))
    sizes = EngineConfig(
        max_sequences=4, max_batched_tokens=16, max_len=64, pages=40, page_size=8, buckets=(16,), decode_steps=1,
        samplers=("full",), verify_tokens=verify_tokens, draft_trees=draft_trees,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        return Engine.of(functional(config), params, sizes, tokenizer=tokenizer, strict=True, **fields)


def written() -> list[dict[str, Any]]:
    """Requests with grammars and stop strings."""
    forms = [Grammar.regex("[a-f]{3}[0-9]{12}"), Grammar.ebnf('start: "(" start ")" | "x"'), None, None]
    return [
        {
            "prompt": list(b"Say: "),
            "at": i,
            "params": SamplingParams(
                max_tokens=30, seed=7, grammar=form, temperature=0.7, stop=("e", "  ") if i == 3 else (),
                ignore_eos=form is None,
            ),
        }
        for i, form in enumerate(forms)
    ]  # fmt: skip


@pytest.mark.drawn(0.3)
def test_grammars_and_stop_strings(rng, float64):
    """Text, stop strings and forms: the detokenizer and the grammar see accepted tokens alone."""
    oracle = OracleProposer("some", rng, 256)
    engine = writer(verify_tokens=4, proposer=oracle)
    beside(engine, engine, written(), oracle)


def test_what_is_not_legal_is_refused(verifying, float64):
    with pytest.raises(ValueError, match="verify_tokens = 3 and proposer = None: give both"):
        engines.build(dataclasses.replace(engines.ENGINES["one after the other"], verify_tokens=3))
    with pytest.raises(ValueError, match=r"verify_tokens = 12; give 0 \(none\) to 11"):
        dataclasses.replace(engines.ENGINES["tight, swap"], verify_tokens=12)
    with pytest.raises(ValueError, match="batch_invariant does not go with verify_tokens = 2"):
        dataclasses.replace(engines.ENGINES["invariant"], verify_tokens=2)

    class TooMany:
        def propose(self, sequence: Any, count: int) -> list[int]:
            return [1] * (count + 1)

    engine, _ = verifying
    request = engine.submit([1, 2], SamplingParams(max_tokens=4))
    with pytest.raises(
        ValueError, match=rf"TooMany.propose returned \[1, 1, 1\] for request {request.id}; .* at most 2"
    ):
        proposals(TooMany(), [(request.sequences[0], 2)])
    engine.cancel(request)
    engine.step()
