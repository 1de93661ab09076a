"""Optimised sample compute allocation (OSCA): a learned mix of sampling configurations (arXiv:2410.22480)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from jaxllm.effort.effort_policy import EffortPolicy, EffortSolution, SamplingOverrides, best_of, for_verifier
from jaxllm.effort.sample_rounds import EffortProblem, EffortTools, Rounds, SampleRequest
from jaxllm.effort.verifiers import AnyVerifier, LogprobVerifier, verifier_reserve, verify


@dataclass(frozen=True)
class SampleConfiguration:
    """Sampling configuration of a mixture.

    Attributes:
        count: number of samples drawn with it.
        sampling: sampling parameters that it sets.
        model: model that samples, as in a policy.
        before: text that follows the prompt, such as a request to think in steps; it may name special tokens.
    """

    count: int = 1
    sampling: SamplingOverrides = field(default_factory=SamplingOverrides)
    model: str = ""
    before: str = ""


@dataclass(frozen=True)
class SampleMixture(EffortPolicy):
    """Mixture of sampling configurations: a fixed number of samples of each, of which a verifier chooses one.

    Different configurations solve different prompts, so a mix may succeed on more of them than the same number of
    samples of the best one. ``fit`` learns the numbers from success counts.

    Attributes:
        configurations: the configurations, the most useful first: where a budget ends, the last ones have no samples.
        verifier: chooses among all samples.
    """

    configurations: tuple[SampleConfiguration, ...]
    verifier: AnyVerifier = field(default_factory=LogprobVerifier)
    policy: Literal["sample_mixture"] = field(default="sample_mixture", kw_only=True)

    def __post_init__(self) -> None:
        if not self.configurations or min(one.count for one in self.configurations) < 1:
            raise ValueError("sample_mixture: give one or more configurations, each with a count of 1 or more.")

    @property
    def width(self) -> int:
        """Sequences at a time: all samples."""
        return sum(one.count for one in self.configurations)

    @classmethod
    def fit(
        cls,
        configurations: Sequence[SampleConfiguration],
        successes: Int[np.ndarray, "N M"],
        trials: Int[np.ndarray, "N M"],
        compute: float,
        costs: Float[np.ndarray, " M"] | None = None,
        **policy: object,
    ) -> SampleMixture:
        """Learns the counts of configurations from success counts.

        Args:
            configurations: configurations to mix; their counts are replaced, and those of count 0 left out.
            successes, trials: successful samples of each training prompt under each configuration, and all samples.
            compute: what the samples of one prompt may cost.
            costs: cost of one sample of each configuration, such as its mean tokens; None: 1 each, so that ``compute``
                is a number of samples.
            policy: further fields of the policy: verifier, budget.

        Raises:
            ValueError: see ``allocate_mixture``.
        """
        rates = successes / np.maximum(trials, 1)
        price = np.ones(rates.shape[1]) if costs is None else costs
        counts = allocate_mixture(rates, price, compute)
        order = sorted(range(len(counts)), key=lambda j: -counts[j])
        return cls(tuple(replace(configurations[j], count=int(counts[j])) for j in order if counts[j]), **policy)  # type: ignore[arg-type]

    def solve(self, problem: EffortProblem, tools: EffortTools) -> Rounds[EffortSolution]:
        """Draws the samples of all configurations in one round and chooses the best."""
        requests, drawn = list[SampleRequest](), 0
        for one in self.configurations:
            params = for_verifier(one.sampling.apply(problem.params), self.verifier)
            prompt = problem.prompt + tools.encode(one.before, specials=True)
            requests.append(
                SampleRequest(
                    prompt,
                    replace(params, n=one.count),
                    one.model or self.model,
                    drawn,
                    verifier_reserve(self.verifier),
                )
            )
            drawn += one.count
        found = yield from tools.sample(requests)
        candidates = [candidate for some in found for candidate in some]
        if not candidates:
            raise ValueError(
                f"the budget of {tools.budget.total} tokens has no room for a sample of any configuration."
            )
        scores = yield from verify(self.verifier, problem, candidates, tools)
        return best_of(candidates, scores, tools)


def mixture_success(rates: Float[np.ndarray, "N M"], counts: Int[np.ndarray, "... M"]) -> Float[np.ndarray, "..."]:
    """Mean probability that a prompt has a success: 1 less the product of (1 - rate) ** count over configurations."""
    failure = np.log1p(-np.minimum(rates, 1 - 1e-12))
    return np.asarray(1 - np.exp(counts @ failure.T).mean(-1))


def allocate_mixture(
    rates: Float[np.ndarray, "N M"], costs: Float[np.ndarray, " M"], compute: float
) -> Int[np.ndarray, " M"]:
    """Counts of configurations that maximise ``mixture_success`` within a cost, by hill climbing.

    It climbs from the greedy allocation and from each configuration alone. A move takes away up to two samples, adds up
    to two, and fills what room is left greedily; the best move is made until none is better. The objective is concave
    in the counts, but not separable, so the result is a local optimum of this neighbourhood. In the drawn tables of the
    proof that compares it with brute force it is the best allocation.

    Raises:
        ValueError: a cost is not positive, or no configuration fits.
    """
    if not (costs > 0).all() or costs.min() > compute:
        raise ValueError(f"costs = {costs.tolist()}, compute = {compute}; give positive costs, one of them within it.")
    size = len(costs)
    starts = [np.zeros(size, int)]
    starts += [np.eye(size, dtype=int)[j] * int(compute // costs[j]) for j in range(size)]
    best: np.ndarray | None = None
    for start in starts:
        found = _climb(rates, costs, compute, _filled(rates, costs, compute, start))
        if best is None or mixture_success(rates, found) > mixture_success(rates, best) + 1e-15:
            best = found
    assert best is not None
    return best


def _climb(
    rates: Float[np.ndarray, "N M"], costs: Float[np.ndarray, " M"], compute: float, counts: Int[np.ndarray, " M"]
) -> Int[np.ndarray, " M"]:
    """Local optimum that the best moves lead to."""
    size = len(costs)
    units = [np.zeros(size, int), *np.eye(size, dtype=int)]
    pairs = np.unique([a + b for a, b in itertools.combinations_with_replacement(units, 2)], axis=0)
    moves = np.unique((pairs[:, None] - pairs[None]).reshape(-1, size), axis=0)
    while True:
        near = counts + moves
        near = near[(near >= 0).all(1) & (near @ costs <= compute * (1 + 1e-12))]
        near = np.unique([_filled(rates, costs, compute, one) for one in near], axis=0)
        values = mixture_success(rates, near)
        if values.max() <= mixture_success(rates, counts) + 1e-15:
            return counts
        counts = near[int(values.argmax())]


def _filled(
    rates: Float[np.ndarray, "N M"], costs: Float[np.ndarray, " M"], compute: float, counts: Int[np.ndarray, " M"]
) -> Int[np.ndarray, " M"]:
    """Counts with the room left filled, each time by the sample of the largest gain for its cost."""
    counts, failure = counts.copy(), np.log1p(-np.minimum(rates, 1 - 1e-12))
    while (fits := costs <= compute * (1 + 1e-12) - counts @ costs).any():
        gains = (np.exp(failure @ counts)[:, None] * rates).mean(0) / costs
        counts[int(np.where(fits, gains, -1.0).argmax())] += 1
    return counts
