"""Tasks of reasoning-gym as prompts with verifiable rewards: procedurally generated puzzles, sums, games and proofs.

``--prompts gym:TASK,TASK:SIZE --rewards gym_score`` takes SIZE questions of each task. reasoning-gym is an optional
package: ``pip install 'jaxllm[gym]'``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jaxllm.config import closest
from jaxllm.files import DataError

GYM = "gym"
SIZE = 500
"""Questions of each task by default."""
SEED = 0
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def gym_prompts(spec: str, *, asks: bool) -> list[dict[str, Any]]:
    """Records of ``gym:TASK,TASK:SIZE``, given without ``gym:``, each with its question and the answer.

    Args:
        asks: prompts are messages, for a model with a chat template.

    Raises:
        DataError: reasoning-gym is not installed, there is no such task, or the size is no number above 0.
    """
    names, _, size = spec.partition(":")
    if size and not (size.isdecimal() and int(size) > 0):
        raise DataError(f"gym:{spec}: {size!r} is no number of questions; give 1 or more, such as gym:{names}:{SIZE}")
    number = int(size or SIZE)
    return [_record(name, index, number, asks) for name in names.split(",") for index in range(number)]


def gym_score(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Score of an answer by reasoning-gym's own verifier, 0 to 1.

    The answer is what the last ``<answer>`` tag holds, or else the whole completion.
    """
    tagged = _ANSWER.findall(completion)
    questions = _questions(row["task"], row["size"])
    return float(questions.score_answer((tagged[-1] if tagged else completion).strip(), questions[row["index"]]))


def _record(task: str, index: int, size: int, asks: bool) -> dict[str, Any]:
    entry = _questions(task, size)[index]
    question = str(entry["question"])
    prompt = [{"role": "user", "content": question}] if asks else question + "\n"
    return {"prompt": prompt, "answer": str(entry["answer"]), "task": task, "index": index, "size": size}


@functools.lru_cache(maxsize=64)
def _questions(task: str, size: int) -> Any:
    """Questions of a task, which depend on its name and their number alone."""
    library = _library()
    if task not in library.factory.DATASETS:
        raise DataError(f"reasoning-gym has no task {task!r}.{closest(task, library.factory.DATASETS)}")
    return library.create_dataset(task, size=size, seed=SEED)


def _library() -> ModuleType:
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise DataError(f"prompts gym:TASK need {error.name}: pip install 'jaxllm[gym]'") from None
    return reasoning_gym
