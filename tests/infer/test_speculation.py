"""Proposers of speculative decoding: what they propose, and what is refused before a model is loaded."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxllm.infer import LLM, EngineConfig, SamplingParams
from jaxllm.infer.engine.engine_metrics import EngineMetrics
from jaxllm.infer.engine.sequence import Request, Sequence
from jaxllm.infer.speculate import draft_model
from jaxllm.infer.speculate.ngram import SHORTEST, NgramProposer
from jaxllm.infer.speculate.proposer_table import with_speculation
from jaxllm.models import functional
from jaxllm.serve.backend import EngineLoad
from jaxllm.serve.server_metrics import ServerMetrics
from jaxllm.text import ByteTokenizer
from tests import tiny


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
    refuse(r"'ngramm': there is no proposer 'ngramm'; legal: ngram\[:N\], draft:MODEL", speculate="ngramm")
    refuse("'ngram:0': ngram:0; N is the length in tokens", speculate="ngram:0")
    refuse("'draft:': draft: needs a model, such as draft:smollm2", speculate="draft:")
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
    own = ByteTokenizer()
    draft_tokens = ByteTokenizer()
    draft_tokens.token_bytes = [*own.token_bytes[1:], own.token_bytes[0]]  # type: ignore[misc]
    served = draft_model.ServedModel(functional(config), None, EngineConfig(max_len=16), own, own.vocab_size)
    with pytest.raises(ValueError, match="the draft model small has another tokenizer than the served model of "):
        draft_model.load_draft("small", served)
    draft_tokens = own
    for fields, message in (
        ({"vocab_size": 100}, "the draft model has 100 tokens, the served one 272; give a draft with the same"),
        ({"learned_positions": 8}, "sequences have 16 tokens, but the draft model has learned positions for 8"),
        ({"prompt_tokens": 2}, r"does not go with virtual tokens \(prefix, prompt tuning\); give ngram"),
    ):
        config = tiny.decoder(dtype="float32", **{"vocab_size": 272} | fields)
        with pytest.raises(ValueError, match=message):
            draft_model.load_draft("small", served)
