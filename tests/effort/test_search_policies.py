"""Policies that go on from what they have: beams under a verifier, revisions, difficulty bins, decomposed problems."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from jaxllm.effort import (
    AdaptiveBestOfK,
    ArithmeticVerifier,
    BestOfN,
    ComputeOptimal,
    Majority,
    RegexVerifier,
    Revision,
    SampleConfiguration,
    SampleMixture,
    SamplingOverrides,
    SelectiveAllocation,
    SuccessProbe,
    VerifierBeam,
    load_policy,
    save_policy,
)
from jaxllm.effort.compute_optimal import held_out_success
from jaxllm.effort.sample_rounds import SEED_STRIDE
from jaxllm.infer import Grammar, SamplingParams
from tests.effort.drivers import TOKENIZER, ScriptedModel

PARAMS = SamplingParams(max_tokens=40)


class Digits:
    """Scores partial texts by their digits: the sum of the first of each line."""

    def score(self, prompt: str, completion: str) -> float:
        return float(sum(int(line[0]) for line in completion.splitlines() if line[:1].isdigit()))


def test_beams_find_what_exhaustive_search_finds_when_all_are_kept():
    """Each step offers 3 digits, in the order of a hash of the text so far; four steps, and then the end."""

    def write(prompt: str, number: int) -> str:
        lines = prompt.count("\n")
        return "end" if lines == 4 else f"{(sum(map(ord, prompt)) + 3 * (number % 3)) % 10}\n"

    model = ScriptedModel(write)
    (found,) = model.solve(VerifierBeam(243, 3, Digits()), ["?"], PARAMS)
    best = 0.0
    for path in itertools.product(range(3), repeat=4):
        text = "?"
        for number in path:
            text += write(text, number)
        best = max(best, Digits().score("", text.removeprefix("?")))
    assert found.score == best
    assert found.best.text.endswith("end")
    assert found.best.tokens == (*TOKENIZER.encode(found.best.text).tolist(), TOKENIZER.eos_id)


def test_beams_keep_n_over_branch_and_ask_for_branch_of_each():
    model = ScriptedModel(lambda prompt, number: f"{number % 10}\n")
    (found,) = model.solve(VerifierBeam(6, 3, Digits(), rounds=3), ["?"], PARAMS)
    assert [[one.params.n for one in asked] for asked in model.requests] == [[6], [3, 3], [3, 3]]
    assert found.best.text == "5\n2\n2\n"
    assert found.best.finish == "length"  # the rounds ended before the text did
    assert found.tokens == model.generated
    # What a client stops at ends a beam, also across the end of a step.
    (stopped,) = ScriptedModel(lambda prompt, number: "\n" if prompt.endswith("\n") else f"{number}\n").solve(
        VerifierBeam(4, 2, Digits()), ["?"], dataclasses.replace(PARAMS, stop=("\n\n",))
    )
    assert stopped.best.text == "3"
    assert stopped.best.finish == "stop"


def test_beams_keep_max_tokens_and_the_budget():
    model = ScriptedModel(lambda prompt, number: "7777\n")
    (found,) = model.solve(VerifierBeam(4, 2, Digits(), budget=60), ["?"], SamplingParams(max_tokens=13))
    assert len(found.best.tokens) == 13
    assert found.tokens == model.generated <= 60
    with pytest.raises(ValueError, match="grammar does not go with verifier_beam"):
        model.solve(VerifierBeam(), ["?"], SamplingParams(grammar=Grammar.regex("a")))


def test_revisions_see_the_answers_before_them_and_stop_at_an_accepted_one():
    def write(prompt: str, number: int) -> str:
        return f" {44 + prompt.count('again')}"

    model = ScriptedModel(write)
    policy = Revision(2, 5, ArithmeticVerifier(), again=" again", accept=1.0)
    (found,) = model.solve(policy, ["12+34="], PARAMS)
    prompts = [[TOKENIZER.decode(list(one.prompt)) for one in asked] for asked in model.requests]
    assert prompts[:3] == [["12+34="], ["12+34= 44 again"] * 2, ["12+34= 44 again 45 again"] * 2]
    assert len(prompts) == 3
    assert (found.best.text, found.score, len(found.candidates)) == (" 46", 1.0, 6)
    short = ScriptedModel(write, max_len=6 + 40 + 9)
    (cut,) = short.solve(dataclasses.replace(policy, accept=None), ["12+34="], PARAMS)
    assert len(short.requests) == 2  # the next revision would not fit the model
    assert cut.tokens == short.generated
    last = ScriptedModel(write)
    last.solve(dataclasses.replace(policy, accept=None, context=1), ["12+34="], PARAMS)
    assert TOKENIZER.decode(list(last.requests[-1][0].prompt)).count("again") == 1


def test_seeded_requests_of_a_policy_draw_apart_from_each_other():
    model = ScriptedModel(lambda prompt, number: "1\n")
    model.solve(Revision(2, 2), ["?"], dataclasses.replace(PARAMS, seed=3))
    seeds = {one.params.seed: one.params.n for asked in model.requests for one in asked}
    drawn = sorted((seed + k * SEED_STRIDE) % 2**32 for seed, n in seeds.items() for k in range(n))
    assert len(set(drawn)) == len(drawn) == 6


PROBE = SuccessProbe((4.0,), 0.0)


def hidden(ids: object) -> list[float]:
    """Prompts that begin with a are easy."""
    return [1.0 if next(iter(ids)) == ord("a") else -1.0]  # type: ignore[arg-type]


def test_compute_optimal_chooses_by_difficulty_and_is_the_best_of_all_assignments(rng):
    choices = (BestOfN(1), BestOfN(3), Majority(5))
    difficulty, success = rng.random(60), rng.integers(0, 2, (60, 3)).astype(float)
    tokens = rng.integers(1, 9, (60, 3)).astype(float)
    policy = ComputeOptimal.fit(PROBE, difficulty, success, tokens, choices, bins=4, budget=500)
    bins = np.searchsorted(policy.edges, difficulty, side="right")
    assert np.bincount(bins).tolist() == [15] * 4

    def value(assigned: tuple[int, ...]) -> tuple[float, float]:
        rows = np.arange(60), np.array(assigned)[bins]
        return success[rows].sum(), -tokens[rows].sum()

    chosen = tuple(choices.index(one) for one in policy.choices)  # type: ignore[arg-type]
    assert value(chosen)[0] == max(value(one) for one in itertools.product(range(3), repeat=4))[0]
    two = ComputeOptimal(PROBE, (0.5,), (BestOfN(2), Majority(4)), budget=200)
    model = ScriptedModel(lambda prompt, number: "1", hidden)
    found = model.solve(two, ["a", "b"], PARAMS)
    assert [len(one.candidates) for one in found] == [2, 4]
    with pytest.raises(ValueError, match="give the budget to compute_optimal"):
        ComputeOptimal(PROBE, (), (BestOfN(budget=9),))


def test_held_out_success_is_of_prompts_that_did_not_choose():
    difficulty = np.array([0, 1, 2, 3, 10, 11, 12, 13]) / 20
    success = np.array([[1, 0]] * 4 + [[0, 1]] * 4, float)
    folds = np.arange(8) % 2
    assert held_out_success(difficulty, success, np.ones((8, 2)), folds, bins=2) == (1.0, 1.0)
    assert held_out_success(difficulty, success, np.ones((8, 2)), folds, bins=1) == (0.5, 1.0)


def test_adaptive_best_of_k_shares_the_budgets_of_prompts():
    model = ScriptedModel(lambda prompt, number: "1", hidden)
    policy = AdaptiveBestOfK(PROBE, 0.01, ArithmeticVerifier(), most=9, budget=12)
    easy, hard = model.solve(policy, ["a", "b"], SamplingParams(max_tokens=4))
    assert len(easy.candidates) < len(hard.candidates) <= 9
    assert easy.tokens + hard.tokens == model.generated <= 24
    (alone,) = ScriptedModel(lambda prompt, number: "1", hidden).solve(
        dataclasses.replace(policy, budget=None), ["b"], SamplingParams(max_tokens=4)
    )
    p = 1 / (1 + np.exp(4))
    assert len(alone.candidates) == sum(p * (1 - p) ** k >= 0.01 for k in range(9)) > 1


def test_a_mixture_draws_its_counts_and_the_budget_takes_from_the_last():
    parts = (SampleConfiguration(3, SamplingOverrides(temperature=0.2)), SampleConfiguration(2, before=" think:"))
    model = ScriptedModel(lambda prompt, number: "46" if prompt.endswith(":") else "45")
    (found,) = model.solve(SampleMixture(parts, ArithmeticVerifier(), budget=200), ["12+34="], PARAMS)
    ((first, second),) = model.requests
    assert [(one.params.n, one.params.temperature) for one in (first, second)] == [(3, 0.2), (2, 1.0)]
    assert found.best.text == "46"
    cut = ScriptedModel(lambda prompt, number: "46")
    cut.solve(SampleMixture(parts, ArithmeticVerifier(), budget=160), ["12+34="], PARAMS)
    assert [one.params.n for one in cut.requests[0]] == [3, 1]


class Thinker(ScriptedModel):
    """Lists two steps, of which it calls the one with a capital hard."""

    def __init__(self) -> None:
        super().__init__(self.text)

    def text(self, prompt: str, number: int) -> str:
        return " add\n2. Multiply\n\nmore" if prompt.endswith("\n1.") else f" r{number}"

    def _answer(self, request):  # type: ignore[no-untyped-def]
        found = super()._answer(request)
        if request.params.allowed_tokens is None:
            return found
        prompt = TOKENIZER.decode(list(request.prompt))
        yes = "Multiply" in prompt[prompt.index("Step:") :]
        value = -0.1 if yes == (request.params.allowed_tokens == (ord("Y"),)) else -3.0
        return [dataclasses.replace(found[0], logprobs=(value,))]


def test_scale_solves_the_steps_in_order_in_the_mode_of_each():
    model = Thinker()
    policy = SelectiveAllocation(
        BestOfN(1), BestOfN(3, RegexVerifier("r2"), model="dear"), yes="Y", no="N", budget=600, plan_tokens=30
    )
    (found,) = model.solve(policy, ["do it"], SamplingParams(max_tokens=8))
    plan, questions, *work = model.requests
    assert plan[0].params.stop == ("\n\n",)
    assert len(questions) == 4  # two answers for each of two steps
    texts = [TOKENIZER.decode(list(one.prompt)) for (one,) in work]
    assert texts[0] == "do it\n\nStep 1: add\nResult:"
    assert texts[1] == texts[0] + " r0\n\nStep 2: Multiply\nResult:"
    assert texts[2] == texts[1] + " r2\n\nThe final answer:"
    assert [(one.params.n, one.model) for (one,) in work] == [(1, ""), (3, "dear"), (1, "")]
    assert found.best.text == " r0"
    assert found.tokens == model.generated <= 600
    with pytest.raises(ValueError, match="one step may take"):
        model.solve(dataclasses.replace(policy, budget=50), ["do it"], SamplingParams(max_tokens=8))


@pytest.mark.parametrize(
    "policy",
    [
        VerifierBeam(6, 3, RegexVerifier("x"), budget=99),
        Revision(1, 2, accept=0.5),
        ComputeOptimal(PROBE, (0.1, 0.7), (BestOfN(1), Majority(3), VerifierBeam())),
        AdaptiveBestOfK(PROBE, 0.125, most=7),
        SampleMixture((SampleConfiguration(2, SamplingOverrides(top_p=0.3), "adapter", "think"),)),
        SelectiveAllocation(BestOfN(1), Revision(1, 1), threshold=0.25),
    ],
    ids=lambda policy: policy.policy,
)
def test_policy_files_round_trip(tmp_path, policy):
    save_policy(policy, tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json") == policy
