"""Effort at test time: policies that spend a token budget on a prompt, with verifiers, over the engine."""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.effort.adaptive_best_of_k import AdaptiveBestOfK, allocate_samples, price_of
    from jaxllm.effort.best_of_n import BestOfN
    from jaxllm.effort.compute_optimal import ComputeOptimal
    from jaxllm.effort.effort_policy import EffortPolicy, EffortSolution, SamplingOverrides
    from jaxllm.effort.effort_solver import EffortSolver
    from jaxllm.effort.majority import Majority
    from jaxllm.effort.outcomes import SampleOutcomes, policy_outcomes, sample_outcomes
    from jaxllm.effort.policy_table import load_policy, save_policy
    from jaxllm.effort.revision import Revision
    from jaxllm.effort.sample_mixture import SampleConfiguration, SampleMixture, allocate_mixture
    from jaxllm.effort.selective_allocation import SelectiveAllocation
    from jaxllm.effort.success_probe import SuccessProbe
    from jaxllm.effort.verifier_beam import VerifierBeam
    from jaxllm.effort.verifiers import (
        ArithmeticVerifier,
        EngineVerifier,
        JudgeVerifier,
        LogprobVerifier,
        ProbeVerifier,
        RegexVerifier,
        Verifier,
    )

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.effort.adaptive_best_of_k": (
            "AdaptiveBestOfK",
            "allocate_samples",
            "price_of",
        ),
        "jaxllm.effort.best_of_n": ("BestOfN",),
        "jaxllm.effort.compute_optimal": ("ComputeOptimal",),
        "jaxllm.effort.effort_policy": (
            "EffortPolicy",
            "EffortSolution",
            "SamplingOverrides",
        ),
        "jaxllm.effort.effort_solver": ("EffortSolver",),
        "jaxllm.effort.majority": ("Majority",),
        "jaxllm.effort.outcomes": (
            "SampleOutcomes",
            "policy_outcomes",
            "sample_outcomes",
        ),
        "jaxllm.effort.policy_table": (
            "load_policy",
            "save_policy",
        ),
        "jaxllm.effort.revision": ("Revision",),
        "jaxllm.effort.sample_mixture": (
            "SampleConfiguration",
            "SampleMixture",
            "allocate_mixture",
        ),
        "jaxllm.effort.selective_allocation": ("SelectiveAllocation",),
        "jaxllm.effort.success_probe": ("SuccessProbe",),
        "jaxllm.effort.verifier_beam": ("VerifierBeam",),
        "jaxllm.effort.verifiers": (
            "ArithmeticVerifier",
            "EngineVerifier",
            "JudgeVerifier",
            "LogprobVerifier",
            "ProbeVerifier",
            "RegexVerifier",
            "Verifier",
        ),
    },
)

__all__ = [
    "AdaptiveBestOfK",
    "ArithmeticVerifier",
    "BestOfN",
    "ComputeOptimal",
    "EffortPolicy",
    "EffortSolution",
    "EffortSolver",
    "EngineVerifier",
    "JudgeVerifier",
    "LogprobVerifier",
    "Majority",
    "ProbeVerifier",
    "RegexVerifier",
    "Revision",
    "SampleConfiguration",
    "SampleMixture",
    "SampleOutcomes",
    "SamplingOverrides",
    "SelectiveAllocation",
    "SuccessProbe",
    "Verifier",
    "VerifierBeam",
    "allocate_mixture",
    "allocate_samples",
    "load_policy",
    "policy_outcomes",
    "price_of",
    "sample_outcomes",
    "save_policy",
]
