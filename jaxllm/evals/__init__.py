"""Measuring models by tasks: scoring and writing over the engine, local tasks, and lm-eval's."""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.evals.lm_eval import adapter, run_lm_eval
    from jaxllm.evals.scorer import Scorer
    from jaxllm.evals.tasks import Result, run_task

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.evals.lm_eval": (
            "adapter",
            "run_lm_eval",
        ),
        "jaxllm.evals.scorer": ("Scorer",),
        "jaxllm.evals.tasks": (
            "Result",
            "run_task",
        ),
    },
)

__all__ = [
    "Result",
    "Scorer",
    "adapter",
    "run_lm_eval",
    "run_task",
]
