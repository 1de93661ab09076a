"""Measuring models by tasks: scoring and writing over the engine, local tasks, and lm-eval's."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.evals.lm_eval import adapter, run_lm_eval
    from jaxllm.evals.scorer import Scorer
    from jaxllm.evals.tasks import Result, run_task

_HOME = {
    "Scorer": "scorer",
    "Result": "tasks",
    "run_task": "tasks",
    "adapter": "lm_eval",
    "run_lm_eval": "lm_eval",
}

__all__ = ["Result", "Scorer", "adapter", "run_lm_eval", "run_task"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
