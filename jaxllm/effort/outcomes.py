"""Outcomes: successes and tokens of policies on prompts with checkable answers, from which policies are fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from jaxllm.effort.best_of_n import BestOfN
from jaxllm.effort.effort_policy import EffortPolicy
from jaxllm.effort.effort_solver import EffortSolver
from jaxllm.effort.verifiers import LogprobVerifier, Verifier
from jaxllm.infer.sampling_params import SamplingParams


@dataclass(frozen=True)
class SampleOutcomes:
    """Success of independent samples of each prompt.

    Attributes:
        success: 1 where a sample's check succeeded; [prompt, sample].
        tokens: tokens of each sample.
        hidden: hidden state after each prompt.
    """

    success: Int[np.ndarray, "N K"]
    tokens: Int[np.ndarray, "N K"]
    hidden: Float[np.ndarray, "N D"]

    @property
    def rates(self) -> Float[np.ndarray, " N"]:
        """Share of each prompt's samples that succeeded."""
        return self.success.mean(1)


def sample_outcomes(
    solver: EffortSolver, prompts: Sequence[str], params: SamplingParams, check: Verifier, samples: int
) -> SampleOutcomes:
    """Draws samples of prompts and checks them.

    Args:
        check: scores above 0.5 are successes.
    """
    found = solver.solve(BestOfN(samples, LogprobVerifier()), prompts, params)
    success = [
        [check.score(prompt, one.text) > 0.5 for one in solution.candidates]
        for prompt, solution in zip(prompts, found, strict=True)
    ]
    tokens = [[len(one.tokens) for one in solution.candidates] for solution in found]
    hidden = [solver.embed(solver.llm.ids(prompt)) for prompt in prompts]
    return SampleOutcomes(np.array(success, int), np.array(tokens, int), np.array(hidden, np.float64))


def policy_outcomes(
    solver: EffortSolver,
    policies: Sequence[EffortPolicy],
    prompts: Sequence[str],
    params: SamplingParams,
    check: Verifier,
) -> tuple[Float[np.ndarray, "N M"], Float[np.ndarray, "N M"]]:
    """Success of each prompt under each policy, 0 or 1, and the tokens spent; the table of ``ComputeOptimal.fit``."""
    success, tokens = np.zeros((2, len(prompts), len(policies)))
    for j, policy in enumerate(policies):
        for i, solution in enumerate(solver.solve(policy, prompts, params)):
            success[i, j] = check.score(prompts[i], solution.best.text) > 0.5
            tokens[i, j] = solution.tokens
    return success, tokens
