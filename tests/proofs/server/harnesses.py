"""lm-eval over the real SmolLM2: through the server it scores as the same engine does in this process."""

from __future__ import annotations

import functools
import json
import random
import tempfile
import warnings
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.evals import Scorer, adapter
from jaxllm.serve import ServeConfig
from tests.proofs.harness import proof
from tests.proofs.server.clients import smollm2, smollm2_backend
from tests.serve import servers

ROWS = 20
CHOICES = 4


@functools.cache
def _lines() -> list[str]:
    text = (resources.files("jaxllm.data") / "corpus" / "train.txt").read_text(encoding="utf-8")
    return [line.strip() for line in text.splitlines() if 40 < len(line.strip()) < 80]


def _items(seed: int) -> list[dict[str, Any]]:
    """Items that ask which of four half-lines of Shakespeare ends a line: at times a model answers them correctly."""
    rng = random.Random(seed)
    items = []
    for _ in range(ROWS):
        words = [line.split(" ") for line in rng.sample(_lines(), CHOICES)]
        halves = [" " + " ".join(some[len(some) // 2 :]) for some in words]
        answer = rng.randrange(CHOICES)
        items.append(
            {"prompt": " ".join(words[answer][: len(words[answer]) // 2]), "choices": halves, "answer": answer}
        )
    return items


def _task(path: Path) -> dict[str, Any]:
    return {
        "task": "half_lines",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(path.parent / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "prompt",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }


def _evaluated(model: Any, folder: Path) -> tuple[dict[str, float], list[float]]:
    """Scores, and the log-probability of every choice, in order."""
    import lm_eval

    made = lm_eval.simple_evaluate(model, tasks=[_task(folder / "items.jsonl")], log_samples=True, bootstrap_iters=0)
    scores = made["results"]["half_lines"]
    samples = sorted(made["samples"]["half_lines"], key=lambda sample: sample["doc_id"])
    found = [float(choice[0]) for sample in samples for choice in sample["filtered_resps"]]
    return {name: scores[f"{name},none"] for name in ("acc", "acc_norm")}, found


@proof("server", count=5, sample=1, bound={"logprob": 1e-3, "score": 0.0})
def lm_eval_scores_as_in_process(seed: int) -> dict[str, float]:
    """``local-completions`` of lm-eval against a server, and lm-eval over the engine itself: the same items."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    llm = smollm2()
    with tempfile.TemporaryDirectory() as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lm-eval's and its libraries'
        folder = Path(made)
        lines = [json.dumps(item) for item in _items(seed)]
        (folder / "items.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        llm.tokenizer.save(folder / "tokenizer")
        here, values = _evaluated(adapter(Scorer(llm)), folder)
        with servers.running(smollm2_backend, ServeConfig(port=0, name="smollm2")) as (_, url):
            client = LocalCompletionsAPI(
                base_url=f"{url}/v1/completions",
                model="smollm2",
                tokenizer=str(folder / "tokenizer"),
                max_length=llm.engine.max_len - 1,
                num_concurrent=2,
            )
            there, others = _evaluated(client, folder)
    assert len(values) == len(others) == ROWS * CHOICES
    assert min(values) < max(values) < 0, "scored nothing"
    return {
        "logprob": float(np.max(np.abs(np.subtract(values, others)))),
        "score": max(abs(here[name] - there[name]) for name in here),
    }
