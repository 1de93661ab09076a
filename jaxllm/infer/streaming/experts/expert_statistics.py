"""Statistics of routing: which experts tokens take after those of the layer before (EdgeMoE, arXiv:2308.14352).

A guess from them needs no weights of the next layer, as asking its router ahead does, and costs no program.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int


class ExpertStatistics:
    """Counts of pairs of experts that the same token took, of two layers that follow each other.

    Args:
        before: E', number of experts of the layer before.
        experts: E, number of experts of the layer.
    """

    def __init__(self, before: int, experts: int):
        self._pairs = np.zeros((before, experts))

    def see(self, before: Int[np.ndarray, "T B"], chosen: Int[np.ndarray, "T A"]) -> None:
        """Counts the pairs of a step.

        Args:
            before: experts of each token in the layer before; E' where one has weight 0.
            chosen: in this layer; E where one has weight 0.
        """
        rows, columns = self._pairs.shape
        first, second = np.broadcast_arrays(before[:, :, None], chosen[:, None, :])
        taken = (first < rows) & (second < columns)
        np.add.at(self._pairs, (first[taken], second[taken]), 1)

    def guess(self, before: Int[np.ndarray, "T B"], count: int) -> Int[np.ndarray, "T A"]:
        """The ``count`` experts that each token takes most probably; E where nothing is known of its own before.

        Args:
            before: experts of each token in the layer before; E' where one has weight 0.
            count: A, experts of a token.
        """
        rows, columns = self._pairs.shape
        shares = self._pairs / np.maximum(self._pairs.sum(axis=1, keepdims=True), 1)
        shares = np.concatenate([shares, np.zeros((1, columns))])[np.minimum(before, rows)].sum(axis=1)
        best = np.argsort(-shares, axis=1, kind="stable")[:, :count]
        return np.where(np.take_along_axis(shares, best, axis=1) > 0, best, columns)
