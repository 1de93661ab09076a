"""Effort at test time: policies that spend a token budget on a prompt, with verifiers, over the engine."""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.effort.best_of_n import BestOfN
    from jaxllm.effort.effort_policy import EffortPolicy, EffortSolution, SamplingOverrides
    from jaxllm.effort.effort_solver import EffortSolver
    from jaxllm.effort.majority import Majority
    from jaxllm.effort.policy_table import load_policy, save_policy
    from jaxllm.effort.success_probe import SuccessProbe
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
        "jaxllm.effort.best_of_n": ("BestOfN",),
        "jaxllm.effort.effort_policy": ("EffortPolicy", "EffortSolution", "SamplingOverrides"),
        "jaxllm.effort.effort_solver": ("EffortSolver",),
        "jaxllm.effort.majority": ("Majority",),
        "jaxllm.effort.policy_table": ("load_policy", "save_policy"),
        "jaxllm.effort.success_probe": ("SuccessProbe",),
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
    "ArithmeticVerifier",
    "BestOfN",
    "EffortPolicy",
    "EffortSolution",
    "EffortSolver",
    "EngineVerifier",
    "JudgeVerifier",
    "LogprobVerifier",
    "Majority",
    "ProbeVerifier",
    "RegexVerifier",
    "SamplingOverrides",
    "SuccessProbe",
    "Verifier",
    "load_policy",
    "save_policy",
]
