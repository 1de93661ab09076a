"""Guided decoding: completions match their grammar, beside others without one."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time

import jsonschema
import numpy as np
import pytest

from jaxllm.infer import AsyncEngine, Grammar, SamplingParams
from jaxllm.infer.grammar import Grammars
from jaxllm.text import ByteTokenizer
from tests.infer import engines, schemas
from tests.infer.writers import writer


@pytest.mark.drawn(0.3)
def test_texts_have_their_forms_in_company(rng):
    """With and without grammars in one batch: grammars hold, and the other completions are unchanged."""
    wanted = [schemas.schema(rng) for _ in range(3)]
    forms = [Grammar.json_schema(one) for one in wanted]
    forms += [
        Grammar.regex("(ab|ä)+[0-9]{2}"),
        Grammar.choice(["yes", "no", 'may"be\n', "ja"]),
        Grammar.ebnf('start: "(" start ")" | "x"'),
        Grammar.ebnf('root ::= "a" ("b" | "c"){1,3} "."'),
        None,
        None,
    ]
    seed = int(rng.integers(2**32))
    asked = [
        {
            "prompt": list(b"Say: "),
            "at": i,
            "params": SamplingParams(max_tokens=40 if form is None else 450, seed=seed, grammar=form),
        }
        for i, form in enumerate(forms)
    ]
    made = engines.serve(writer(), asked)
    texts = [request.sequences[0].text for request in made]
    assert [request.sequences[0].finish for request in made[:7]] == ["stop"] * 7
    for one, text in zip(wanted, texts, strict=False):
        jsonschema.validate(json.loads(text), one)
    assert re.fullmatch("(ab|ä)+[0-9]{2}", texts[3])
    assert texts[4] in ("yes", "no", 'may"be\n', "ja")
    assert re.fullmatch(r"\(*x\)*", texts[5])
    assert texts[5].count("(") == texts[5].count(")")
    assert re.fullmatch(r"a[bc]{1,3}\.", texts[6])
    alone = engines.serve(writer(), asked[-1:])[0]
    assert alone.sequences[0].tokens == made[-1].sequences[0].tokens == made[-2].sequences[0].tokens


@pytest.mark.drawn(3)
def test_continuations_have_the_form_each():
    (request,) = engines.serve(
        writer(), [{"prompt": list(b"?"), "params": SamplingParams(n=4, seed=2, grammar=Grammar.regex("[a-z]{5}"))}]
    )
    texts = {s.text for s in request.sequences}
    assert len(texts) > 1
    assert all(re.fullmatch("[a-z]{5}", text) for text in texts)


def test_draws_are_those_of_the_model_among_legal_tokens(rng):
    """The first letter of [a-d]: as often as the softmax over these four says."""
    engine, prompt = writer(), list(b"Hm. ")
    one = engine.submit(prompt, SamplingParams(max_tokens=1, logprobs=0, allowed_tokens=tuple(b"abcd"), n=1, seed=0))
    scores = [engine.submit([*prompt, letter], SamplingParams(max_tokens=0, prompt_logprobs=0)) for letter in b"abcd"]
    texts = [
        engine.submit(
            prompt, SamplingParams(max_tokens=1, n=50, seed=int(rng.integers(2**32)), grammar=Grammar.regex("[a-d]x"))
        )
        for _ in range(8)
    ]
    while engine.busy:
        engine.step()
    assert one.sequences[0].text in "abcd"
    weights = np.exp([s.prompt_scores[-1][0] for s in scores])
    found = np.bincount([ord(s.text[0]) - ord("a") for r in texts for s in r.sequences], minlength=4)
    expected = 400 * weights / weights.sum()
    assert expected.min() > 3
    assert ((found - expected) ** 2 / expected).sum() < 36, "the quantile 1 - 1e-7 of 3 degrees of freedom"


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (Grammar.json_schema({"type": "nothing"}), r"grammar \(json_schema\): Invalid type: nothing"),
        (Grammar.json_schema({"not": {"type": "string"}}), "Unimplemented keys"),
        (Grammar.json_schema('{"a"'), r"grammar \(json_schema\): "),
        (Grammar.regex("[ab"), r"grammar \(regex\): .*invalid regex"),
        (Grammar.ebnf("start: x"), r'grammar \(ebnf\): .*unknown name: "x"'),
    ],
)
def test_grammars_that_cannot_be_had_are_refused(form, words):
    with pytest.raises(ValueError, match=words):
        writer().submit([1], SamplingParams(grammar=form))
    assert not writer().busy


def test_no_grammar_takes_longer_than_its_limits():
    """A pattern whose automaton has 2^40 states, and a schema of a hundred thousand symbols: done or refused soon."""
    bombs = [
        Grammar.regex("(a|b)*a(a|b){40}c"),
        Grammar.regex("((a{1,1000}){1,1000}){1,1000}"),
        Grammar.json_schema({"anyOf": [{"type": "array", "prefixItems": [{"enum": list(range(100))}] * 100}] * 100}),
    ]
    for bomb in bombs:
        began = time.process_time()
        try:
            request = writer().submit([1], SamplingParams(max_tokens=30, seed=1, grammar=bomb))
            while writer().busy:
                writer().step()
            assert request.sequences[0].finish in ("length", "error", "stop")
        except ValueError:
            with pytest.raises(ValueError, match="grammar"):
                writer().submit([1], SamplingParams(grammar=bomb))
        assert time.process_time() - began < 60


def test_refusals(monkeypatch):
    form = Grammar.choice(["a"])
    for fields in (
        {"min_tokens": 1},
        {"allowed_tokens": (1,)},
        {"bad_words": ("a",)},
        {"ignore_eos": True},
        {"beams": 2},
    ):
        with pytest.raises(ValueError, match="does not go with a"):
            SamplingParams(grammar=form, **fields)
    with pytest.raises(ValueError, match="-inf does not go with a grammar"):
        SamplingParams(grammar=form, logit_bias={1: -float("inf")})
    with pytest.raises(ValueError, match="none of them empty"):
        Grammar.choice([])
    with pytest.raises(ValueError, match="a grammar needs an engine with a tokenizer"):
        Grammars(None, 272)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxllm\[grammar\]'"):
        Grammars(ByteTokenizer(), 272)


def test_readers_get_their_form():
    async def read() -> str:
        async with AsyncEngine(writer()) as engine:
            params = SamplingParams(max_tokens=30, grammar=Grammar.choice(["north", "south"]))
            return "".join([piece.text async for piece in engine.stream([1, 2], params)])

    assert asyncio.run(read()) in ("north", "south")
