"""Verifiers: scores of completions, from checkable answers, log-probabilities, a judge or a trained head."""

from __future__ import annotations

import ast
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

from jaxllm.config import OneOf
from jaxllm.effort.sample_rounds import Candidate, EffortProblem, EffortTools, Rounds, SampleRequest
from jaxllm.effort.success_probe import SuccessProbe
from jaxllm.infer.engine.beam_search import length_normalised_score
from jaxllm.infer.sampling_params import SamplingParams

NUMBER = r"-?\d+(?:\.\d+)?"
_EXPRESSION = re.compile(r"([-+*/().\d\s]{1,200}?)=?\s*\??\s*$")


@runtime_checkable
class Verifier(Protocol):
    """Verifier: scores a completion from its text. The larger the better; 1 is right and 0 wrong, where that is known.

    Any object with this method can be given to a policy in Python; those of ``VERIFIERS`` can be in a policy file too.
    """

    def score(self, prompt: str, completion: str) -> float:
        """Score of a completion of a prompt."""
        ...


class EngineVerifier(ABC):
    """Verifier that needs more than texts: log-probabilities, hidden states, or the engine itself.

    Attributes:
        needs_logprobs: it reads the candidates' log-probabilities.
        reserve: tokens that it generates for each candidate.
    """

    needs_logprobs: ClassVar[bool] = False
    reserve: ClassVar[int] = 0

    @abstractmethod
    def score_rounds(
        self, problem: EffortProblem, candidates: Sequence[Candidate], tools: EffortTools
    ) -> Rounds[list[float]]:
        """Scores of candidates of a problem."""


def verify(
    verifier: Verifier | EngineVerifier, problem: EffortProblem, candidates: Sequence[Candidate], tools: EffortTools
) -> Rounds[list[float]]:
    """Scores of candidates under any verifier.

    Raises:
        ValueError: a score is not a number.
    """
    if isinstance(verifier, EngineVerifier):
        scores = yield from verifier.score_rounds(problem, candidates, tools)
    else:
        scores = [float(verifier.score(problem.text, one.text)) for one in candidates]
    if any(math.isnan(score) for score in scores):
        raise ValueError(f"the verifier {type(verifier).__name__} returned a score that is not a number.")
    return scores


def wants_logprobs(verifier: object) -> bool:
    """Whether a verifier reads log-probabilities."""
    return isinstance(verifier, EngineVerifier) and verifier.needs_logprobs


def verifier_reserve(verifier: object) -> int:
    """Tokens that a verifier generates for each candidate."""
    return verifier.reserve if isinstance(verifier, EngineVerifier) else 0


@dataclass(frozen=True)
class ArithmeticVerifier:
    """Exact arithmetic: 1 where the first number of the completion is the value of the expression that ends the prompt.

    The expression has numbers, + - * / and parentheses, and may end in "=" and "?"; it is computed in fractions. A
    prompt without one scores 0.
    """

    verifier: Literal["arithmetic"] = field(default="arithmetic", kw_only=True)

    def score(self, prompt: str, completion: str) -> float:
        """1 for the exact value, 0 for any other completion."""
        value, found = arithmetic_value(prompt), re.search(NUMBER, completion)
        return float(value is not None and found is not None and Fraction(found.group()) == value)


@dataclass(frozen=True)
class RegexVerifier:
    """Regular expression: 1 where the completion contains a match.

    Attributes:
        pattern: regular expression of Python.
        whole: the whole completion, without spaces around it, must match.
    """

    pattern: str
    whole: bool = False
    verifier: Literal["regex"] = field(default="regex", kw_only=True)

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern = {self.pattern!r} is not a regular expression: {error}.") from None

    def score(self, prompt: str, completion: str) -> float:
        """1 for a match, 0 for none."""
        found = re.fullmatch(self.pattern, completion.strip()) if self.whole else re.search(self.pattern, completion)
        return float(found is not None)


@dataclass(frozen=True)
class LogprobVerifier(EngineVerifier):
    """Log-probability of the completion under the model that drew it, over length ** length_penalty."""

    length_penalty: float = 1.0
    verifier: Literal["logprob"] = field(default="logprob", kw_only=True)
    needs_logprobs: ClassVar[bool] = True

    def score_rounds(
        self, problem: EffortProblem, candidates: Sequence[Candidate], tools: EffortTools
    ) -> Rounds[list[float]]:
        """Length-normalised log-probabilities."""
        yield from ()
        return [length_normalised_score(sum(one.logprobs), len(one.tokens), self.length_penalty) for one in candidates]


@dataclass(frozen=True)
class JudgeVerifier(EngineVerifier):
    """Judge: the probability that a model answers yes, rather than no, when it is asked whether a completion is right.

    Each of the two answers is the one allowed token of a request, whose log-probability the engine returns; the
    question is prefilled once. An answer counts by its first token.

    Attributes:
        question: text after the completion.
        yes, no: answers, with the space before them where the tokenizer expects one.
        model: model that judges: "" is the main one, otherwise as in a policy.
    """

    question: str = "\n\nIs this answer correct? Answer Yes or No:"
    yes: str = " Yes"
    no: str = " No"
    model: str = ""
    verifier: Literal["judge"] = field(default="judge", kw_only=True)
    reserve: ClassVar[int] = 2

    def score_rounds(
        self, problem: EffortProblem, candidates: Sequence[Candidate], tools: EffortTools
    ) -> Rounds[list[float]]:
        """Probability of yes among the two answers."""
        question = tools.encode(self.question, specials=True)
        prompts = [problem.prompt + tools.said(one) + question for one in candidates]
        return (yield from yes_probabilities(prompts, self.yes, self.no, self.model, tools))


@dataclass(frozen=True)
class ProbeVerifier(EngineVerifier):
    """Reward model: a trained head on the model's hidden state after the prompt and the completion.

    Attributes:
        probe: the head; ``SuccessProbe.fit`` trains one on completions whose success is known.
    """

    probe: SuccessProbe
    verifier: Literal["probe"] = field(default="probe", kw_only=True)

    def score_rounds(
        self, problem: EffortProblem, candidates: Sequence[Candidate], tools: EffortTools
    ) -> Rounds[list[float]]:
        """Predicted probability of success of each candidate."""
        yield from ()
        return [self.probe.predict(tools.embed(problem.prompt + one.tokens)) for one in candidates]


VERIFIERS: list[type] = [ArithmeticVerifier, RegexVerifier, LogprobVerifier, JudgeVerifier, ProbeVerifier]
"""Table of verifiers that a policy file may name by the default of their ``verifier``."""
AnyVerifier = Annotated[Verifier | EngineVerifier, OneOf(VERIFIERS, "verifier")]


def yes_probabilities(
    prompts: Sequence[tuple[int, ...]], yes: str, no: str, model: str, tools: EffortTools
) -> Rounds[list[float]]:
    """Probability of the answer ``yes`` among two answers, after each prompt; two tokens each.

    Raises:
        ValueError: the answers begin with the same token, or the budget has no room.
    """
    answers = [tools.encode(answer)[:1] for answer in (yes, no)]
    if answers[0] == answers[1] or not all(answers):
        raise ValueError(f"{yes!r} and {no!r} begin with the same token; give answers that differ in the first.")
    forced = [SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, allowed_tokens=one) for one in answers]
    found = yield from tools.sample([SampleRequest(prompt, one, model) for prompt in prompts for one in forced])
    if not all(found):
        raise ValueError(f"the budget of {tools.budget.total} tokens has no room for two tokens for each question.")
    values = [some[0].logprobs[0] for some in found]
    return [1 / (1 + math.exp(min(no - yes, 700))) for yes, no in zip(values[::2], values[1::2], strict=True)]


def arithmetic_value(prompt: str) -> Fraction | None:
    """Exact value of the arithmetic expression that a prompt ends with; None if there is none, or it divides by 0."""
    found = _EXPRESSION.search(prompt[-300:])
    text = found.group(1).strip().lstrip(".)").strip() if found else ""
    while text:
        try:
            return _value(ast.parse(re.sub(r"(?<![\d.])0+(?=\d)", "", text), mode="eval").body)
        except ZeroDivisionError:
            return None
        except (SyntaxError, ValueError):
            # Digits of the sentence before the expression: leave out its first word.
            text = text.partition(" ")[2].strip()
    return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp):
        a, b = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add):
            return a + b
        if isinstance(node.op, ast.Sub):
            return a - b
        if isinstance(node.op, ast.Mult):
            return a * b
        if isinstance(node.op, ast.Div):
            return a / b
    raise ValueError("not arithmetic")
