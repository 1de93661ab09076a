"""Success probe: predicts from a hidden state of the model how likely one sample is to succeed (arXiv:2410.04707)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True)
class SuccessProbe:
    """Logistic regression on a hidden state: probability of success = sigmoid(weights . hidden + bias).

    Attributes:
        weights: one number for each element of the hidden state.
        bias: constant term.
    """

    weights: tuple[float, ...]
    bias: float

    @classmethod
    def fit(
        cls, hidden: Float[np.ndarray, "N D"], success: Float[np.ndarray, " N"], *, penalty: float = 1e-3
    ) -> SuccessProbe:
        """Fits a probe to success rates by Newton's method, to the minimum of a convex loss.

        The loss is the mean binary cross-entropy with the rates plus ``penalty / 2`` times the squared norm of the
        weights of hidden states that are scaled to unit variance.

        Args:
            hidden: hidden states.
            success: share of samples that succeeded, 0 to 1.
            penalty: weight of the penalty, above 0.

        Raises:
            ValueError: no rows, rates outside 0 to 1, or a penalty that is not positive.
        """
        if not len(hidden) or not ((success >= 0) & (success <= 1)).all():
            raise ValueError("a probe is fitted to one or more hidden states with success rates from 0 to 1.")
        if not 0 < penalty < math.inf:
            raise ValueError(f"penalty = {penalty}; give a positive number, without which no minimum may exist.")
        states = np.asarray(hidden, np.float64)
        mean, scale = states.mean(0), states.std(0) + 1e-6
        x = np.concatenate([(states - mean) / scale, np.ones((len(states), 1))], 1)
        ridge = np.diag([penalty] * states.shape[1] + [1e-9])

        def loss(w: np.ndarray) -> float:
            z = x @ w
            return float((np.logaddexp(0, z) - success * z).mean() + 0.5 * w @ ridge @ w)

        w = np.zeros(x.shape[1])
        for _ in range(100):
            p = 1 / (1 + np.exp(-np.clip(x @ w, -500, 500)))
            gradient = x.T @ (p - success) / len(x) + ridge @ w
            if np.abs(gradient).max() < 1e-12:
                break
            hessian = (x.T * (p * (1 - p))) @ x / len(x) + ridge
            step, size = np.linalg.solve(hessian, gradient), 1.0
            while size > 1e-6 and loss(w - size * step) > loss(w):
                size /= 2
            w = w - size * step
        weights = w[:-1] / scale
        return cls(tuple(weights.tolist()), float(w[-1] - weights @ mean))

    def predict(self, hidden: np.ndarray | Sequence[float]) -> float:
        """Predicted probability of success.

        Raises:
            ValueError: the hidden state is of another size, so of another model.
        """
        if len(hidden) != len(self.weights):
            raise ValueError(
                f"the probe was fitted to hidden states of {len(self.weights)} elements, and this model's have "
                f"{len(hidden)}: fit it again for this model."
            )
        z = float(np.dot(np.asarray(hidden, np.float64), self.weights)) + self.bias
        return 1 / (1 + math.exp(-max(-500.0, min(500.0, z))))
