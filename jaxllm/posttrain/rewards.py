"""Rewards: functions ``(prompt, completion, row) -> float`` that judge completions, and what happens where one fails.

A reward function is named ``module:function``, or is a row of ``REWARDS``. Several are added, each with a weight:
``"exact_answer=1.0"``. A function that raises, returns no finite number or takes too long has failed: its completion
has no reward (NaN) and so no part in the loss; the failure is logged with its episode.
"""

from __future__ import annotations

import importlib
import math
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from jaxllm.config import ConfigError, closest
from jaxllm.posttrain.reasoning_gym_tasks import gym_score

RewardFunction = Callable[[str, str, Mapping[str, Any]], float]
"""``(prompt, completion, row) -> reward``; ``row`` has all fields of the prompt's record."""


class RewardError(RuntimeError):
    """Most completions of a step have no reward; the message has the first failure."""


def exact_answer(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """1 if the completion is the row's ``answer``, but for white space around it, else 0."""
    return float(completion.strip() == str(row["answer"]).strip())


def last_number(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """1 if the last number in the completion is the row's ``answer``, else 0."""
    found = re.findall(r"-?\d+(?:\.\d+)?", completion.replace(",", ""))
    return float(bool(found) and float(found[-1]) == float(row["answer"]))


def brevity(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """1 for an empty completion, falling to 0 with its length in characters: ``1 / (1 + length / 100)``."""
    return 1 / (1 + len(completion) / 100)


REWARDS: dict[str, RewardFunction] = {
    "exact_answer": exact_answer,
    "last_number": last_number,
    "brevity": brevity,
    "gym_score": gym_score,
}
"""Bundled reward functions by name."""


@dataclass(frozen=True)
class RewardTerm:
    """Reward function with its weight in the sum."""

    name: str
    function: RewardFunction
    weight: float


@dataclass(frozen=True)
class Judgement:
    """Judgement of one completion.

    Attributes:
        reward: weighted sum; NaN if a function failed.
        terms: value of each function by name.
        failure: why there is no reward; empty: there is one.
    """

    reward: float
    terms: dict[str, float]
    failure: str = ""


def find_rewards(specs: tuple[str, ...]) -> tuple[RewardTerm, ...]:
    """Reward functions of a run: ``NAME``, ``NAME=WEIGHT``, ``module:function`` or ``module:function=WEIGHT``.

    Raises:
        ConfigError: there is no such function, or the weight is no number; says what is legal.
    """
    if not specs:
        raise ConfigError(f"rewards is empty; give one or more of {', '.join(REWARDS)}, or module:function.")
    return tuple(_term(one) for one in specs)


def _term(text: str) -> RewardTerm:
    name, equals, weight = text.partition("=")
    try:
        factor = float(weight) if equals else 1.0
    except ValueError:
        raise ConfigError(f"rewards: {text!r} has no number as its weight; give NAME=WEIGHT.") from None
    if not math.isfinite(factor):
        raise ConfigError(f"rewards: the weight of {name} is {weight}; give a finite number.")
    module, colon, function = name.partition(":")
    if not colon:
        if name not in REWARDS:
            raise ConfigError(
                f"rewards: no function {name!r}.{closest(name, REWARDS)} Bundled: {', '.join(REWARDS)}; or "
                "module:function for one of your own."
            )
        return RewardTerm(name, REWARDS[name], factor)
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"rewards: {name!r} cannot be imported: {error}.") from error
    if not callable(found):
        raise ConfigError(f"rewards: {name!r} is a {type(found).__name__}, not a function.")
    return RewardTerm(name, cast(RewardFunction, found), factor)


def judge(
    terms: tuple[RewardTerm, ...], prompt: str, completion: str, row: Mapping[str, Any], timeout: float
) -> Judgement:
    """Judgement of one completion by all functions; never raises.

    Args:
        timeout: seconds that a function may take; 0: any. A function that takes longer is left running in its thread,
            which ends with the program.
    """
    values: dict[str, float] = {}
    for term in terms:
        value, failure = _call(term, prompt, completion, row, timeout)
        if failure:
            return Judgement(math.nan, values, failure)
        values[term.name] = value
    return Judgement(sum(term.weight * values[term.name] for term in terms), values)


def _call(term: RewardTerm, prompt: str, completion: str, row: Mapping[str, Any], timeout: float) -> tuple[float, str]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((float(term.function(prompt, completion, dict(row))), ""))
        except Exception as error:
            found.append((math.nan, f"{term.name} raised {type(error).__name__}: {error}"))

    if timeout:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(timeout)
    else:
        run()
    if not found:
        return math.nan, f"{term.name} took longer than rollout.reward_timeout = {timeout:g} s"
    value, failure = found[0]
    if not failure and not math.isfinite(value):
        failure = f"{term.name} returned {value}, which is not finite"
    return value, failure
