"""Evaluation on tasks: scoring and generation over the engine, local task files, and lm-eval's tasks."""

from typing import TYPE_CHECKING

from jaxllm.lazy import lazy_exports

if TYPE_CHECKING:
    from jaxllm.evals.lm_eval import adapter, run_lm_eval
    from jaxllm.evals.scorer import Scorer
    from jaxllm.evals.tasks import TaskResult, run_task

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "jaxllm.evals.lm_eval": (
            "adapter",
            "run_lm_eval",
        ),
        "jaxllm.evals.scorer": ("Scorer",),
        "jaxllm.evals.tasks": (
            "TaskResult",
            "run_task",
        ),
    },
    renamed={"Result": "TaskResult"},
)

__all__ = [
    "Scorer",
    "TaskResult",
    "adapter",
    "run_lm_eval",
    "run_task",
]
