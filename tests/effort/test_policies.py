"""Effort policies: what they draw and choose, their budgets, verifiers, and policy files."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.effort import (
    ArithmeticVerifier,
    BestOfN,
    JudgeVerifier,
    Majority,
    ProbeVerifier,
    RegexVerifier,
    SamplingOverrides,
    SuccessProbe,
    load_policy,
    save_policy,
)
from jaxllm.effort.verifiers import arithmetic_value
from jaxllm.infer import SamplingParams
from tests.effort.drivers import ScriptedModel


def counting(prompt: str, number: int) -> str:
    """Right in every fifth sample."""
    return "46" if number % 5 == 4 else f"4{number}"


@pytest.mark.parametrize(
    ("prompt", "value"),
    [
        ("12+34=", Fraction(46)),
        ("What is 2 * (3 - 10)?", Fraction(-14)),
        ("Question 7: 007 / 2 =", Fraction(7, 2)),
        ("Q1. 1.05+0.05 = ?", Fraction(11, 10)),
        ("3/0=", None),
        ("2**999999", None),
        ("no expression", None),
        ("((((", None),
    ],
)
def test_arithmetic_is_exact(prompt, value):
    assert arithmetic_value(prompt) == value
    if value is not None and value.denominator == 1:
        assert ArithmeticVerifier().score(prompt, f" {value}, I think") == 1
        assert ArithmeticVerifier().score(prompt, f"{value}1") == 0


def test_best_of_n_returns_what_the_verifier_scores_highest():
    model = ScriptedModel(counting)
    (found,) = model.solve(BestOfN(8, ArithmeticVerifier()), ["12+34="])
    assert (found.best.text, found.score, len(found.candidates)) == ("46", 1.0, 8)
    assert len(model.requests) == 1
    assert found.tokens == model.generated


def test_a_wave_ends_the_drawing_once_a_candidate_is_accepted():
    model = ScriptedModel(counting)
    (found,) = model.solve(BestOfN(20, ArithmeticVerifier(), wave=3, accept=1.0), ["12+34="])
    assert [request.params.n for (request,) in model.requests] == [3, 3]
    assert [request.drawn for (request,) in model.requests] == [0, 3]
    assert found.score == 1
    assert len(found.candidates) == 6


def test_majority_counts_answers_and_weights_decide():
    texts = ["so 7", "it is 8", "8", "so 7 or 9", "none"]
    model = ScriptedModel(lambda prompt, number: texts[number])
    (found,) = model.solve(Majority(5), ["?"])
    assert found.best.text == "it is 8"
    assert found.score == 2
    (weighted,) = ScriptedModel(lambda prompt, number: texts[number]).solve(
        Majority(5, verifier=RegexVerifier("^so")), ["?"]
    )
    assert weighted.best.text == "so 7"
    assert weighted.score == 1
    (none,) = ScriptedModel(lambda prompt, number: "none").solve(Majority(2), ["?"])
    assert none.score == 0
    assert none.best.text == "none"


def test_a_budget_is_never_exceeded_and_short_completions_make_room_for_more():
    policy = BestOfN(50, ArithmeticVerifier(), budget=40)
    model = ScriptedModel(lambda prompt, number: "4" * (1 + number % 3))
    (found,) = model.solve(policy, ["12+34="], SamplingParams(max_tokens=10))
    assert found.tokens == model.generated <= 40
    assert len(found.candidates) > 4  # which is what fits at full length
    assert 40 - model.generated < 10
    with pytest.raises(ValueError, match=r"budget = 40 tokens.*not one fits"):
        model.solve(policy, ["12+34="], SamplingParams(max_tokens=41))


@pytest.mark.parametrize("field", [{"n": 2}, {"best_of": 3}, {"beams": 2}, {"echo": True}, {"prompt_logprobs": 0}])
def test_parameters_that_choose_themselves_are_refused_by_name(field):
    (name,) = field
    with pytest.raises(ValueError, match=f"{name} = .* does not go with an effort policy"):
        ScriptedModel(counting).solve(BestOfN(2), ["1+1="], SamplingParams(**field))


def test_a_verifier_of_ones_own_is_any_object_with_score():
    class Shortest:
        def score(self, prompt: str, completion: str) -> float:
            return -len(completion)

    class Broken:
        def score(self, prompt: str, completion: str) -> float:
            return float("nan")

    model = ScriptedModel(lambda prompt, number: "a" * (5 - number))
    assert model.solve(BestOfN(4, Shortest()), ["?"])[0].best.text == "aa"
    with pytest.raises(ValueError, match="Broken returned a score that is not a number"):
        model.solve(BestOfN(4, Broken()), ["?"])
    with pytest.raises(ConfigError, match="cannot be saved"):
        save_policy(BestOfN(4, Shortest()), "policy.json")


POLICIES = [
    BestOfN(3, RegexVerifier("x+", whole=True), budget=90, sampling=SamplingOverrides(temperature=0.5, stop=("\n",))),
    BestOfN(4, ProbeVerifier(SuccessProbe((0.1, -1 / 3), 1e-17)), wave=2, accept=0.5),
    Majority(5, verifier=JudgeVerifier(model="other"), model="adapter"),
    Majority(5, r"A: (\d+)"),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.policy)
def test_policy_files_round_trip(tmp_path, policy):
    save_policy(policy, tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json") == policy


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"policy": "best_of"}, r"policy = 'best_of'. Did you mean 'best_of_n'\?"),
        ({"n": "3"}, "policy.json.n: expected int"),
        ({"m": 3}, "unknown key 'm'"),
        ({"verifier": {"verifier": "regexp"}}, r"verifier = 'regexp'. Did you mean 'regex'\?"),
        ({"verifier": {"verifier": "regex", "pattern": "("}}, "pattern = '\\(' is not a regular expression"),
        ({"n": 0}, "n = 0"),
    ],
)
def test_a_wrong_policy_file_is_refused_by_field(tmp_path, change, said):
    file = tmp_path / "policy.json"
    save_policy(BestOfN(2), file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=said):
        load_policy(file)


def test_the_probe_is_at_the_minimum_of_its_loss(rng):
    hidden, success = rng.normal(size=(60, 5)), rng.integers(0, 5, 60) / 4
    probe = SuccessProbe.fit(hidden, success, penalty=0.1)
    mean, scale = hidden.mean(0), hidden.std(0) + 1e-6
    p = np.array([probe.predict(row) for row in hidden])
    w = np.array(probe.weights) * scale
    gradient = ((hidden - mean) / scale).T @ (p - success) / 60 + 0.1 * w
    assert np.abs(gradient).max() < 1e-10
    assert abs((p - success).mean()) < 1e-8
    with pytest.raises(ValueError, match="5 elements, and this model's have 4"):
        probe.predict(hidden[0, :4])
