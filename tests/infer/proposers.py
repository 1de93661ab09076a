"""Proposers for tests: they know the tokens of plain decoding, and propose all, some or none of them, or nothing."""

from __future__ import annotations

from typing import Literal

import numpy as np

from jaxllm.infer import Request
from jaxllm.infer.engine.sequence import Sequence

Mode = Literal["all", "some", "none", "silent"]


class OracleProposer:
    """Proposes the tokens that plain decoding made: "all" as they are, "some" with mistakes, "none" right.

    It proposes nothing if "silent".

    Attributes:
        known: tokens of each sequence after its prompt.
    """

    def __init__(self, mode: Mode, rng: np.random.Generator, vocab: int):
        self.mode, self.rng, self.vocab = mode, rng, vocab
        self.known: dict[tuple[tuple[int, ...], int, int], list[int]] = {}

    def learn(self, requests: list[Request]) -> None:
        for request in requests:
            for sequence in request.sequences:
                self.known[self._key(sequence)] = sequence.tokens[len(request.prompt) :]

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        assert sequence.pending == 0, "its last token is not known"
        if self.mode == "silent":
            return []
        at = sequence.length - len(sequence.request.prompt)
        true = self.known[self._key(sequence)][at : at + count]
        if self.mode == "all":
            return true
        wrong = [(token + 1 + int(self.rng.integers(self.vocab - 1))) % self.vocab for token in true]
        if self.mode == "none":
            return wrong
        right = int(self.rng.integers(len(true) + 1))
        return [*true[:right], *wrong[right:]][: int(self.rng.integers(count + 1))]

    def _key(self, sequence: Sequence) -> tuple[tuple[int, ...], int, int]:
        return tuple(sequence.request.prompt), sequence.request.seed, sequence.number
