"""Integer constraint solver for block sizes: all assignments that fit divisibility and memory limits.

Modelled on ConstrINT (FlashRNN, arXiv:2412.07752). A problem has variables with finite domains of positive numbers and
two kinds of constraints: a sum of products is at most a limit (bytes of VMEM or shared memory, work of a grid step),
and a variable divides a number or another variable. The solver assigns variables in order, the one with the smallest
domain first, and leaves a branch as soon as the least value of a sum, over the domains of the variables that are not
assigned, is above its limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SumLimit:
    """Constraint that a sum of products of variables is at most a limit.

    Attributes:
        terms: (coefficient of at least 0, names of the variables multiplied) of each product; no names: a constant.
        most: the limit.
        what: what is limited, for messages, such as "bytes of VMEM".
    """

    terms: tuple[tuple[float, tuple[str, ...]], ...]
    most: float
    what: str

    def __post_init__(self) -> None:
        if any(coefficient < 0 for coefficient, _ in self.terms):
            raise ValueError(
                f"{self.what}: a coefficient is negative; the solver needs sums that grow with each variable."
            )

    def least(self, values: Mapping[str, int]) -> float:
        """The sum with these values."""
        return sum(coefficient * math.prod(values[name] for name in names) for coefficient, names in self.terms)


@dataclass(frozen=True)
class BlockProblem:
    """Integer constraint problem of block sizes.

    Attributes:
        domains: variable -> its candidates, positive whole numbers.
        limits: limits of sums of products.
        divides: (variable, number or variable that it must divide).
    """

    domains: Mapping[str, Sequence[int]]
    limits: tuple[SumLimit, ...] = ()
    divides: tuple[tuple[str, int | str], ...] = ()
    _order: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, domain in self.domains.items():
            if not domain or any(type(value) is not int or value < 1 for value in domain):
                raise ValueError(
                    f"{name}: the candidates are {list(domain)}; give positive whole numbers, at least one."
                )
        used = {name for limit in self.limits for _, names in limit.terms for name in names}
        used |= {name for pair in self.divides for name in pair if isinstance(name, str)}
        if unknown := sorted(used - set(self.domains)):
            raise ValueError(f"a constraint names {', '.join(unknown)}; the variables are {', '.join(self.domains)}.")
        object.__setattr__(self, "_order", tuple(sorted(self.domains, key=lambda name: len(set(self.domains[name])))))

    def satisfied(self, values: Mapping[str, int]) -> bool:
        """Whether an assignment of all variables fits all constraints."""
        return all(limit.least(values) <= limit.most for limit in self.limits) and all(
            (values[of] if isinstance(of, str) else of) % values[name] == 0 for name, of in self.divides
        )

    def solutions(self) -> Iterator[dict[str, int]]:
        """All assignments that fit, each once; variables are in the order of ``domains``."""
        least = {name: min(domain) for name, domain in self.domains.items()}
        yield from self._assign(0, {}, least)

    def _assign(self, depth: int, values: dict[str, int], least: dict[str, int]) -> Iterator[dict[str, int]]:
        """Solutions that extend ``values``; ``least`` has the least value of each variable, assigned or not."""
        if depth == len(self._order):
            yield {name: values[name] for name in self.domains}
            return
        name = self._order[depth]
        for value in sorted(set(self.domains[name])):
            now = least | {name: value}
            if any(limit.least(now) > limit.most for limit in self.limits):
                return  # a larger value makes no sum smaller
            assigned = values | {name: value}
            if self._divides(assigned):
                yield from self._assign(depth + 1, assigned, now)

    def _divides(self, values: Mapping[str, int]) -> bool:
        """Whether the divisibility constraints hold whose variables are all assigned."""
        for name, of in self.divides:
            whole = values.get(of) if isinstance(of, str) else of
            if name in values and whole is not None and whole % values[name]:
                return False
        return True

    def why_empty(self) -> str:
        """Reason why there is no solution: each constraint that the smallest sizes break; for messages."""
        least = {name: min(domain) for name, domain in self.domains.items()}
        broken = [
            f"{limit.what}: the smallest sizes need {limit.least(least):,.0f}, and {limit.most:,.0f} are there"
            for limit in self.limits
            if limit.least(least) > limit.most
        ]
        return "; ".join(broken) or "no sizes divide what they must and fit the limits together"
