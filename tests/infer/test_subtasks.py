"""Subtasks leave a sequence when they are finished: which tokens, what the sequence is then, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from jaxllm.infer import EngineConfig, SamplingParams
from jaxllm.infer.engine.validation import check_request
from jaxllm.infer.scheduling.sequence import Request, Sequence
from jaxllm.infer.scheduling.subtasks import Subtasks, SubtaskStack
from jaxllm.text import ByteTokenizer
from tests.infer import engines

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, logprobs=0)


def written(text: str, kept: int, start: str = "<", end: str = ">") -> tuple[str, list[str]]:
    """What is left of a text that is written token by token, and what has left it, in order."""
    rule = Subtasks(tuple(start.encode()), tuple(end.encode()), kept)
    request = Request(0, [], SamplingParams(subtasks=rule), b"", 0, frozenset())
    sequence = Sequence(request, 0, 0, [], subtasks=SubtaskStack(rule))
    for token in text.encode():
        sequence.tokens.append(token)
        assert sequence.subtasks is not None
        if (span := sequence.subtasks.push(sequence.tokens)) is not None:
            sequence.cut(*span, 4)
    assert bytes(sequence.completion) == text.encode()
    assert sequence.generated == len(text)
    return bytes(sequence.tokens).decode(), [bytes(tokens).decode() for _, tokens in sequence.cuts]


@pytest.mark.parametrize(
    ("text", "kept", "left", "gone"),
    [
        ("a<bc>d<ef>g", 0, "a<>d<>g", ["bc", "ef"]),
        ("a<bc>d<ef>g", 1, "a<>d<ef>g", ["bc"]),
        ("a<bc>d<ef>g<h>", 1, "a<>d<>g<h>", ["bc", "ef"]),
        ("a<b<c>d>e", 0, "a<>e", ["c", "b<>d"]),
        ("a<b<c>d>e", 1, "a<b<c>d>e", []),  # one inside of another counts with it
        ("a<b<c>d>e<f>", 1, "a<>e<f>", ["b<c>d"]),
        ("a<b<c>d<e>f>g<h>", 1, "a<>g<h>", ["c", "b<>d<e>f"]),
        (">a<>b<c", 0, ">a<>b<c", []),  # nothing to end, nothing inside, not ended
        ("<<a>>b", 0, "<>b", ["a", "<>"]),
    ],
)
def test_what_leaves(text: str, kept: int, left: str, gone: list[str]) -> None:
    assert written(text, kept) == (left, gone)


def test_markers_of_several_tokens_do_not_overlap() -> None:
    assert written("[[a]]b", 0, "[[", "]]") == ("[[]]b", ["a"])
    assert written("ababa", 0, "ab", "ba") == ("ababa", [])  # begun twice
    assert written("abxbay", 0, "ab", "ba") == ("abbay", ["x"])
    assert written("abay", 0, "ab", "ba") == ("abay", [])  # the second marker would begin inside of the first


@pytest.mark.drawn(3)
def test_a_model_continues_after_a_cut_as_after_a_prompt_of_what_is_left() -> None:
    engine = engines.build(engines.ENGINES["roomy"])
    rule = Subtasks((3,), (4,), 1)
    likely = dataclasses.replace(GREEDY, temperature=1.0, logit_bias={3: 3.5, 4: 4.0}, subtasks=rule)
    given = [{"prompt": [7, 8, 9], "params": dataclasses.replace(likely, seed=seed)} for seed in range(6)]
    sequences = [sequence for request in engines.serve(engine, given) for sequence in request.sequences]
    assert sum(one.left for one in sequences) == engine.metrics.cut_tokens
    sequence = next(one for one in sequences if one.left)  # some seed draws both markers
    assert engine.metrics.recomputed_tokens > 0
    scored = dataclasses.replace(GREEDY, max_tokens=1, prompt_logprobs=0)
    (again,) = engines.serve(engine, [{"prompt": sequence.tokens, "params": scored}])
    assert sequence.logprobs[-1] == pytest.approx(again.prompt_scores[-1][0], abs=1e-4)


def test_a_position_is_sampled_anew_the_second_time() -> None:
    request = Request(0, [1], SamplingParams(), b"", 7, frozenset())
    sequence = Sequence(request, 0, 0, [1, 2, 3, 4])
    before = sequence.seed
    sequence.cut(1, 3, 4)
    assert sequence.seed != before
    assert sequence.remaining == 128 - 3


@pytest.mark.drawn(3)
def test_a_text_without_room_for_the_next_token_ends() -> None:
    engine = engines.build(engines.ENGINES["roomy"])
    params = dataclasses.replace(GREEDY, max_tokens=500, subtasks=Subtasks((3,), (4,)), bad_words=((3,), (4,)))
    (request,) = engines.serve(engine, [{"prompt": [7] * 20, "params": params}])
    (sequence,) = request.sequences
    assert (len(sequence.tokens), sequence.finish) == (engines.LONGEST, "length")


def test_text_becomes_markers() -> None:
    assert Subtasks.of_text(ByteTokenizer(), "<s>", "</s>", 3) == Subtasks(tuple(b"<s>"), tuple(b"</s>"), 3)


def test_what_is_refused() -> None:
    for start, end in (((), (1,)), ((1,), ()), ((1, 2), (1, 2))):
        with pytest.raises(ValueError, match="give two different markers"):
            Subtasks(start, end)
    with pytest.raises(ValueError, match="kept = -1; give 0 or more"):
        Subtasks((1,), (2,), -1)
    rule = Subtasks((1,), (2,))
    with pytest.raises(ValueError, match=r"subtasks = .*does not go with a beam search"):
        SamplingParams(beams=2, temperature=0.0, subtasks=rule)

    def check(config: EngineConfig, prompt: int = 3, rule: Subtasks = rule) -> None:
        params = SamplingParams(max_tokens=1000, subtasks=rule)
        check_request([1] * prompt, params, (), (), config, 40, 64, None)

    check(EngineConfig(), 63)
    with pytest.raises(ValueError, match="64 tokens of prompt and 1 new ones are 65"):
        check(EngineConfig(), 64)
    with pytest.raises(ValueError, match="subtasks holds token 40"):
        check(EngineConfig(), rule=Subtasks((40,), (2,)))
    with pytest.raises(ValueError, match="subtasks do not go with speculation"):
        check(EngineConfig(speculate="ngram"))
    with pytest.raises(ValueError, match="subtasks do not go with pools"):
        check(EngineConfig(pools="prefill=tensor:1 x1, decode=tensor:1 x1"))
