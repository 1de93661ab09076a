"""Selective resource allocation (SCALE): spends on the hard sub-problems of a prompt (arXiv:2512.00466)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxllm.effort.best_of_n import BestOfN
from jaxllm.effort.compute_optimal import AnyPolicy, nested, refuse_own_budgets
from jaxllm.effort.effort_policy import EffortPolicy, EffortSolution
from jaxllm.effort.sample_rounds import Candidate, EffortProblem, EffortTools, Rounds, SampleRequest
from jaxllm.effort.verifiers import yes_probabilities


@dataclass(frozen=True)
class SelectiveAllocation(EffortPolicy):
    """Selective allocation in four stages: decompose, assess, route, and solve in order.

    The model lists sub-problems; it is asked of each whether it is hard; easy ones go to one policy (System 1) and hard
    ones to another (System 2), which may use another model. They are solved in order: each sees the prompt, the
    sub-problems before it and their results. This growing prefix is shared, so that the prefix cache holds it.

    Attributes:
        easy, hard: policies of the two modes. They have no budget of their own.
        threshold: a sub-problem is hard if the probability that the model answers yes exceeds this.
        decompose: text after the prompt, after which the model lists sub-problems, one a line.
        assess: question after the prompt; "{step}" is the sub-problem.
        work: text that introduces a sub-problem; "{step}" is it, and "{number}" its number.
        conclude: text after the last result, after which the easy policy gives the answer; "": the last result is it.
        yes, no: answers to ``assess``, see ``JudgeVerifier``.
        most_steps: most sub-problems; those after them are left out.
        plan_tokens: most tokens of the list.
    """

    easy: AnyPolicy = field(default_factory=lambda: BestOfN(1))
    hard: AnyPolicy = field(default_factory=lambda: BestOfN(8))
    threshold: float = 0.5
    decompose: str = "\n\nList the steps that solve this, one a line:\n1."
    assess: str = "\n\nStep: {step}\nIs this step difficult? Answer Yes or No:"
    work: str = "\n\nStep {number}: {step}\nResult:"
    conclude: str = "\n\nThe final answer:"
    yes: str = " Yes"
    no: str = " No"
    most_steps: int = 6
    plan_tokens: int = 128
    policy: Literal["selective_allocation"] = field(default="selective_allocation", kw_only=True)

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1 or self.most_steps < 1 or self.plan_tokens < 1:
            raise ValueError(
                f"selective_allocation: threshold = {self.threshold}, most_steps = {self.most_steps}, plan_tokens = "
                f"{self.plan_tokens}; give a threshold from 0 to 1, and 1 or more of the others."
            )
        if "{step}" not in self.assess or "{step}" not in self.work:
            raise ValueError("selective_allocation: assess and work need {step}, the place of the sub-problem.")
        refuse_own_budgets("selective_allocation", (self.easy, self.hard))

    @property
    def width(self) -> int:
        """Sequences at a time: those of the wider mode, or two for each question."""
        return max(self.easy.width, self.hard.width, 2 * self.most_steps)

    def prepared(self, problem: EffortProblem) -> EffortProblem:
        """Problem with this policy's parameters; a grammar is refused, and so is a budget without room for one step."""
        if problem.params.grammar is not None:
            raise ValueError("grammar does not go with selective_allocation, whose steps are texts of their own.")
        ready = super().prepared(problem)
        longest = max(mode.sampling.apply(ready.params).max_tokens for mode in (self.easy, self.hard))
        least = self.plan_tokens + 2 * self.most_steps + longest + 2
        if self.budget is not None and self.budget < least:
            raise ValueError(
                f"budget = {self.budget} tokens; the list of steps, the questions and one step may take {least}. Give "
                "a larger budget, or smaller plan_tokens, most_steps or sampling.max_tokens."
            )
        return ready

    def solve(self, problem: EffortProblem, tools: EffortTools) -> Rounds[EffortSolution]:
        """Solves the sub-problems in order; where the budget ends, the last result is the answer."""
        steps = yield from self.steps(problem, tools)
        hard = yield from self.hard_steps(problem, steps, tools)
        done, context = list[Candidate](), problem
        best: EffortSolution | None = None
        parts = [(self.work.replace("{number}", str(i)), step) for i, step in enumerate(steps, 1)]
        modes = [self.hard if one else self.easy for one in hard]
        if self.conclude:
            parts, modes = [*parts, (self.conclude, "")], [*modes, self.easy]
        for (template, step), mode in zip(parts, modes, strict=True):
            context = self._after(context, tools.fill(template, step), template.replace("{step}", step))
            longest = mode.sampling.apply(problem.params).max_tokens
            full = len(context.prompt) + longest > tools.max_len or not tools.budget.fits(longest + 2, 1)
            if full and best is not None:
                break
            found = yield from nested(mode, None, context, tools)
            best, done = found, [*done, *found.candidates]
            context = self._after(context, tools.said(best.best), best.best.text)
        assert best is not None
        return replace(best, candidates=tuple(done), tokens=tools.budget.spent)

    def steps(self, problem: EffortProblem, tools: EffortTools) -> Rounds[list[str]]:
        """Sub-problems that the model lists; the problem itself is the only one where it lists none."""
        prompt = problem.prompt + tools.encode(self.decompose, specials=True)
        params = replace(problem.params, n=1, max_tokens=self.plan_tokens, grammar=None, stop=("\n\n",), logprobs=None)
        (found,) = yield from tools.sample([SampleRequest(prompt, params, self.model)])
        lines = found[0].text.splitlines() if found else []
        steps = [re.sub(r"^\s*(?:\d+[.)]|[-*])?\s*", "", line).strip() for line in lines]
        return [step for step in steps if step][: self.most_steps] or [problem.text.strip()]

    def hard_steps(self, problem: EffortProblem, steps: list[str], tools: EffortTools) -> Rounds[list[bool]]:
        """Whether each sub-problem is hard; the questions are one round, and share the prompt's prefix."""
        prompts = [problem.prompt + tools.fill(self.assess, step) for step in steps]
        if tools.budget.fits(1, 2 * len(steps)) < 2 * len(steps):
            return [False] * len(steps)
        found = yield from yes_probabilities(prompts, self.yes, self.no, self.model, tools)
        return [value > self.threshold for value in found]

    def _after(self, problem: EffortProblem, tokens: tuple[int, ...], text: str) -> EffortProblem:
        """Problem whose prompt goes on with a text."""
        return replace(problem, prompt=problem.prompt + tokens, text=problem.text + text)
