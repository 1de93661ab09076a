"""Compute-optimal choice: the policy that did best on prompts of equal difficulty (arXiv:2408.03314)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float, Int

from jaxllm.config import OneOf
from jaxllm.effort.effort_policy import POLICIES, EffortPolicy, EffortSolution
from jaxllm.effort.sample_rounds import EffortProblem, EffortTools, Rounds
from jaxllm.effort.success_probe import SuccessProbe

AnyPolicy = Annotated[EffortPolicy, OneOf(POLICIES, "policy")]


@dataclass(frozen=True)
class ComputeOptimal(EffortPolicy):
    """Compute-optimal choice among policies by difficulty bins.

    The difficulty of a prompt is the predicted probability that a sample fails. ``fit`` divides it into bins by
    quantiles, and chooses for each bin the policy of the most successes on its prompts.

    Attributes:
        probe: predicts success from the prompt's hidden state.
        edges: difficulties between bins, ascending.
        choices: policy of each bin, the easiest first. They have no budget of their own.
    """

    probe: SuccessProbe
    edges: tuple[float, ...]
    choices: tuple[AnyPolicy, ...]
    policy: Literal["compute_optimal"] = field(default="compute_optimal", kw_only=True)

    def __post_init__(self) -> None:
        if len(self.choices) != len(self.edges) + 1 or list(self.edges) != sorted(self.edges):
            raise ValueError(
                f"compute_optimal: {len(self.choices)} choices and {len(self.edges)} edges; give ascending edges, and "
                "one choice more than edges."
            )
        refuse_own_budgets("compute_optimal", self.choices)

    @property
    def width(self) -> int:
        """Sequences at a time: the most of any choice."""
        return max(choice.width for choice in self.choices)

    @classmethod
    def fit(
        cls,
        probe: SuccessProbe,
        difficulty: Float[np.ndarray, " N"],
        success: Float[np.ndarray, "N M"],
        tokens: Float[np.ndarray, "N M"],
        choices: Sequence[EffortPolicy],
        *,
        bins: int = 5,
        budget: int | None = None,
    ) -> ComputeOptimal:
        """Fits the choice to a table of outcomes.

        Args:
            probe: predicts success; ``difficulty`` is 1 less its predictions.
            difficulty: difficulty of each prompt.
            success: success of each prompt under each policy, 0 to 1.
            tokens: tokens that were spent, likewise; fewer decide between equal successes.
            choices: the policies, whose outcomes were measured at equal budgets.
            bins: number of difficulty bins; fewer where many prompts are equally difficult.
            budget: see ``EffortPolicy``.
        """
        edges = difficulty_edges(difficulty, bins)
        best = best_choices(difficulty, success, tokens, edges)
        return cls(probe, tuple(edges.tolist()), tuple(choices[i] for i in best), budget=budget)

    def difficulty(self, problem: EffortProblem, tools: EffortTools) -> float:
        """Predicted probability that a sample fails."""
        return 1 - self.probe.predict(tools.embed(problem.prompt))

    def solve(self, problem: EffortProblem, tools: EffortTools) -> Rounds[EffortSolution]:
        """Solves a problem by the policy of its bin."""
        choice = self.choices[bisect_right(self.edges, self.difficulty(problem, tools))]
        return (yield from nested(choice, self.budget, problem, tools))


def nested(
    choice: EffortPolicy, budget: int | None, problem: EffortProblem, tools: EffortTools
) -> Rounds[EffortSolution]:
    """Solves a problem by a policy within another one, whose budget it uses."""
    return (yield from choice.solve(replace(choice, budget=budget).prepared(problem), tools))


def refuse_own_budgets(name: str, choices: Sequence[EffortPolicy]) -> None:
    """Refuses budgets of policies within another one.

    Raises:
        ValueError: a policy has one.
    """
    if any(choice.budget is not None for choice in choices):
        raise ValueError(f"{name}: the policies in it have budgets; give the budget to {name}, which they share.")


def difficulty_edges(difficulty: Float[np.ndarray, " N"], bins: int) -> Float[np.ndarray, " E"]:
    """Edges between quantile bins of difficulties; equal edges are one.

    Raises:
        ValueError: no difficulties, or no bins.
    """
    if not len(difficulty) or bins < 1:
        raise ValueError(f"{len(difficulty)} prompts in {bins} difficulty bins; give 1 or more of both.")
    inner = np.quantile(difficulty, np.arange(1, bins) / bins)
    # Of edges between the same two difficulties one is left, so that no bin is empty.
    below, first = np.unique(np.searchsorted(np.unique(difficulty), inner), return_index=True)
    return inner[first[below > 0]]


def best_choices(
    difficulty: Float[np.ndarray, " N"],
    success: Float[np.ndarray, "N M"],
    tokens: Float[np.ndarray, "N M"],
    edges: Float[np.ndarray, " E"],
) -> list[int]:
    """Index of the policy of the most successes in each bin; of equal ones that of fewer tokens, then the first."""
    bins = np.searchsorted(edges, difficulty, side="right")
    out = []
    for number in range(len(edges) + 1):
        rows = bins == number
        totals = list(zip(-success[rows].sum(0), tokens[rows].sum(0), strict=True))
        out.append(min(range(len(totals)), key=totals.__getitem__))
    return out


def held_out_success(
    difficulty: Float[np.ndarray, " N"],
    success: Float[np.ndarray, "N M"],
    tokens: Float[np.ndarray, "N M"],
    folds: Int[np.ndarray, " N"],
    *,
    bins: int = 5,
) -> tuple[float, float]:
    """Mean success and tokens of compute-optimal choices on prompts that they were not chosen by (cross-validation).

    Args:
        folds: fold of each prompt; the choices for a fold are made by the prompts of the others.
    """
    won, spent = np.zeros(len(difficulty)), np.zeros(len(difficulty))
    for fold in np.unique(folds):
        held, kept = folds == fold, folds != fold
        edges = difficulty_edges(difficulty[kept], bins)
        best = np.array(best_choices(difficulty[kept], success[kept], tokens[kept], edges))
        chosen = best[np.searchsorted(edges, difficulty[held], side="right")]
        won[held] = np.take_along_axis(success[held], chosen[:, None], 1)[:, 0]
        spent[held] = np.take_along_axis(tokens[held], chosen[:, None], 1)[:, 0]
    return float(won.mean()), float(spent.mean())
