"""Sampling parameters: each has its documented effect, beside transformers' logits processors, and in an engine."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxllm.infer import Engine, Request, SamplingParams
from jaxllm.infer.grammar import mask_width
from jaxllm.infer.runner import logits_processors
from jaxllm.infer.runner.logits_processors import (
    MASKED,
    MAX_BAD_WORD_TOKENS,
    SAMPLES,
    SHAPED,
    LogitsParams,
    LogitsState,
)
from jaxllm.infer.runner.sampler import SamplerRows, filter_logits
from tests.infer import engines, writers

VOCAB = engines.VOCAB
shaped, grown, seat = (
    jax.jit(logits_processors.process_logits),
    jax.jit(logits_processors.record_tokens),
    jax.jit(logits_processors.seat),
)


def slots_of(texts: list[tuple[list[int], list[int]]], **asked: Any) -> LogitsState:
    """LogitsState of slots 0, 1, ... with equal parameters, each with its prompt and completion."""
    state = tuple(logits_processors.empty_state(len(texts), VOCAB))
    asked = {"bias": {}, "allowed": None, "bad_words": (), "stops": ()} | asked
    for slot, (prompt, text) in enumerate(texts):
        layout = logits_processors.slot_buffer(VOCAB)
        packed = np.zeros(layout.size, np.int32)
        x = layout.views(packed)
        x["slot"][...] = slot
        logits_processors.fill_slot(x, prompt, text, **asked)
        state = seat(state, packed)
    return LogitsState(*state)


def rows(texts: list[tuple[list[int], list[int]]], kind: int = SHAPED | SAMPLES, **fields: Any) -> LogitsParams:
    many = len(texts)
    numbers = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0} | fields
    return LogitsParams(
        jnp.arange(many, dtype=jnp.int32),
        jnp.full(many, kind, jnp.int32),
        jnp.asarray([len(p) + len(t) for p, t in texts], jnp.int32),
        jnp.full(many, numbers.pop("earliest", 0), jnp.int32),
        *(jnp.full(many, value, jnp.float32) for value in numbers.values()),
    )


EVERY = jnp.full((3, mask_width(VOCAB)), -1, jnp.int32)


@pytest.fixture
def texts(rng) -> list[tuple[list[int], list[int]]]:
    return [(rng.integers(0, VOCAB, 9).tolist(), rng.integers(0, VOCAB, n).tolist()) for n in (0, 1, 14)]


@pytest.fixture
def logits(rng) -> np.ndarray:
    return 3 * rng.normal(size=(3, VOCAB)).astype(np.float32)


def processed(processor: Any, texts: list[tuple[list[int], list[int]]], logits: np.ndarray) -> np.ndarray:
    """Logits as transformers processes them."""
    rows = [
        processor(torch.tensor([[*p, *t]]), torch.tensor(row[None]))[0]
        for (p, t), row in zip(texts, logits, strict=True)
    ]
    return torch.stack(rows).numpy()


def test_repetition_is_transformers(texts, logits):
    for penalty in (0.6, 1.7):
        want = processed(transformers.RepetitionPenaltyLogitsProcessor(penalty), texts, logits)
        got = shaped(logits, slots_of(texts), rows(texts, repetition=penalty), EVERY)
        np.testing.assert_allclose(got, want, rtol=1e-6)  # a quotient by way of the inverse
        assert (got != logits).any()


def test_presence_and_frequency_count_the_text_alone(texts, logits):
    got = shaped(logits, slots_of(texts), rows(texts, presence=0.7, frequency=0.4), EVERY)
    for (_, text), before, after in zip(texts, logits, got, strict=True):
        counts = np.bincount(np.asarray(text, int), minlength=VOCAB)
        np.testing.assert_allclose(after, before - 0.4 * counts - 0.7 * (counts > 0), atol=1e-5)


def test_bias_is_transformers(texts, logits, rng):
    bias = {int(t): float(v) for t, v in zip(rng.permutation(VOCAB)[:9], rng.normal(size=9), strict=True)}
    want = processed(transformers.SequenceBiasLogitsProcessor([[[t], v] for t, v in bias.items()]), texts, logits)
    np.testing.assert_array_equal(shaped(logits, slots_of(texts, bias=bias), rows(texts), EVERY), want)


def test_bad_words_are_transformers(texts, logits, rng):
    """Words that would complete the texts next are among them."""
    words = [tuple(rng.integers(0, VOCAB, n).tolist()) for n in (1, 1, 2, 5)]
    words += [
        (*(p + t)[-n:], int(rng.integers(VOCAB)))
        for (p, t), n in zip(texts, (1, 2, MAX_BAD_WORD_TOKENS - 1), strict=True)
    ]
    want = processed(
        transformers.NoBadWordsLogitsProcessor([list(w) for w in words], eos_token_id=[VOCAB]), texts, logits
    )
    got = shaped(logits, slots_of(texts, bad_words=words), rows(texts), EVERY)
    np.testing.assert_array_equal(got, want)
    assert (np.isinf(got).sum(1) >= 2).all()


def test_no_stop_before_min_tokens_is_transformers(texts, logits):
    stops = [3, 17]
    for least in (1, 15, 40):
        processor = transformers.MinNewTokensLengthLogitsProcessor(9, least, stops, device="cpu")
        got = shaped(logits, slots_of(texts, stops=stops), rows(texts, earliest=9 + least), EVERY)
        np.testing.assert_array_equal(got, processed(processor, texts, logits))


def test_typical_is_transformers(rng):
    for mass in (0.05, 0.3, 0.9, 0.999):
        logits = 2 * rng.normal(size=(4, VOCAB)).astype(np.float32)
        logits -= logits.max(1, keepdims=True)
        want = transformers.TypicalLogitsWarper(mass)(torch.zeros((4, 1)), torch.tensor(logits)).numpy()
        full = {
            "top_k": (0, jnp.int32),
            "top_p": (1, jnp.float32),
            "min_p": (0, jnp.float32),
            "typical_p": (mass, jnp.float32),
        }
        arrays = {name: jnp.full(4, value, dtype) for name, (value, dtype) in full.items()}
        got = jax.jit(filter_logits)(
            logits, SamplerRows(jnp.zeros(4, jnp.uint32), jnp.zeros(4, jnp.int32), jnp.ones(4), **arrays)
        )
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
        assert np.isinf(got).any()


def test_allowed_tokens_and_masks_leave_nothing_else(texts, logits, rng):
    allowed = sorted(rng.permutation(VOCAB)[:7].tolist())
    got = shaped(logits, slots_of(texts, allowed=allowed), rows(texts), EVERY)
    assert all(np.flatnonzero(np.isfinite(row)).tolist() == allowed for row in np.asarray(got))
    bits = rng.random((3, 32 * EVERY.shape[1])) < 0.3
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    got = shaped(logits, slots_of(texts), rows(texts, MASKED), jnp.asarray(masks))
    np.testing.assert_array_equal(got, np.where(bits[:, :VOCAB], logits, -np.inf))


def test_what_the_device_counts_is_what_the_host_would(texts, rng):
    """Slots updated by steps equal what ``seat`` would write; prefill chunks change nothing."""
    made = rng.integers(0, VOCAB, (10, 3))
    asked = {"bad_words": [(1, 2)], "stops": [5], "bias": {4: 1.0}}
    state, now = slots_of(texts, **asked), [(list(p), list(t)) for p, t in texts]
    kinds = rng.choice([0, SHAPED, SAMPLES, SHAPED | SAMPLES], (10, 3))
    for tokens, kind in zip(made, kinds, strict=True):
        state = grown(state, rows(now)._replace(kind=jnp.asarray(kind, jnp.int32)), jnp.asarray(tokens, jnp.int32))
        for (_, text), token, one in zip(now, tokens, kind, strict=True):
            if one == SHAPED | SAMPLES:
                text.append(int(token))
    for got, want in zip(state, slots_of(now, **asked), strict=True):
        np.testing.assert_array_equal(got, want)


def test_rows_that_ask_for_nothing_keep_their_bits(texts, logits):
    kinds = jnp.asarray([0, SHAPED, SAMPLES], jnp.int32)
    asked = rows(texts, repetition=2.0)._replace(kind=kinds)
    got = np.asarray(shaped(logits, slots_of(texts, bias={1: 5.0}), asked, EVERY))
    np.testing.assert_array_equal(got[[0, 2]], logits[[0, 2]])
    assert (got[1] != logits[1]).any()


# In an engine


def run(engine: Engine, prompt: list[int], **fields: Any) -> Request:
    return engines.serve(engine, [{"prompt": prompt, "params": SamplingParams(**fields)}])[0]


def text_of(request: Request) -> list[int]:
    return request.sequences[0].tokens[len(request.prompt) :]


def by_hand(prompt: list[int], count: int, change: Any) -> list[int]:
    """The likeliest tokens by the training forward, its logits changed on the way."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(change(np.array(engines.logprobs_of("llama", "float32", tokens)[-1]), tokens))))
    return tokens[len(prompt) :]


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("way", ["roomy", "tight, recompute"])
def test_the_likeliest_text_under_each_parameter(way, rng):
    """In company, over preemptions and loops on the device: as changed logits of the training forward have it."""
    prompts = [rng.integers(0, VOCAB, 6).tolist() for _ in range(4)]
    begin = 6

    def frequency(row, tokens):
        # Log-probabilities differ from logits by a constant, which only a penalty by sign would see.
        return row - 1.5 * np.bincount(tokens[begin:], minlength=VOCAB)

    def presence(row, tokens):
        return row - 2.0 * (np.bincount(tokens[begin:], minlength=VOCAB) > 0)

    allowed = rng.permutation(VOCAB)[:9].tolist()
    bias = {int(t): float(v) for t, v in zip(rng.permutation(VOCAB)[:20], 3 * rng.normal(size=20), strict=True)}
    changes = {
        "frequency_penalty": (1.5, frequency),
        "presence_penalty": (2.0, presence),
        "logit_bias": (bias, lambda row, tokens: row + [bias.get(t, 0) for t in range(VOCAB)]),
        "allowed_tokens": (tuple(allowed), lambda row, tokens: np.where(np.isin(range(VOCAB), allowed), row, -np.inf)),
    }
    asked = [
        {"prompt": prompt, "params": SamplingParams(max_tokens=20, temperature=0.0, **{name: value})}
        for prompt, (name, (value, _)) in zip(prompts, changes.items(), strict=True)
    ]
    for request, (name, (_, change)) in zip(engines.serve(engines.engine(way), asked), changes.items(), strict=True):
        want = by_hand(request.prompt, 20, change)
        got = text_of(request)
        first = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), 20)
        if first < 20:  # only where two tokens are equally likely
            tokens = [*request.prompt, *got[:first]]
            row = change(np.array(engines.logprobs_of("llama", "float32", tokens)[-1]), tokens)
            assert abs(row[got[first]] - row[want[first]]) < 1e-4, name


@pytest.mark.drawn(3)
def test_repetition_and_bad_words_and_min_tokens(rng):
    engine, prompt = engines.engine("tight, recompute"), rng.integers(0, VOCAB, 5).tolist()
    plain = text_of(run(engine, prompt, max_tokens=16, temperature=0.0))
    text = text_of(run(engine, prompt, max_tokens=16, temperature=0.0, repetition_penalty=1e6))
    assert len({*prompt, *text}) == len(set(prompt)) + 16, "nothing comes twice while there is something new"
    pair, one = tuple(plain[3:5]), (plain[0],)
    text = text_of(run(engine, prompt, max_tokens=16, temperature=0.0, bad_words=(pair, one)))
    assert text != plain
    assert one[0] not in text
    assert pair not in set(itertools.pairwise(text))
    stop = (plain[2],)
    assert len(text_of(run(engine, prompt, max_tokens=16, temperature=0.0, stop_ids=stop))) <= 3
    text = text_of(run(engine, prompt, max_tokens=16, min_tokens=9, temperature=0.0, stop_ids=stop))
    assert len(text) > 9
    assert stop[0] not in text[:9]


def test_prompts_are_scored_without_a_text(rng):
    engine, prompt = engines.engine("roomy"), rng.integers(0, VOCAB, 30).tolist()
    request = run(engine, prompt, max_tokens=0, prompt_logprobs=3)
    (sequence,) = request.sequences
    assert (sequence.tokens, sequence.finish) == (prompt, "length")
    want = engines.logprobs_of("llama", "float32", prompt)
    for i, ((value, rank), best) in enumerate(zip(request.prompt_scores, request.prompt_top, strict=True)):
        assert abs(value - want[i, prompt[i + 1]]) < 1e-4
        assert rank == (want[i] > want[i, prompt[i + 1]]).sum() or np.diff(np.sort(want[i])).min() < 1e-4
        np.testing.assert_allclose([v for _, v in best], np.sort(want[i])[:-4:-1], atol=1e-4)
        np.testing.assert_allclose([want[i, t] for t, _ in best], [v for _, v in best], atol=1e-4)


def test_the_best_of_many_are_given_out_when_all_have_ended(rng):
    engine, prompt = engines.engine("roomy"), rng.integers(0, VOCAB, 5).tolist()
    seed = int(rng.integers(2**32))
    fields = {"max_tokens": 9, "seed": seed, "stop_ids": (1, 2, 3), "temperature": 1.3}
    every = run(engine, prompt, n=6, logprobs=0, **fields)
    for penalty in (0.0, 1.0):
        request = engine.submit(prompt, SamplingParams(n=2, best_of=6, length_penalty=penalty, **fields))
        pieces = []
        while engine.busy:
            pieces += engine.step()
        ranked = sorted(every.sequences, key=lambda s: -sum(s.logprobs) / len(s.logprobs) ** penalty)
        assert [piece.number for piece in pieces] == [0, 1]
        assert [list(piece.tokens) for piece in pieces] == [s.tokens[5:] for s in ranked[:2]]
        assert [s.tokens for s in request.outputs] == [s.tokens for s in ranked[:2]]
        assert all(piece.finish and not piece.logprobs for piece in pieces)


class Reference(transformers.PreTrainedModel, transformers.GenerationMixin):
    """The training forward, for transformers' own beam search."""

    config_class = transformers.PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, config: Any):
        super().__init__(config)
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def prepare_inputs_for_generation(self, input_ids: Any, **_: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def forward(self, input_ids: Any, **_: Any) -> Any:
        rows = [engines.logprobs_of("llama", "float32", ids) for ids in input_ids.tolist()]
        return transformers.modeling_outputs.CausalLMOutput(logits=torch.tensor(np.stack(rows)))


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_beam_search_is_transformers(penalty, rng):
    """A model with one token to end at; the searches of several requests run side by side."""
    model = Reference(transformers.PretrainedConfig(vocab_size=VOCAB))
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (5, 11)]
    stop = int(np.argsort(engines.logprobs_of("llama", "float32", prompts[0])[-1])[-3])
    params = SamplingParams(max_tokens=12, beams=2, n=2, length_penalty=penalty, stop_ids=(stop,), logprobs=1)
    asked = [{"prompt": prompt, "params": params} for prompt in prompts]
    for request in engines.serve(engines.engine("roomy"), asked):
        want = model.generate(
            torch.tensor([request.prompt]), num_beams=2, num_return_sequences=2, max_new_tokens=12, do_sample=False,
            length_penalty=penalty, eos_token_id=stop, pad_token_id=stop, use_cache=False, output_scores=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        first = len(request.prompt)
        for sequence, row, value in zip(request.outputs, want.sequences, want.sequences_scores, strict=True):
            found = sum(sequence.logprobs) / len(sequence.logprobs) ** penalty
            assert abs(found - float(value)) < 1e-3, "texts as good, if not the same"
            if float(abs(want.sequences_scores[0] - want.sequences_scores[1])) > 1e-3:
                assert sequence.tokens == [*request.prompt, *row[first : len(sequence.tokens)].tolist()]
            forward = engines.logprobs_of("llama", "float32", sequence.tokens)
            own = [forward[i - 1, sequence.tokens[i]] for i in range(first, len(sequence.tokens))]
            np.testing.assert_allclose(sequence.logprobs, own, atol=1e-4)
            assert [len(best) for best in sequence.top] == [1] * len(own)


@pytest.mark.parametrize("landed", [False, True])
def test_a_cancelled_search_leaves_nothing(landed, rng):
    """Nor does a round whose tokens have landed, since weights were replaced, but were not given out."""
    engine = engines.engine("roomy")
    request = engine.submit(rng.integers(0, VOCAB, 5).tolist(), SamplingParams(max_tokens=20, beams=3, n=2))
    for _ in range(5):
        assert engine.step() == []
    if landed:
        while not engine._in_flight:
            assert engine.step() == []
        engine.swap(engine.runner.params)
        assert engine._cancelled
    engine.cancel(request)
    pieces = []
    while engine.busy:
        pieces += engine.step()
    assert [(piece.request, piece.finish) for piece in pieces] == [(request, "cancelled")] * 2
    engines.check_books(engine)


def test_texts_with_their_stop_and_their_prompt():
    writer = writers.writer()
    asked = SamplingParams(max_tokens=40, temperature=1.5, seed=5, ignore_eos=True)

    def text(**fields: Any) -> str:
        request = writer.submit(list(b"ab"), dataclasses.replace(asked, **fields))
        pieces = []
        while writer.busy:
            pieces += [piece.text for piece in writer.step()]
        assert "".join(pieces) == request.sequences[0].text
        return request.sequences[0].text

    plain = text()
    stop = plain[8:10]
    at = plain.index(stop)
    assert text(stop=(stop,)) == plain[:at]
    assert text(stop=(stop,), include_stop=True) == plain[: at + len(stop)]
    assert text(stop=("never", stop, stop[0]), include_stop=True).endswith((stop, stop[0]))
    assert text(echo=True) == "ab" + plain
    assert text(echo=True, max_tokens=0) == "ab"
    later = text(stop=(stop,), min_tokens=30)
    assert len(later) > at
    assert "q" not in text(bad_words=("q",), logit_bias={ord("q"): 9.0})
    assert set(text(allowed_tokens=tuple(b"xyz"))) <= set("xyz")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [-1]),
        ("typical_p", [0.0, 1.1, float("nan")]),
        ("repetition_penalty", [0.0, -1.0, float("inf"), float("nan")]),
        ("presence_penalty", [2.1, -3.0, float("nan")]),
        ("frequency_penalty", [2.1, float("nan")]),
        ("min_tokens", [-1, 200]),
        ("logit_bias", [{3: float("nan")}, {3: float("inf")}]),
        ("allowed_tokens", [()]),
        ("bad_words", [("",), ((),)]),
        ("beams", [0]),
        ("best_of", [0]),
        ("length_penalty", [float("inf")]),
        ("prompt_logprobs", [-1, True]),
        ("logprobs", [True]),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} = "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "^max_tokens = 0; give 1 or more, or request"),
        ({"beams": 3, "n": 4}, "^n = 4; a search of 3 beams"),
        ({"beams": 2, "top_k": 3}, "^top_k = 3; it does not go with a beam search"),
        ({"beams": 2, "temperature": 0.5}, "^temperature = 0.5; a beam search does not sample"),
        ({"bad_words": ("word",)}, "bad_words that are strings need an engine with a tokenizer"),
        ({"bad_words": ((1,) * 9,)}, "the longest may have 8 tokens"),
        ({"logit_bias": {40: 1.0}}, "logit_bias holds token 40"),
        ({"allowed_tokens": (40,)}, "allowed_tokens holds token 40"),
        ({"echo": True}, "echo needs an engine with a tokenizer"),
        ({"prompt_logprobs": 4}, "prompt_logprobs = 4; this engine was built with top_logprobs = 3"),
        ({"beams": 4}, "beams = 4 with 0 stop tokens need an engine with top_logprobs = 4"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        engines.engine("roomy").submit([1, 2], SamplingParams(**{"max_tokens": 5} | fields))
