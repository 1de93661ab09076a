"""Slot rates: how long layers take with some of their experts in slots, as ``jaxllm bench MODEL --tiers`` measures."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class SlotRates:
    """Seconds of all layers, loads of experts included, by shares of the experts in slots and tokens of the step.

    Attributes:
        tokens: tokens of a step, ascending.
        shares: of each layer's experts that were in slots, ascending to 1.
        host: for each share, seconds for so many tokens, with the other experts in host memory; each layer was guessed
            by the one before it, and its experts were loaded ahead.
        host_late: the same with nothing loaded ahead; empty: as ``host``.
        files: as ``host``, with all other experts in files; empty: not measured.
        files_late: the same with nothing loaded ahead; empty: as ``files``.
        loaders: threads that read these files.
    """

    tokens: tuple[int, ...]
    shares: tuple[float, ...]
    host: Rows
    host_late: Rows = ()
    files: Rows = ()
    files_late: Rows = ()
    loaders: int = 2

    def __post_init__(self) -> None:
        shares, many = self.shares, len(self.tokens)
        if not shares or list(shares) != sorted(set(shares)) or min(shares) <= 0 or shares[-1] != 1:
            raise ValueError(f"slot rates: shares = {shares}; give them above 0, ascending to 1.")
        for name in ("host", "host_late", "files", "files_late"):
            rows: Rows = getattr(self, name)
            if [len(row) for row in rows] != [many] * len(shares) and (rows or name == "host"):
                raise ValueError(f"slot rates: {name} needs a row for each of the shares, of as many as tokens.")
            if not all(number > 0 for number in itertools.chain.from_iterable(rows)):
                raise ValueError(f"slot rates: {name} has to be above 0.")
        if self.loaders < 1:
            raise ValueError(f"slot rates: loaders = {self.loaders}; give 1 or more.")

    def seconds(
        self, tokens: int, share: float, *, tier: Literal["host", "files"] = "host", late: float = 0.0
    ) -> float:
        """Seconds of all layers for a step of so many tokens with a share of their experts in slots.

        Linear between measured shares; below them it grows as between the least two, and does not fall.

        Args:
            tokens: of the step; linear between measured ones, proportional beyond.
            share: of the experts, in slots.
            tier: where the others are loaded from.
            late: share of the layers for which nothing is loaded ahead.

        Raises:
            ValueError: no loads from files were measured.
        """
        rows: Rows = getattr(self, tier)
        if not rows:
            raise ValueError("slot rates: no loads of experts from files were measured.")
        ahead = self._at(rows, tokens, share)
        return ahead + late * (self._at(getattr(self, f"{tier}_late") or rows, tokens, share) - ahead)

    def _at(self, rows: Rows, tokens: int, share: float) -> float:
        at = [seconds_of(tokens, self.tokens, row) for row in rows]
        found, below = float(np.interp(share, self.shares, at)), self.shares[0] - share
        if below <= 0 or len(at) == 1:
            return found
        return found + below * max(0.0, at[0] - at[1]) / (self.shares[1] - self.shares[0])


def seconds_of(tokens: int, known: tuple[int, ...], seconds: tuple[float, ...]) -> float:
    """Seconds for so many tokens: linear between those that are known, proportional beyond."""
    if tokens > known[-1]:
        return seconds[-1] * tokens / known[-1]
    return float(np.interp(tokens, known, seconds))
