"""Proposers for tests: they know the tokens of plain decoding, and propose all, some or none of them, or nothing."""

from __future__ import annotations

from typing import Literal

import numpy as np

from jaxllm.infer import Request
from jaxllm.infer.scheduling.sequence import Sequence
from jaxllm.infer.speculate.draft_tree import DraftTree

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
        true = self.tokens_after(sequence, count)
        if self.mode == "all":
            return true
        wrong = [(token + 1 + int(self.rng.integers(self.vocab - 1))) % self.vocab for token in true]
        if self.mode == "none":
            return wrong
        right = int(self.rng.integers(len(true) + 1))
        return [*true[:right], *wrong[right:]][: int(self.rng.integers(count + 1))]

    def tokens_after(self, sequence: Sequence, count: int) -> list[int]:
        """What plain decoding made after a sequence."""
        at = sequence.length - len(sequence.request.prompt)
        return self.known[self._key(sequence)][at : at + count]

    def _key(self, sequence: Sequence) -> tuple[tuple[int, ...], int, int]:
        return tuple(sequence.request.prompt), sequence.request.seed, sequence.number


class OracleTreeProposer(OracleProposer):
    """Proposes trees at random, with tokens of plain decoding on some of their branches, and wrong ones on others."""

    def propose(self, sequence: Sequence, count: int) -> list[int] | DraftTree:
        if self.mode != "some":
            return super().propose(sequence, count)
        true, rng = self.tokens_after(sequence, count), self.rng
        tokens, parents, right = list[int](), list[int](), {-1: 0}
        for number in range(int(rng.integers(count + 1))):
            parent = int(rng.integers(-1, number)) if rng.random() < 0.5 else max(right)
            depth = right.get(parent, len(true))
            token = int(rng.integers(self.vocab))
            if depth < len(true) and rng.random() < 0.7:
                token = true[depth]
            if depth < len(true) and token == true[depth]:
                right[number] = depth + 1
            tokens.append(token)
            parents.append(parent)
        return DraftTree(tuple(tokens), tuple(parents))
