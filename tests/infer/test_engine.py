"""Engine: served log-probabilities equal the training forward's, whatever else is served."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import jaxllm.infer
from jaxllm.infer import Engine, EngineConfig, Request, SamplingParams
from jaxllm.models import functional
from jaxllm.text import ByteTokenizer
from tests import quick, tiny
from tests.infer import engines

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [8, 4]]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


def write(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[list[int]]]:
    """New tokens of every completion of every prompt."""
    made = engines.serve(engine, [{"prompt": prompt, "params": params} for prompt in prompts])
    return [[s.tokens[len(r.prompt) :] for s in r.sequences] for r in made]


def test_temperature_zero_takes_the_likeliest_token_of_the_full_forward():
    made = write(engines.engine("roomy"), PROMPTS, GREEDY)
    for prompt, (row,) in zip(PROMPTS, made, strict=True):
        assert len(row) == 20
        logits = engines.logprobs_of("llama", "float32", prompt + row)[len(prompt) - 1 : -1]
        top = np.sort(logits, axis=-1)
        sure = top[:, -1] - top[:, -2] > 1e-4  # a tie within rounding may go either way
        np.testing.assert_array_equal(np.array(row)[sure], logits.argmax(-1)[sure])
        assert sure.mean() > 0.8
    assert len({token for (row,) in made for token in row}) > 5, "not one token over and over"


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("way", ["roomy", "tight, swap"])
def test_random_traffic_is_the_training_forward(way, rng):
    engine = engines.engine(way)
    made = engines.serve(engine, engines.traffic(rng, engine.config, 14))
    assert engines.error("llama", "float32", made) < 5e-4


@pytest.mark.drawn(1)
def test_equal_seeds_give_equal_tokens_in_any_company(rng):
    """Alone, with others, one token at a time, with pages that are short: a draw is of its seed and its place."""
    asked = SamplingParams(max_tokens=15, seed=5, top_k=9)
    (want,), (again,) = write(engines.engine("roomy"), [PROMPTS[0]] * 2, asked)
    assert want == again
    (other,) = write(engines.engine("roomy"), PROMPTS[:1], dataclasses.replace(asked, seed=6))[0]
    assert other != want
    for way in ("roomy", "tight, swap"):
        engine = engines.engine(way)
        crowd = [{"prompt": PROMPTS[0], "params": asked, "at": 3}, *engines.traffic(rng, engine.config, 8)]
        assert engines.serve(engine, crowd)[0].sequences[0].tokens[5:] == want


def test_a_text_goes_on_as_it_would_have():
    """A draw depends on the place that it fills: five tokens made and given back lead to the same sixth."""
    engine, params = engines.engine("roomy"), SamplingParams(max_tokens=12, seed=3)
    (made,) = write(engine, PROMPTS[:1], params)[0]
    (again,) = write(engine, [PROMPTS[0] + made[:5]], dataclasses.replace(params, max_tokens=7))[0]
    assert made[5:] == again


def test_continuations_share_their_prompt_and_draw_apart():
    engine = engines.engine("roomy")
    before = engine.metrics.prompt_tokens
    prompt = list(range(21))
    made = write(engine, [prompt], SamplingParams(max_tokens=10, seed=1, n=4))[0]
    assert len({tuple(row) for row in made}) == 4
    assert engine.metrics.prompt_tokens - before == 21 + 3, "the others compute the last token of the prompt only"
    assert write(engine, [prompt], SamplingParams(max_tokens=10, seed=1))[0][0] == made[0]


def test_a_prompt_that_was_seen_is_not_computed_again():
    engine = engines.engine("roomy")
    prompt = [7] * 30
    for _ in range(2):
        before = engine.metrics.prompt_tokens
        made = write(engine, [prompt], GREEDY)
        spent = engine.metrics.prompt_tokens - before
    assert spent == 30 - 24, "three pages of eight are found"
    before = engine.metrics.prompt_tokens
    (request,) = engines.serve(engine, [{"prompt": prompt, "params": GREEDY, "salt": "another"}])
    assert engine.metrics.prompt_tokens - before == 30, "another salt finds nothing"
    assert request.sequences[0].tokens[30:] == made[0][0]
    whole = prompt[:24]
    before = engine.metrics.prompt_tokens
    write(engine, [whole], GREEDY)
    assert engine.metrics.prompt_tokens - before == 1, "of a prompt found whole, the last token is computed"


@pytest.mark.drawn(0.3)
def test_pages_before_a_window_are_given_back():
    config = dataclasses.replace(engines.ENGINES["roomy"], pages=17, page_size=4, max_sequences=1, decode_steps=1)
    engine = engines.build(config, "mistral")
    engine.submit([1], dataclasses.replace(GREEDY, max_tokens=60))
    held = []
    while engine.busy:
        engine.step()
        engines.check_books(engine)
        held += [sum(page >= 0 for page in s.pages[0]) for s in engine.scheduler.running]
    assert max(held) <= 4, "9 positions are in four pages of 4 at most"
    assert engine.runner.spec.pages == (17,)


def test_stop_tokens_and_lengths():
    engine = engines.engine("roomy")
    (made,) = write(engine, PROMPTS[:1], GREEDY)[0]
    stop = made[7]
    first = made.index(stop)
    for stops in ((stop,), (*range(engines.VOCAB - 1, engines.VOCAB - 20, -1), stop)):
        ended = write(engine, PROMPTS[:1], dataclasses.replace(GREEDY, stop_ids=stops))[0][0]
        place = min(made.index(token) for token in stops if token in made)
        assert ended == made[: place + 1]
        assert place <= first
    for length in (1, 2, 8, 9, 17):
        params = dataclasses.replace(GREEDY, max_tokens=length)
        (request,) = engines.serve(engine, [{"prompt": PROMPTS[0], "params": params}])
        assert request.sequences[0].tokens[5:] == made[:length]
        assert request.sequences[0].finish == "length"


@pytest.mark.drawn(0.3)
def test_stop_texts_end_a_text_and_are_held_back():
    """Nothing of a stop string is emitted, nor text that may become one until it does not."""
    tokenizer = ByteTokenizer()
    config = tiny.decoder(dtype="float32", vocab_size=tokenizer.vocab_size, layers=1)
    params = jax.tree.map(np.asarray, quick.params(config, seed=1, scale=0.5))
    sizes = EngineConfig(
        max_sequences=2, max_batched_tokens=8, max_len=64, pages=20, page_size=8, samplers=("plain",), decode_steps=5
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", quick.jit)
        engine = Engine.of(functional(config), jax.device_put(params), sizes, tokenizer=tokenizer, strict=True)

    def run(params: SamplingParams) -> tuple[list[str], Request]:
        request, texts = engine.submit(list(b"ab"), params), []
        while engine.busy:
            texts += [piece.text for piece in engine.step()]
        return texts, request

    asked = SamplingParams(max_tokens=50, temperature=2.0, seed=0, ignore_eos=True)
    seed = next(s for s in range(50) if len(run(dataclasses.replace(asked, seed=s))[1].sequences[0].text) > 30)
    asked = dataclasses.replace(asked, seed=seed)
    _, request = run(asked)
    text = request.sequences[0].text
    assert text == tokenizer.decode(request.sequences[0].tokens[2:])
    stop = text[20:24]
    at = text.index(stop)
    pieces, request = run(dataclasses.replace(asked, stop=("never", stop)))
    assert "".join(pieces) == request.sequences[0].text == text[:at]
    assert request.sequences[0].finish == "stop"
    # What only looks like the beginning of a stop text is given out in the end.
    pieces, request = run(dataclasses.replace(asked, stop=(text[-2:] + "\0\1\2",)))
    assert "".join(pieces) == text
    with pytest.raises(ValueError, match="stop strings need an engine with a tokenizer"):
        engines.engine("roomy").submit([1], SamplingParams(max_tokens=5, stop=("x",)))


def test_cancelled_requests_end_and_leave_nothing():
    engine = engines.engine("roomy")
    first = engine.submit(PROMPTS[0], GREEDY)
    second = engine.submit(PROMPTS[1], dataclasses.replace(GREEDY, n=2))
    for _ in range(3):
        engine.step()
    engine.cancel(second)
    engine.cancel(second)
    ends = []
    while engine.busy:
        ends += [(piece.request.id, piece.finish) for piece in engine.step() if piece.finish]
    assert sorted(ends) == [(first.id, "length"), (second.id, "cancelled"), (second.id, "cancelled")]
    assert len(first.sequences[0].tokens) == 25
    engines.check_books(engine)


@pytest.mark.parametrize(
    ("prompt", "fields", "words"),
    [
        ([], {}, "a prompt is empty"),
        ([1, 40], {}, "token 40, but the vocabulary has 40 tokens"),
        ([-3], {}, "token -3, but"),
        ([1], {"stop_ids": (40,)}, "stop_ids holds token 40"),
        ([1] * 60, {"max_tokens": 5}, "60 tokens of prompt and 5 new ones are 65; this engine's sequences have 64"),
        ([1], {"logprobs": 4, "max_tokens": 5}, "logprobs = 4; this engine was built with top_logprobs = 3"),
    ],
)
def test_what_cannot_be_generated_from_is_refused(prompt: list[int], fields: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        engines.engine("roomy").submit(prompt, SamplingParams(**fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_batched_tokens": 3}, "max_batched_tokens = 3 is less than max_sequences = 16"),
        ({"max_sequences": 0}, "max_sequences = 0"),
        ({"samplers": ()}, "samplers"),
        ({"buckets": (16, 128)}, "buckets"),
        ({"buckets": (256, 16)}, "buckets"),
        ({"batch_invariant": True}, "preemption = 'swap'"),
        ({"batch_invariant": True, "preemption": "swap"}, "samplers"),
        ({"batch_invariant": True, "preemption": "swap", "samplers": ("full",)}, "decode_steps = 1"),
        ({"top_logprobs": 0}, "top_logprobs = 0"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(fields: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        EngineConfig(**fields)


def test_buckets_end_at_the_budget():
    assert EngineConfig(max_sequences=10, max_batched_tokens=300).prompt_buckets == (19, 75, 300)
    assert EngineConfig(max_sequences=10, max_batched_tokens=300).decode_buckets == (1, 2, 4, 8, 10)
    assert EngineConfig(max_sequences=1, max_batched_tokens=5, buckets=(2, 5)).prompt_buckets == (2, 5)


def test_too_few_pages_are_refused():
    with pytest.raises(ValueError, match="pages = 8, but one sequence of 64 tokens needs 9 of 8"):
        engines.build(dataclasses.replace(engines.ENGINES["roomy"], pages=8))


def test_old_names_work_and_warn():
    with pytest.warns(FutureWarning, match="is now (max_sequences|max_batched_tokens|decode_steps)") as heard:
        config = EngineConfig(sequences=2, budget=8, loop=1)
    assert len(heard) == 3
    assert config == EngineConfig(max_sequences=2, max_batched_tokens=8, decode_steps=1)
    with pytest.warns(FutureWarning, match="OutputDelta"):
        assert jaxllm.infer.Piece is jaxllm.infer.OutputDelta
    engine = engines.engine("roomy")
    with pytest.warns(FutureWarning, match="runner"):
        assert engine.device is engine.runner
