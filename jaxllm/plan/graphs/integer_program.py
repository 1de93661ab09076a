"""Integer program: variables and rows added one by one, minimised by HiGHS (``scipy.optimize.milp``)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from scipy import optimize, sparse


class IntegerProgram:
    """Variables between 0 and 1 with costs, and linear constraints on them; the sum of costs is minimised."""

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._whole: list[int] = []
        self._rows: list[Mapping[int, float]] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def variable(self, cost: float = 0.0, *, whole: bool = True) -> int:
        """Adds a variable, 0 or 1, or any number between them if it is not ``whole``; returns its index."""
        self._costs.append(cost)
        self._whole.append(int(whole))
        return len(self._costs) - 1

    def row(self, coefficients: Mapping[int, float], low: float = -math.inf, high: float = math.inf) -> None:
        """Adds the constraint that a sum of variables, each times its coefficient, is between two numbers."""
        if coefficients:
            self._rows.append(coefficients)
            self._low.append(low)
            self._high.append(high)

    def minimise(self, seconds: float | None = None) -> tuple[np.ndarray, bool] | None:
        """Values of the variables with the least cost, and whether it is known to be the least; None if there are none.

        Costs are divided by the largest, so that the solver's tolerances are relative.

        Args:
            seconds: after which the best solution so far is taken.

        Raises:
            TimeoutError: there is no solution so far.
        """
        costs = np.array(self._costs)
        scale = float(np.abs(costs).max(initial=0.0)) or 1.0
        at = [(r, i, x) for r, row in enumerate(self._rows) for i, x in row.items()]
        rows, columns, numbers = zip(*at, strict=True) if at else ((), (), ())
        matrix = sparse.csr_array((numbers, (rows, columns)), shape=(len(self._rows), len(costs)))
        found = optimize.milp(
            costs / scale,
            integrality=np.array(self._whole),
            bounds=optimize.Bounds(0, 1),
            constraints=optimize.LinearConstraint(matrix, np.array(self._low), np.array(self._high)),  # pyright: ignore[reportArgumentType]
            options={"mip_rel_gap": 0.0} | ({} if seconds is None else {"time_limit": seconds}),
        )
        if found.x is None:
            if found.status == 1:
                raise TimeoutError(f"the integer program has no solution after {seconds} s: give it more time.")
            return None
        return found.x, found.status == 0
