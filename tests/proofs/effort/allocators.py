"""Allocators of effort equal brute force on drawn success tables; budgets hold for every policy; files round-trip."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.effort import (
    AdaptiveBestOfK,
    ArithmeticVerifier,
    BestOfN,
    ComputeOptimal,
    JudgeVerifier,
    LogprobVerifier,
    Majority,
    RegexVerifier,
    Revision,
    SampleConfiguration,
    SampleMixture,
    SamplingOverrides,
    SelectiveAllocation,
    SuccessProbe,
    VerifierBeam,
    allocate_mixture,
    allocate_samples,
    load_policy,
    price_of,
    save_policy,
)
from jaxllm.effort.adaptive_best_of_k import samples_at_price
from jaxllm.effort.compute_optimal import best_choices, difficulty_edges
from jaxllm.effort.sample_mixture import mixture_success
from jaxllm.infer import SamplingParams
from tests.effort.drivers import ScriptedModel
from tests.proofs.harness import proof


def rates_of(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Success rates, those of counts, so that 0, 1 and equal ones occur; or any numbers."""
    trials = int(rng.integers(1, 9))
    return rng.integers(0, trials + 1, shape) / trials if rng.random() < 0.5 else rng.beta(0.5, 1.0, shape)


@proof("effort", count=500, sample=20, bound=1e-12)
def samples_equal_brute_force(seed: int) -> float:
    """Expected successes of the greedy allocation, less those of the best of all allocations."""
    rng = np.random.default_rng(seed)
    success, most, least = rates_of(rng, int(rng.integers(1, 5))), int(rng.integers(1, 6)), int(rng.integers(0, 2))
    total = int(rng.integers(least * len(success), most * len(success) + 2))

    def value(counts: np.ndarray) -> float:
        return float((1 - (1 - success) ** counts).sum())

    found = allocate_samples(success, total, most=most, least=least)
    assert found.sum() <= total
    assert ((found >= least) & (found <= most)).all()
    legal = (np.array(c) for c in itertools.product(range(least, most + 1), repeat=len(success)) if sum(c) <= total)
    # In two parts, the second where it goes on from the first, nothing is lost.
    first = allocate_samples(success, max(total // 2, least * len(success)), most=most, least=least)
    second = allocate_samples(success, total - int(first.sum()), most=most, least=least, taken=first)
    best = max(value(counts) for counts in legal)
    return max(best - value(found), best - value(first + second))


@proof("effort", count=500, sample=20)
def prices_give_the_average(seed: int) -> None:
    """At the price of an average, prompts have that many samples; more only where gains are equal to the price."""
    rng = np.random.default_rng(seed)
    success, most = rng.uniform(0.01, 0.99, int(rng.integers(2, 40))), int(rng.integers(2, 12))
    count = int(rng.integers(len(success), most * len(success) + 1))
    price = price_of(success, count / len(success), most=most)
    given = [samples_at_price(float(p), price, most=most, least=1) for p in success]
    assert sum(given) == count or count == len(success)
    want = allocate_samples(success, count, most=most, least=1)
    assert given == want.tolist()


@proof("effort", count=500, sample=5, bound=1e-12)
def mixtures_equal_brute_force(seed: int) -> float:
    """Success of the mixture that hill climbing finds, less that of the best of all mixtures within the cost."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 5))
    rates = rates_of(rng, int(rng.integers(1, 9)), size)
    costs = np.ones(size) if rng.random() < 0.5 else rng.integers(1, 5, size).astype(float)
    compute = float(rng.integers(int(costs.min()), 10))
    found = allocate_mixture(rates, costs, compute)
    assert found @ costs <= compute
    every = np.array(list(itertools.product(*(range(int(compute // cost) + 1) for cost in costs))))
    legal = every[every @ costs <= compute]
    return float(mixture_success(rates, legal).max() - mixture_success(rates, found))


@proof("effort", count=300, sample=10, bound=0)
def choices_equal_brute_force(seed: int) -> float:
    """Successes of the policies chosen by difficulty bin, less those of the best of all assignments to bins."""
    rng = np.random.default_rng(seed)
    rows, policies = int(rng.integers(1, 40)), int(rng.integers(1, 5))
    difficulty, success = rates_of(rng, rows), rng.integers(0, 2, (rows, policies)).astype(float)
    tokens = rng.integers(1, 9, (rows, policies)).astype(float)
    edges = difficulty_edges(difficulty, int(rng.integers(1, 5)))
    bins = np.searchsorted(edges, difficulty, side="right")
    assert set(bins.tolist()) == set(range(len(edges) + 1))
    chosen = best_choices(difficulty, success, tokens, edges)

    def value(assigned: Any) -> tuple[float, float]:
        at = np.arange(rows), np.array(assigned)[bins]
        return float(success[at].sum()), -float(tokens[at].sum())

    best = max(value(one) for one in itertools.product(range(policies), repeat=len(edges) + 1))
    assert value(chosen) == best
    return best[0] - value(chosen)[0]


def verifier_of(rng: np.random.Generator) -> Any:
    """Some verifier."""
    return [ArithmeticVerifier(), RegexVerifier("4"), LogprobVerifier(), JudgeVerifier(yes="Y", no="N")][
        rng.integers(4)
    ]


def policy_of(rng: np.random.Generator, depth: int = 0) -> Any:
    """Some policy with some settings."""
    n, verifier, probe = (
        int(rng.integers(1, 8)),
        verifier_of(rng),
        SuccessProbe((float(rng.normal()),), float(rng.normal())),
    )
    sampling = SamplingOverrides(temperature=float(rng.uniform(0, 2)))
    kinds = [
        lambda: BestOfN(n, verifier, sampling=sampling),
        lambda: BestOfN(n, verifier, wave=int(rng.integers(1, 4)), accept=float(rng.random())),
        lambda: Majority(n, verifier=verifier if rng.random() < 0.5 else None),
        lambda: VerifierBeam(2 * n, 2, verifier, step="\n", step_tokens=int(rng.integers(1, 9)), rounds=n),
        lambda: Revision(n, int(rng.integers(0, 4)), verifier, context=int(rng.integers(1, 4))),
        lambda: AdaptiveBestOfK(probe, float(rng.uniform(0.001, 0.5)), verifier, most=n),
        lambda: SampleMixture(tuple(SampleConfiguration(int(k), sampling) for k in rng.integers(1, 4, 3)), verifier),
        lambda: ComputeOptimal(probe, (0.3, 0.6), tuple(policy_of(rng, 1) for _ in range(3))),
        lambda: SelectiveAllocation(policy_of(rng, 1), policy_of(rng, 1), yes="Y", no="N", plan_tokens=9, most_steps=n),
    ]
    return kinds[rng.integers(len(kinds) - 2 * depth)]()


class RandomModel(ScriptedModel):
    """Model whose texts, and judgements, are random."""

    def __init__(self, rng: np.random.Generator):
        super().__init__(self.text, lambda ids: [float(np.cos(sum(ids)))])
        self.rng = rng

    def text(self, prompt: str, number: int) -> str:
        """Up to 20 letters."""
        return "".join(self.rng.choice(list("46 x\n"), int(self.rng.integers(0, 21))))


@proof("effort", count=500, sample=20, counts=("solved", "refused"))
def budgets_are_never_exceeded(seed: int) -> dict[str, float]:
    """Tokens that a model generates, for one prompt and for several together, under any policy and budget.

    The policy that is solved was read from its file.
    """
    rng = np.random.default_rng(seed)
    policy = dataclasses.replace(policy_of(rng), budget=int(rng.integers(1, 150)))
    with tempfile.TemporaryDirectory() as folder:
        save_policy(policy, Path(folder) / "policy.json")
        read = load_policy(Path(folder) / "policy.json")
    assert read == policy
    prompts = [f"{a}+{b}=" for a, b in rng.integers(0, 50, (int(rng.integers(1, 5)), 2))]
    params = SamplingParams(max_tokens=int(rng.integers(1, 20)), seed=seed)
    model = RandomModel(rng)
    refusal: str | None = None
    try:
        found = model.solve(read, prompts, params)
    except ValueError as error:
        refusal = str(error)
    if refusal is not None:
        assert "budget" in refusal or "samples are fewer" in refusal, refusal
        assert not model.generated, "a budget is refused before anything is generated"
        return {"solved": 0, "refused": 1}
    assert model.generated == sum(one.tokens for one in found) <= policy.budget * len(prompts)
    for one in found:
        assert len(one.best.tokens) <= params.max_tokens
        if len(prompts) == 1 or not isinstance(policy, AdaptiveBestOfK):
            assert one.tokens <= policy.budget
    widest = max(sum(request.params.n for request in asked) for asked in model.requests)
    assert widest <= 2 * policy.width * len(prompts)
    return {"solved": 1, "refused": 0}
