"""Lengths of completions that are learned from their prompts: S3's predictor (arXiv:2306.06000, section 3.1).

The paper trains a language model on requests of the past to choose one of ten ranges of lengths for a prompt. Here it
is a linear softmax classifier over the prompt's tokens, trained while it serves: each completion that ends is one step
of AdaGrad (Duchi et al., 2011), some microseconds on the host. It needs no data beforehand, and follows the requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

FEATURES = 4096
"""Weights of a range of lengths for tokens: a token has the one of its id modulo so many."""
LENGTHS = 32
RATE = 1.0
SEEN = 16
"""Prompts in which a token has to be before it counts: rare ones only fit what has been."""
EDGE = 256
"""Tokens at each end of a prompt that are looked at: what is asked for stands there."""
UNKNOWN = 64.0
"""Prediction without data, in tokens."""


class LengthClassifier:
    """Predicts the number of generated tokens from a prompt; a range of lengths is a power of two.

    Attributes:
        weights, squares: float64[32, F] by range and feature: weights, and sums of squared gradients. Features are
            those of tokens, then of 32 ranges of the prompt's length, and one that all prompts have.
        seen: float64[F], prompts that had each.
        sums: float64[32, 2], completions that ended in each range, and their tokens.
    """

    def __init__(self) -> None:
        self.weights = np.zeros((LENGTHS, FEATURES + LENGTHS + 1))
        self.squares = np.full_like(self.weights, 0.01)
        self.seen = np.zeros(self.weights.shape[1])
        self.sums = np.zeros((LENGTHS, 2))

    def predict(self, prompt: Sequence[int], most: int) -> float:
        """Expected number of generated tokens, at most ``most``."""
        known = self.sums[:, 0] > 0
        if not known.any():
            return min(float(most), UNKNOWN)
        mean = self.sums[known, 1] / self.sums[known, 0]
        return float(min(most, self._probabilities(self._features(prompt))[known] @ mean))

    def learn(self, prompt: Sequence[int], generated: int) -> None:
        """Learns from a completion that ended after ``generated`` tokens."""
        label, here = min(int(generated).bit_length(), LENGTHS - 1), self._features(prompt)
        self.seen[_all_features(prompt)] += 1
        self.sums[label] += 1, generated
        gradient = self._probabilities(here)[:, None]
        gradient[label] -= 1
        self.squares[:, here] += gradient**2
        self.weights[:, here] -= RATE * gradient / np.sqrt(self.squares[:, here])

    def _probabilities(self, here: Int[np.ndarray, " F"]) -> Float[np.ndarray, " 32"]:
        """Probability of each range that has been seen, for a prompt with these features."""
        scores = np.where(self.sums[:, 0] > 0, self.weights[:, here].sum(axis=1), -np.inf)
        powers = np.exp(scores - scores.max())
        return powers / powers.sum()

    def _features(self, prompt: Sequence[int]) -> Int[np.ndarray, " F"]:
        """Features of a prompt that have been seen often enough, and the one that all have."""
        found = _all_features(prompt)
        return found[(self.seen[found] >= SEEN) | (found == len(self.seen) - 1)]


def _all_features(prompt: Sequence[int]) -> Int[np.ndarray, " F"]:
    """Features of a prompt: those of its tokens, each once, of its length, and the one that all have."""
    ends = prompt if len(prompt) <= 2 * EDGE else [*prompt[:EDGE], *prompt[-EDGE:]]
    tokens = np.unique(np.asarray(ends, np.int64) % FEATURES)
    return np.append(tokens, [FEATURES + min(len(prompt).bit_length(), LENGTHS - 1), FEATURES + LENGTHS])
