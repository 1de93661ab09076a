"""Adapter to lm-eval (https://github.com/EleutherAI/lm-evaluation-harness), which runs in this process over the engine.

lm-eval's models answer lists of requests, each with ``args``: ``loglikelihood`` (context, continuation),
``loglikelihood_rolling`` (text,), ``generate_until`` (context, settings). lm-eval is imported on first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from jaxllm.evals.scorer import Scorer
from jaxllm.files import DataError


def adapter(scorer: Scorer) -> Any:
    """Model in lm-eval's interface.

    Raises:
        DataError: lm-eval is not installed.
    """
    base = _module("lm_eval.api.model").LM

    class JaxllmLM(base):
        """See the module."""

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            return scorer.continuations([request.args for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return scorer.texts([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return scorer.write([request.args for request in requests])

    return JaxllmLM()


def run_lm_eval(scorer: Scorer, tasks: Sequence[str], limit: int | None = None) -> dict[str, dict[str, Any]]:
    """Runs tasks of lm-eval; returns the results by task and metric.

    Raises:
        DataError: lm-eval is not installed.
    """
    model = adapter(scorer)
    return _module("lm_eval").simple_evaluate(model=model, tasks=list(tasks), limit=limit)["results"]


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            "tasks that are not files need lm-eval: pip install lm-eval. A task of your own is a .jsonl file, see "
            "docs/serve/serving.md."
        ) from error
